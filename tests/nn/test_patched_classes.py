"""Classes whose forward pass is patched, or that modules exchange for another, while these are packed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from support.models import assert_same_bits
from support.small import IDS, Block, Model, nn, torch
from torch.nn.utils import parametrize

from tpde.errors import PackedWeight
from tpde.nn import pack_module, packed_modules, unpack_module


def _twice(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: forward(self, *args) * 2


def _unlike(model: Any, other: Any) -> bool:
    return not torch.equal(model(IDS), other)


@pytest.mark.parametrize("kernels", ["decoded", "fused"])
@pytest.mark.parametrize("kind", [Block, nn.Linear, nn.Embedding])
def test_a_class_patched_after_packing(
    kind: Any, kernels: str, pair: tuple[Model, Model], request: Any, monkeypatch: Any
) -> None:
    plain, packed = pair
    if kernels == "fused":
        packed = request.getfixturevalue("fused")
    before = packed(IDS)
    monkeypatch.setattr(kind, "forward", _twice(kind.forward))
    assert _unlike(plain, before)
    assert_same_bits(packed(IDS), plain(IDS))
    monkeypatch.undo()
    assert_same_bits(packed(IDS), before)


@pytest.mark.parametrize("kind", [nn.Linear, nn.Embedding])
def test_a_class_patched_before_packing(kind: Any, pair: tuple[Model, Model], monkeypatch: Any) -> None:
    plain, packed = pair
    unpack_module(packed)
    before = plain(IDS)
    monkeypatch.setattr(kind, "forward", _twice(kind.forward))
    pack_module(packed, min_bytes=0)
    assert _unlike(plain, before)
    assert_same_bits(packed(IDS), plain(IDS))


@pytest.mark.parametrize("name", ["embedding", "linear"])
def test_a_function_patched_after_packing(name: str, pair: tuple[Model, Model], monkeypatch: Any) -> None:
    plain, packed = pair
    before, own = packed(IDS), getattr(nn.functional, name)
    monkeypatch.setattr(nn.functional, name, lambda *args, **options: own(*args, **options) * 2)
    assert _unlike(plain, before)
    assert_same_bits(packed(IDS), plain(IDS))
    monkeypatch.undo()
    assert_same_bits(packed(IDS), before)


class Scaled(nn.Linear):
    """Has its weight through code of its own."""

    @property
    def weight(self) -> Any:
        return super().__getattr__("weight") * 2


class ScaledBias(nn.Linear):
    """Has its bias so."""

    @property
    def bias(self) -> Any:
        return super().__getattr__("bias") * 2


class ScaledBoth(nn.Linear):
    """Has both so."""

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return found * 2 if name in ("weight", "bias") else found


@pytest.mark.parametrize("kind", [Scaled, ScaledBias, ScaledBoth])
def test_what_a_class_computes_when_it_is_read_stays_plain(kind: Any) -> None:
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(64, 64), kind(64, 64)), torch.randn(3, 64)
    expected = plain(x)
    packed = pack_module(plain, min_bytes=0)
    assert type(packed[1]) is kind
    assert_same_bits(packed(x), expected)


def test_what_is_to_be_quantized_stays_plain() -> None:
    """PyTorch's `convert` would pass over it otherwise, without a word."""
    from torch.ao import quantization

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].qconfig = quantization.default_dynamic_qconfig
    packed = pack_module(model, min_bytes=0)
    assert (type(packed[0]), len([*packed_modules(packed)])) == (nn.Linear, 1)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", [Block, nn.Linear])
def test_a_patched_class_is_compiled(
    kind: Any, grad: bool, pair: tuple[Model, Model], monkeypatch: Any
) -> None:
    plain, packed = pair
    torch.compiler.reset()
    compiled = torch.compile(packed, backend="eager", fullgraph=True)
    with torch.set_grad_enabled(grad):
        assert_same_bits(compiled(IDS), plain(IDS))
        monkeypatch.setattr(kind, "forward", _twice(kind.forward))
        assert_same_bits(compiled(IDS), plain(IDS))


@pytest.mark.parametrize("patched", ["before", "after"])
def test_a_transposed_layer_is_compiled(patched: str, monkeypatch: Any) -> None:
    """With gradients, where packed ones are one operator."""
    kind = pytest.importorskip("transformers.pytorch_utils").Conv1D
    plain = nn.Sequential(kind(32, 64))
    x = torch.randn(3, 64)
    before = plain(x)
    if patched == "before":
        monkeypatch.setattr(kind, "forward", _twice(kind.forward))
    packed = pack_module(copy.deepcopy(plain), min_bytes=0)
    torch.compiler.reset()
    compiled = torch.compile(packed, backend="eager", fullgraph=True)
    assert_same_bits(compiled(x), plain(x))
    if patched == "after":
        monkeypatch.setattr(kind, "forward", _twice(kind.forward))
    assert not torch.equal(plain(x), before)
    assert_same_bits(compiled(x), plain(x))


def test_a_block_that_is_unpacked_has_its_classs_forward(pair: tuple[Model, Model], monkeypatch: Any) -> None:
    plain, packed = pair
    monkeypatch.setattr(Block, "forward", _twice(Block.forward))
    unpack_module(packed)
    assert "forward" not in packed.blocks[0].__dict__
    assert_same_bits(packed(IDS), plain(IDS))


