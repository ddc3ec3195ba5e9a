"""Modules that were tied to packed weights after these were packed."""

from __future__ import annotations

from typing import Any

import pytest
from support.models import assert_same_bits
from support.small import IDS, Model, nn, torch

from tpde.errors import PackedWeight
from tpde.nn import PackedParameter, pack_module, packed_modules, unpack_module


def _new_head(model: Any) -> None:
    model.head = nn.Linear(64, 200, bias=False)
    model.head.weight = model.embed.weight


def test_unpacking_keeps_ties_that_were_made_since(pair: tuple[Model, Model]) -> None:
    plain, packed = pair
    _new_head(packed)
    packed.register_parameter("again", packed.embed.weight)
    packed.blocks[0].up.register_parameter("third", packed.embed.weight)
    unpack_module(packed)
    assert type(packed.head.weight) is nn.Parameter
    assert packed.head.weight is packed.embed.weight
    assert packed.again is packed.embed.weight
    assert packed.blocks[0].up.third is packed.embed.weight
    assert packed.head.weight.requires_grad
    assert_same_bits(packed(IDS), plain(IDS))
    packed.half()


def test_packing_again_takes_modules_that_were_tied_since(pair: tuple[Model, Model]) -> None:
    plain, packed = pair
    _new_head(packed)
    pack_module(packed)
    assert "head" in dict(packed_modules(packed))
    assert packed.head.weight.packed is packed.embed.weight.packed
    assert_same_bits(packed(IDS), plain(IDS))
    unpack_module(packed)
    assert packed.head.weight is packed.embed.weight


def test_a_module_that_was_tied_since_is_not_unpacked_alone(pair: tuple[Model, Model]) -> None:
    _, packed = pair
    _new_head(packed)
    with pytest.raises(PackedWeight, match="is tied to a weight of a module outside"):
        unpack_module(packed.head)
    assert isinstance(packed.head.weight, PackedParameter)


def test_what_is_given_a_packed_weight_trains_after_unpacking(pair: tuple[Model, Model]) -> None:
    plain, packed = pair
    for model in pair:
        _new_head(model)
    unpack_module(packed)
    for model in pair:
        model(IDS).float().sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
    for name, weight in plain.state_dict().items():
        assert_same_bits(packed.state_dict()[name], weight, name)


@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_that_share_memory_go_on_sharing_it(frozen: bool) -> None:
    model = nn.Sequential(nn.Embedding(200, 64), nn.Linear(64, 200, bias=False), nn.Linear(200, 64))
    model[1].weight.data = model[0].weight.data
    model[0].weight.requires_grad_(not frozen)
    pack_module(model, min_bytes=0)
    assert model[0].weight.packed is model[1].weight.packed
    unpack_module(model)
    assert model[0].weight is not model[1].weight
    assert model[0].weight.data_ptr() == model[1].weight.data_ptr()
    assert (model[0].weight.requires_grad, model[1].weight.requires_grad) == (not frozen, True)


def test_a_trained_parameter_that_shares_memory_stays_plain() -> None:
    model = nn.Sequential(nn.Embedding(200, 64), nn.Linear(64, 200, bias=False), nn.Linear(200, 64))
    model[1].weight.data = model[0].weight.data
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    pack_module(model, min_bytes=0)
    assert not isinstance(model[1].weight, PackedParameter)
    assert isinstance(model[2].weight, PackedParameter)


def test_memory_that_is_read_otherwise_stays_plain_and_shared() -> None:
    model = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(3)])
    model[1].weight.data = model[0].weight.data.view(32, 128)
    model[2].weight.data = model[0].weight.data.t()
    expected = [it.weight.detach().clone() for it in model]
    for layer, weight in zip(pack_module(model, min_bytes=0), expected, strict=True):
        assert type(layer.weight) is nn.Parameter
        assert layer.weight.data_ptr() == model[0].weight.data_ptr()
        assert_same_bits(layer.weight, weight)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which PyTorch's compiler looks at itself
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_layer_that_was_tied_since_is_compiled(backend: str, grad: bool, pair: tuple[Model, Model]) -> None:
    plain, packed = pair
    _new_head(packed)
    torch.compiler.reset()
    with torch.set_grad_enabled(grad):
        assert_same_bits(torch.compile(packed, backend=backend)(IDS), plain(IDS))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"`tpde.pack_module\(model\)` packs these"):
        torch.compile(packed.head, backend=backend, fullgraph=True)(torch.zeros(2, 64).bfloat16())
    pack_module(packed, min_bytes=0)
    with torch.no_grad():
        made = torch.compile(packed, backend=backend, fullgraph=True)(IDS)
    assert_same_bits(made, plain(IDS))


def test_a_layer_that_was_tied_since_is_not_traced(pair: tuple[Model, Model]) -> None:
    _, packed = pair
    _new_head(packed)
    with pytest.raises(PackedWeight, match=r"would be constants of what a tracer makes"):
        torch.jit.trace(packed.head, (torch.zeros(2, 64).bfloat16(),))
