"""What was found by trying to break packed weights."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from support.small import IDS, Block, Model  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from tpde.errors import PackedWeight  # noqa: E402
from tpde.nn import pack_module, unpack_module  # noqa: E402
from tpde.weights.parameter import PackedParameter  # noqa: E402


def both(plain: Any) -> tuple[Any, Any]:
    """A plain model whose weights shrink, and its packed copy."""
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(parameter.bfloat16())
    return plain, pack_module(copy.deepcopy(plain), min_bytes=0)


def same(one: Any, other: Any) -> bool:
    """Whether two tensors have the same bits."""
    one, other = (it.detach().resolve_conj().contiguous().view(torch.uint8) for it in (one, other))
    return bool(torch.equal(one, other))


class Complex(nn.Linear):
    """A layer of complex numbers, whose weight is conjugated without a copy."""

    def forward(self, x: Any) -> Any:
        weight = torch.view_as_complex(self.weight.view(self.out_features, -1, 2)).conj()
        return torch.view_as_real(x.unsqueeze(-2) * weight).sum((-1, -2))


class Negative(nn.Linear):
    """A layer whose weight is negated without a copy."""

    def forward(self, x: Any) -> Any:
        weight = torch.view_as_complex(self.weight.view(self.out_features, -1, 2)).conj().imag
        return functional.linear(x.imag, weight)


@pytest.mark.parametrize("layer", [Complex, Negative])
def test_gradients_through_a_conjugated_weight(layer: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 32, dtype=torch.complex64)
    grads = []
    for model in both(layer(64, 48)):
        given = x.clone().requires_grad_()
        model(given).sum().backward()
        grads.append(given.grad)
    assert same(*map(torch.view_as_real, grads))


class Overwrites(Block):
    """A block that changes what its backward pass needs."""

    def forward(self, x: Any) -> Any:
        hidden = torch.exp(self.up(x))
        result = self.down(hidden * hidden)
        hidden.add_(1)
        return result


def test_what_the_backward_pass_needs_was_changed() -> None:
    for model in both(Model(block=Overwrites)):
        with pytest.raises(RuntimeError, match="version"):
            model(IDS).sum().backward()


def test_rows_that_were_looked_up_can_be_changed() -> None:
    found = []
    for model in both(nn.Embedding(50, 64)):
        rows = model(IDS)
        rows.mul_(2)
        rows[0] = 3
        found.append(rows)
    assert found[1].requires_grad
    assert same(*found)


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: torch._foreach_mul_([weight[0]], 2.0),
        lambda weight: functional.relu(weight[0], inplace=True),
        lambda weight: torch.frexp(torch.ones(64), out=(weight[0], torch.empty(64, dtype=torch.int32))),
    ],
)
def test_changes_of_pieces_are_refused(change: Any) -> None:
    _, model = both(nn.Linear(64, 64))
    with torch.no_grad(), pytest.raises(PackedWeight, match="lost"):
        change(model.weight)


def test_arrays_of_a_copy_are_read_only() -> None:
    plain, model = both(nn.Linear(64, 64))
    weight = model.weight.detach()
    arrays = [weight.numpy(), weight[0].numpy(), np.asarray(weight), weight.t().numpy()]
    for array in arrays:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    assert np.array_equal(arrays[0], plain.weight.detach().numpy())
    own = weight.numpy().copy()
    own[0] = 1


def padded(model: Any, x: Any) -> Any:
    """What an encoder makes of two sequences, of which one is padded."""
    mask = torch.zeros(x.shape[:2], dtype=torch.bool)
    mask[1, 4:] = True
    return model(x, src_key_padding_mask=mask)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("make", "call"),
    [
        (lambda layer: layer, lambda model, x: model(x)),
        (lambda layer: nn.TransformerEncoder(layer, 2), padded),
        (lambda layer: layer.self_attn, lambda model, x: model(x, x, x, need_weights=False)[0]),
    ],
    ids=["layer", "encoder", "attention"],
)
def test_fast_paths_of_transformers(make: Any, call: Any) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    plain, packed = both(make(layer).eval())
    x = torch.randn(2, 7, 64)
    with torch.no_grad():
        assert same(call(plain, x), call(packed, x))


class Convolutions(nn.Module):
    """Of which one is a block, and one takes single pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(16, 32, 3)
        self.layers = nn.ModuleList([nn.Sequential(nn.Conv2d(32, 48, 1), nn.SiLU(), nn.Conv2d(48, 32, 3))])

    def forward(self, x: Any) -> Any:
        return self.layers[0](self.first(x))


