"""What of a model is packed, what is left plain, and what it is told of."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.models import assert_same_bits, torch
from support.small import Model
from torch import nn

import tpde
import tpde.torch
from tpde.errors import InvalidArgument
from tpde.format.constants import ALIGN_BLOB
from tpde.nn import PackedParameter, pack_module, pack_tensor, packed_modules, supports
from tpde.nn.modules import is_conv1d


def test_what_is_packed(pair: tuple[Model, Model]) -> None:
    plain, packed = pair
    names = [name for name, _ in packed_modules(packed)]
    assert names == ["embed", *(f"blocks.{i}.{n}" for i in range(3) for n in ("up", "down")), "head"]
    assert isinstance(packed.blocks[0].up, nn.Linear)
    assert isinstance(packed.embed, nn.Embedding)
    assert "packed=0." in repr(packed.blocks[0].up)
    kinds = {name: type(parameter) for name, parameter in packed.named_parameters()}
    assert [name for name, kind in kinds.items() if kind is nn.Parameter] == [
        f"blocks.{i}.{name}" for i in range(3) for name in ("norm.weight", "norm.bias", "up.bias")
    ]
    assert list(kinds) == [name for name, _ in plain.named_parameters()]
    assert list(packed.state_dict()) == list(plain.state_dict())
    assert set(kinds.values()) == {nn.Parameter, PackedParameter}


def test_weights_smaller_than_asked_for_stay_plain() -> None:
    sizes = {"0": 64 * 64 * 4, "1": 64 * 32 * 4}
    for least, expected in (
        (0, ["0", "1"]),
        (sizes["1"] + 1, ["0"]),
        (sizes["0"], ["0"]),
        (sizes["0"] + 1, []),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
        assert pack_module(model, min_bytes=least) is model
        assert [name for name, _ in packed_modules(model)] == expected


@pytest.mark.parametrize("least", ["x", None, float("nan"), -1, 1.5, True])
def test_a_size_that_is_none_is_refused(least: Any) -> None:
    model = nn.Linear(64, 64)
    with pytest.raises(InvalidArgument, match=f"`min_bytes` is {least!r}; give a number of bytes"):
        pack_module(model, min_bytes=least)
    assert type(model) is nn.Linear


def test_how_many_parameters_are_no_longer_trained_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight.requires_grad_(False)
    with caplog.at_level("INFO", "tpde"):
        pack_module(model, min_bytes=0)
        assert caplog.messages == ["packed parameters of the Sequential that are no longer trained: 2"]
        caplog.clear()
        pack_module(model, min_bytes=0)
        pack_module(nn.Linear(64, 64).requires_grad_(False), min_bytes=0)
        assert caplog.messages == []


def test_what_is_left_plain() -> None:
    assert not supports(nn.LayerNorm(64), "weight")
    assert not supports(nn.Linear(8, 8), "bias")
    assert not supports(nn.Embedding(8, 8, max_norm=1.0), "weight")
    assert supports(nn.Conv1d(8, 8, 3), "weight")
    mixed = nn.Sequential(nn.Linear(64, 64), nn.LSTM(64, 64))
    pack_module(mixed, min_bytes=0)
    assert [name for name, _ in packed_modules(mixed)] == ["0"]
    turned = nn.Linear(64, 64)
    turned.weight = nn.Parameter(turned.weight.detach().t())
    pack_module(turned, min_bytes=0)
    assert type(turned) is nn.Linear
    noise = nn.Linear(64, 64)
    noise.weight.data.view(torch.int32).random_(-(2**31), 2**31 - 1)
    pack_module(noise, min_bytes=0)
    assert type(noise) is nn.Linear


def test_a_model_of_which_nothing_is_packed_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    turned, noise, tiny = nn.Linear(64, 64), nn.Linear(64, 64, bias=False), nn.Linear(64, 64)
    turned.weight = nn.Parameter(turned.weight.detach().t())
    noise.weight.data.view(torch.int32).random_(-(2**31), 2**31 - 1)
    frozen = nn.Sequential(nn.LSTM(64, 64).requires_grad_(False), tiny)  # of which the adapter alone could be
    for model, least, said in (
        (nn.Linear(64, 63), None, r"smaller than `min_bytes=16384` \(1\), of layers that keep .* \(1\)"),
        (turned, 0, "no contiguous tensors of floats"),
        (noise, 0, "such that they would not shrink"),
        (frozen, 0, r"are of layers that keep .* \(5\), trained, where most of the model is frozen \(1\)"),
        (nn.TransformerEncoderLayer(64, 4), 0, r"kernels by \([0-9]"),
        (nn.LayerNorm(64), 0, "nothing of the LayerNorm was packed: its parameters are of layers that keep"),
        (nn.ReLU(), 0, "no parameters"),
    ):
        caplog.clear()
        with caplog.at_level("WARNING", "tpde"):
            pack_module(model, **({} if least is None else {"min_bytes": least}))
        (record,) = caplog.records
        assert re.search(said, record.getMessage()), record.getMessage()
        assert not list(packed_modules(model))
    caplog.clear()
    for _ in range(2):  # what is packed already is
        pack_module(tiny, min_bytes=0)
    assert not caplog.records


class Holds(nn.Module):
    """Holds a parameter."""

    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__()
        self.it = parameter

    def forward(self, x: Any) -> Any:
        return self.it.sum() + x


def test_which_parameters_can_be_packed() -> None:
    fused = torch.randn(4, 32, 32).bfloat16()
    assert supports(Holds(nn.Parameter(fused)), "it")
    assert not supports(Holds(nn.Parameter(fused[:1])), "it")
    assert not supports(Holds(nn.Parameter(fused[0])), "it")
    assert not supports(Holds(nn.Parameter(fused[None])), "it")
    assert not supports(Holds(nn.Parameter(fused)), "other")
    assert not supports(nn.Bilinear(4, 4, 4), "weight")
    assert not supports(nn.Linear(4, 4, bias=False), "bias")
    assert not supports(nn.Conv2d(4, 4, 3), "bias")
    assert not supports(nn.Embedding(8, 8, sparse=True), "weight")
    assert supports(nn.Embedding(8, 8), "weight")
    for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear):
        assert supports(kind(4, 4, 3), "weight")
    assert not supports(nn.ConvTranspose2d(4, 4, 3), "weight")


def test_only_transformers_own_turned_layers_are_taken_for_such() -> None:
    theirs = type("Conv1D", (nn.Module,), {})
    assert not is_conv1d(theirs)
    theirs.__module__ = "transformers.pytorch_utils"
    assert is_conv1d(theirs)
    assert not is_conv1d(type("Other", (nn.Module,), {"__module__": "transformers.pytorch_utils"}))


class Kind(nn.Parameter):
    """Somebody's own."""