def test_a_block_of_another_class(pair: tuple[Model, Model]) -> None:
    class Twice(Block):
        def forward(self, x: Any) -> Any:
            return super().forward(x) * 2

    plain, packed = pair
    before = packed(IDS)
    for model in pair:
        model.blocks[1].__class__ = Twice
    assert _unlike(plain, before)
    assert_same_bits(packed(IDS), plain(IDS))
    unpack_module(packed)
    assert type(packed.blocks[1]) is Twice
    assert "forward" not in packed.blocks[1].__dict__


def test_a_class_that_cannot_be_given_changes_nothing(pair: tuple[Model, Model]) -> None:
    plain, packed = pair
    for layer in (plain.blocks[1].up, packed.blocks[1].up):
        for other in (dict, 5):
            with pytest.raises((TypeError, AttributeError)):
                layer.__class__ = other
    assert_same_bits(packed(IDS), plain(IDS))
    unpack_module(packed)
    assert type(packed.blocks[1].up) is nn.Linear


class _Scaled(nn.Linear):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * 2


class _Looked(nn.Embedding):
    def forward(self, ids: Any) -> Any:
        return super().forward(ids) * 2


@pytest.mark.parametrize("kernels", ["decoded", "fused"])
def test_layers_of_another_class(kernels: str, pair: tuple[Model, Model], request: Any) -> None:
    plain, packed = pair
    if kernels == "fused":
        packed = request.getfixturevalue("fused")
    before = packed(IDS)
    for model in pair:
        model.blocks[1].up.__class__ = _Scaled
        model.embed.__class__ = _Looked
    assert _unlike(plain, before)
    assert isinstance(packed.blocks[1].up, _Scaled)
    assert_same_bits(packed(IDS), plain(IDS))
    copied = copy.deepcopy(packed)
    unpack_module(packed)
    assert type(packed.blocks[1].up) is _Scaled
    assert type(packed.embed) is _Looked
    for model in (packed, copied):
        assert_same_bits(model(IDS), plain(IDS))


def test_a_class_that_was_made_from_a_packed_ones_is_not_lost(pair: tuple[Model, Model]) -> None:
    plain, packed = pair
    for model in pair:
        layer = model.blocks[1].up
        own = layer.__class__
        layer.__class__ = type("Twice", (own,), {"forward": _twice(own.forward)})
    assert_same_bits(packed(IDS), plain(IDS))
    with pytest.raises(PackedWeight, match=r"class of `blocks\.1\.up`, Twice, .*lost by unpacking"):
        unpack_module(packed)
    assert_same_bits(packed(IDS), plain(IDS))
    packed.blocks[1].up.__class__ = own
    unpack_module(packed)
    assert type(packed.blocks[1].up) is nn.Linear


def test_a_packed_layer_whose_bias_is_parametrized(pair: tuple[Model, Model]) -> None:
    plain, packed = pair
    for model in pair:
        parametrize.register_parametrization(model.blocks[1].up, "bias", nn.ReLU())
    assert_same_bits(copy.deepcopy(packed)(IDS), plain(IDS))
    with pytest.raises(PackedWeight, match="remove_parametrizations"):
        unpack_module(packed)
    for model in pair:
        parametrize.remove_parametrizations(model.blocks[1].up, "bias")
    assert_same_bits(unpack_module(packed)(IDS), plain(IDS))


def test_a_layer_whose_bias_was_parametrized_stays_plain(pair: tuple[Model, Model]) -> None:
    plain, packed = pair
    unpack_module(packed)
    for model in pair:
        parametrize.register_parametrization(model.blocks[1].up, "bias", nn.ReLU())
    pack_module(packed, min_bytes=0)
    assert_same_bits(packed(IDS), plain(IDS))
    for model in pair:
        parametrize.remove_parametrizations(model.blocks[1].up, "bias")
    assert_same_bits(packed(IDS), plain(IDS))


def test_other_modules_of_a_packed_ones_class_are_plain(pair: tuple[Model, Model]) -> None:
    class Small(Block):
        def __init__(self) -> None:
            super().__init__(64)
            self.weight = nn.Parameter(torch.ones(4, 64, 64))

    kind = type(pair[1].head)
    assert type(kind(3, 4, bias=False)) is nn.Linear
    assert type(type(pack_module(Small(), min_bytes=0))()) is Small
    assert type(kind.__new__(kind)) is kind  # as `copy` and parametrizations make them


def test_replicas_are_refused(pair: tuple[Model, Model]) -> None:
    with pytest.raises(PackedWeight, match=r"`embed\.weight` is packed, and `torch\.nn\.DataParallel`"):
        pair[1].embed._replicate_for_data_parallel()


class _Counting(nn.Linear):
    """Keeps the largest input, as observers do."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        self.seen = torch.maximum(self.seen, x.detach().abs().max())
        return nn.functional.linear(x, self.weight, self.bias) / (1 + self.seen)


@pytest.mark.parametrize("gradients", [False, True])
def test_what_a_compiled_forward_pass_sets_stays_set(gradients: bool) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    plain = _Counting(64)
    packed = pack_module(copy.deepcopy(plain), min_bytes=0)
    compiled = torch.compile(packed, backend="eager", fullgraph=True)
    x = torch.randn(3, 64)
    with torch.set_grad_enabled(gradients):
        for scale in (1, 10):
            assert_same_bits(compiled(scale * x), plain(scale * x))
    assert packed.calls == plain.calls == 2
    assert_same_bits(packed.seen, plain.seen)