@pytest.mark.parametrize("how", ["itself", "deepcopy", "pickle", "unpacked"])
@pytest.mark.parametrize("gradients", [False, True])
def test_channels_last(how: str, gradients: bool) -> None:
    torch.manual_seed(0)
    plain, packed = both(Convolutions())
    x = torch.randn(2, 16, 12, 12)
    for form in (torch.channels_last, torch.contiguous_format):
        assert packed.to(memory_format=form) is packed
        plain.to(memory_format=form)
        ours = {
            "itself": lambda: packed,
            "deepcopy": lambda: copy.deepcopy(packed),
            "pickle": lambda: pickle.loads(pickle.dumps(packed)),
            "unpacked": lambda: unpack_module(copy.deepcopy(packed)),
        }[how]()
        expected = dict(plain.named_parameters())
        for name, parameter in ours.to("cpu").named_parameters():
            assert parameter.stride() == expected[name].stride(), name
            assert parameter.detach().clone().stride() == expected[name].stride(), name
        for given in (x, x.to(memory_format=torch.channels_last)):
            results, grads = [], []
            for model in (plain, ours):
                leaf = given.clone().requires_grad_(gradients)
                with torch.set_grad_enabled(gradients):
                    results.append(model(leaf))
                if gradients:
                    results[-1].square().sum().backward()
                    grads.append(leaf.grad)
            assert results[0].stride() == results[1].stride()
            assert same(*results)
            assert not gradients or same(*grads)


def test_channels_last_of_volumes() -> None:
    torch.manual_seed(0)
    plain, packed = (it.to(memory_format=torch.channels_last_3d) for it in both(nn.Conv3d(4, 32, 3)))
    assert packed.weight.stride() == plain.weight.stride()
    x = torch.randn(2, 4, 8, 8, 8)
    assert same(packed(x), plain(x))


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("make", [lambda: nn.Conv2d(64, 32, 1), lambda: nn.Conv2d(512, 512, 3, groups=512)])
def test_channels_last_where_a_size_is_1(make: Any, trained: bool, before: bool) -> None:
    """Such weights are contiguous as well, and PyTorch chooses kernels by their strides."""
    torch.manual_seed(0)
    plain = make().bfloat16().requires_grad_(trained)
    packed = copy.deepcopy(plain)
    for model in (plain, packed) if before else (plain,):
        model.to(memory_format=torch.channels_last)
    pack_module(packed, min_bytes=0)
    if not before:
        packed.to(memory_format=torch.channels_last)
    assert isinstance(packed.weight, PackedParameter)
    for model in (packed, unpack_module(copy.deepcopy(packed))):
        assert model.weight.stride() == plain.weight.stride()
        given = [torch.ones(2, plain.in_channels, 9, 9).bfloat16().requires_grad_() for _ in range(2)]
        results = [it(x) for it, x in zip((plain, model), given, strict=True)]
        assert results[1].stride() == results[0].stride()
        assert same(results[1], results[0])
        for result in results:
            result.square().sum().backward()
        assert same(given[1].grad, given[0].grad)


def test_channels_last_compiled() -> None:
    torch.manual_seed(0)
    plain, packed = both(Convolutions())
    packed.to(memory_format=torch.channels_last)
    plain.to(memory_format=torch.channels_last)
    x = torch.randn(2, 16, 12, 12).to(memory_format=torch.channels_last)
    compiled = torch.compile(packed, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert same(compiled(x), plain(x))


def test_another_memory_format_is_refused() -> None:
    plain, packed = both(nn.Sequential(nn.Conv2d(16, 32, 3), nn.Linear(10, 64)))
    x = torch.randn(2, 16, 12, 12)
    with pytest.raises(PackedWeight, match="memory format"):
        packed._apply(lambda it: it.transpose(0, -1).contiguous().transpose(0, -1) if it.dim() > 1 else it)
    assert same(plain(x), packed.to(x.device)(x))


def test_packing_again_what_was_unpacked() -> None:
    _, model = both(Model())
    unpack_module(model.blocks[0])
    pack_module(model, min_bytes=0)
    assert isinstance(model.blocks[0].up.weight, PackedParameter)


def test_the_storage_of_a_weight_is_kept() -> None:
    plain, model = both(Model())
    kept: list[Any] = []
    model.blocks[0].up.register_forward_hook(lambda layer, *_: kept.append(layer.weight.untyped_storage()))
    with torch.no_grad():
        model(IDS)
    assert plain.blocks[0].up.weight.detach().numpy().tobytes() in bytes(kept[0])


def test_a_weight_in_the_place_of_a_packed_one_is_cast() -> None:
    _, model = both(nn.Linear(64, 64))
    model._parameters["weight"] = nn.Parameter(torch.zeros(64, 64, dtype=torch.float64))
    model.to(torch.float32)
    assert model.weight.dtype is torch.float32
    assert not model.weight.any()
    assert type(model.weight) is nn.Parameter