@pytest.mark.parametrize(
    "make",
    [
        Kind,
        lambda values: nn.Parameter(values.transpose(1, 2)),
        lambda values: nn.Parameter((values * 100).to(torch.int32), requires_grad=False),
        lambda values: nn.Parameter(values.to("meta")),
        lambda values: nn.Parameter(values.to_sparse()),
        lambda values: nn.Parameter(values.to(torch.complex64)),
    ],
    ids=["class", "strides", "integers", "meta", "sparse", "complex"],
)
def test_parameters_of_other_kinds_stay_as_they_are(make: Any) -> None:
    parameter = make(torch.randn(4, 32, 32).bfloat16().float())
    model = pack_module(Holds(parameter), min_bytes=0)
    assert type(model) is Holds
    assert model.it is parameter


def test_a_parameter_is_packed_if_all_who_hold_it_can() -> None:
    layer = nn.Linear(32, 32, bias=False).bfloat16()
    for holders in ([layer, Holds(layer.weight)], [Holds(layer.weight), layer]):
        assert [*packed_modules(pack_module(nn.Sequential(*holders), min_bytes=0))] == []
    assert len([*packed_modules(pack_module(nn.Sequential(layer, layer), min_bytes=0))]) == 1


@pytest.mark.parametrize("trained", [200, 320, 440])
def test_the_smaller_part_is_trained(trained: int) -> None:
    """As adapters are; of two halves, both are packed."""
    model = nn.ModuleList([nn.Linear(64, size, bias=False) for size in (trained, 640 - trained)])
    model[1].requires_grad_(False)
    pack_module(model.bfloat16(), min_bytes=0)
    kinds = [isinstance(it.weight, PackedParameter) for it in model]
    assert kinds == [trained >= 320, True]


def test_parts_of_a_tied_weight_are_counted_once() -> None:
    model = nn.ModuleList([nn.Linear(64, 20, bias=False), *(nn.Linear(64, 30, bias=False) for _ in range(3))])
    model[0].requires_grad_(False)
    for layer in model[2:]:
        layer.weight = model[1].weight
    model.append(nn.Linear(64, 20, bias=False).requires_grad_(False))
    pack_module(model.bfloat16(), min_bytes=0)
    assert type(model[1]) is nn.Linear, "30 rows are trained, 40 are not"
    assert isinstance(model[0].weight, PackedParameter)


def test_weights_that_share_some_memory_stay_plain_and_tied() -> None:
    model = nn.ModuleList([nn.Linear(64, 32), nn.Linear(32, 64), *(nn.Linear(64, 32) for _ in range(4))])
    model[1].weight = nn.Parameter(model[0].weight.data.t())
    model[3].weight.data = model[2].weight.data[:16]
    both = torch.randn(64, 64)
    model[4].weight.data, model[5].weight.data = both[:32], both[32:]
    pack_module(model, min_bytes=0)
    assert [type(it.weight) for it in model] == [*[nn.Parameter] * 4, *[PackedParameter] * 2]
    with torch.no_grad():
        model[0].weight.zero_()
        model[2].weight.zero_()
    assert not model[1].weight.any()
    assert not model[3].weight.any()


@pytest.mark.parametrize("model", ["llama", {"weight": torch.zeros(2, 2)}])
def test_what_is_no_module_is_not_packed(model: Any) -> None:
    with pytest.raises(tpde.InvalidArgument, match=r"takes a `torch\.nn\.Module`, not a `(str|dict)`"):
        tpde.pack_module(model)


@pytest.mark.parametrize(
    "call",
    [
        tpde.unpack_module,
        tpde.nn.plain_state_dict,
        lambda model: list(tpde.nn.packed_modules(model)),
        lambda model: tpde.nn.set_kernels(model, "fused"),
        lambda model: tpde.torch.save_model(model, "none"),
        lambda model: tpde.torch.load_model(model, "none"),
    ],
)
def test_what_is_no_module_has_no_packed_ones(call: Any) -> None:
    for model in (None, {"weight": torch.zeros(2, 2)}):
        with pytest.raises(
            tpde.InvalidArgument, match=r"` takes a `torch\.nn\.Module`, not a `(NoneType|dict)`"
        ):
            call(model)


def test_modules_of_torchscript_stay_plain(caplog: pytest.LogCaptureFixture) -> None:
    """Their code computes with plain weights."""
    scripted = torch.jit.script(nn.Linear(300, 30))
    model = nn.Sequential(nn.Linear(200, 300), scripted).requires_grad_(False)
    x = torch.randn(2, 200)
    expected = model(x)
    pack_module(model, min_bytes=0)
    assert isinstance(model[0].weight, PackedParameter)
    assert torch.equal(model(x), expected)
    pack_module(scripted, min_bytes=0)
    assert "nothing of the RecursiveScriptModule was packed" in caplog.text


def test_a_parameter_without_a_shape_is_refused() -> None:
    model = nn.Sequential(nn.Linear(20, 20), nn.LazyLinear(30))
    with pytest.raises(tpde.InvalidArgument, match=r"`1\.weight` has no shape yet"):
        pack_module(model, min_bytes=0)
    assert type(model[0].weight) is nn.Parameter


# ---- a tensor alone ----


def test_a_tensor_packed_alone_is_the_same_whatever_the_threads() -> None:
    torch.manual_seed(0)
    weight = torch.randn(300, 200).bfloat16()
    one, three = (pack_tensor(weight, "w", threads) for threads in (1, 3))
    assert one is not None
    assert three is not None
    assert torch.equal(one.sources[0].blob, three.sources[0].blob)
    assert (one.name, one.dtype, tuple(one.shape), one.device) == (
        "w",
        weight.dtype,
        (300, 200),
        weight.device,
    )
    assert one.packed_bytes < weight.nbytes
    assert_same_bits(one.decoded(), weight)
    noise = torch.empty(64, 64)
    noise.view(torch.int32).random_(-(2**31), 2**31 - 1)
    assert pack_tensor(noise, "noise") is None


def test_a_packed_tensor_ends_where_blobs_end() -> None:
    for rows in range(90, 110):
        made = pack_tensor(torch.randn(rows, 37).bfloat16(), "w")
        assert made is not None
        assert made.packed_bytes % ALIGN_BLOB == 0


def test_a_tensor_is_packed_for_gpus() -> None:
    """Also where zstd would make less of it."""
    weight = (torch.arange(96 * 64).reshape(96, 64) % 7 + 1).bfloat16()
    made = pack_tensor(weight, "w")
    assert made is not None
    assert made.sources[0].codec.name == "prefix"
    assert_same_bits(made.decoded(), weight)
