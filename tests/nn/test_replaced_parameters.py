"""Packed weights in the place of parameters, and what may be put there, set and taken out afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from support.models import assert_same_bits, torch
from support.small import IDS, Model
from torch import nn

from tpde.errors import InvalidInput, PackedWeight
from tpde.nn import (
    PackedTensor,
    finish,
    pack_module,
    pack_tensor,
    plain_state_dict,
    replace_parameter,
    unpack_module,
)


class Experts(nn.Module):
    """A fused tensor, as mixture-of-experts models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 96, 64) * 0.02)

    def forward(self, x: Any, number: int) -> Any:
        return nn.functional.linear(x, self.gate_up_proj[number])


def test_replacing_on_the_meta_device() -> None:
    torch.manual_seed(3)
    plain = nn.ModuleDict({"experts": Experts(), "out": nn.Linear(64, 64)})
    with torch.device("meta"):
        model = nn.ModuleDict({"experts": Experts(), "out": nn.Linear(64, 64, bias=False)})
    sources = []
    for number in range(4):
        for half in range(2):
            piece = plain["experts"].gate_up_proj[number, 48 * half : 48 * (half + 1)].detach().contiguous()
            packed = pack_tensor(piece, f"experts.{number}.w{half}")
            assert packed is not None
            sources += packed.sources
    replace_parameter(model, "experts.gate_up_proj", PackedTensor(sources, (4, 96, 64)))
    replace_parameter(model, "out.weight", pack_tensor(plain["out"].weight.detach(), "out.weight"))
    finish(model)
    x = torch.randn(3, 64)
    for number in range(4):
        assert_same_bits(model["experts"](x, number), plain["experts"](x, number))
    assert list(model.state_dict()) == ["experts.gate_up_proj", "out.weight"]
    again = copy.deepcopy(model)
    again.load_state_dict(model.state_dict())
    assert_same_bits(again["experts"](x, 2), plain["experts"](x, 2))
    assert_same_bits(plain_state_dict(model)["experts.gate_up_proj"], plain["experts"].gate_up_proj)


def test_replacing_what_does_not_fit() -> None:
    torch.manual_seed(0)  # few numbers, which do not always shrink
    model = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(64))
    packed = pack_tensor(torch.randn(64, 32), "it")
    with pytest.raises(InvalidInput, match=r"shape \[32, 64\], the packed weight .*shape \[64, 32\]"):
        replace_parameter(model, "0.weight", packed)
    with pytest.raises(InvalidInput, match=r"no parameter `2.weight`"):
        replace_parameter(model, "2.weight", packed)
    with pytest.raises(InvalidInput, match=r"no parameter `0.wight`"):
        replace_parameter(model, "0.wight", packed)
    with pytest.raises(InvalidInput, match="LayerNorm cannot be packed"):
        replace_parameter(model, "1.weight", packed)
    half = pack_tensor(torch.randn(16, 64), "half")
    with pytest.raises(InvalidInput, match="has 8192 bytes, its parts have 4096"):
        PackedTensor(half.sources, (32, 64))
    with pytest.raises(InvalidInput, match="one source at least"):
        PackedTensor([])
    other = pack_tensor(torch.randn(160, 64).half(), "other")
    with pytest.raises(InvalidInput, match=r"`other` holds torch.float16, `half` torch.float32"):
        PackedTensor([*half.sources, *other.sources], (32, 64))
    with pytest.raises(InvalidInput, match=r"torch.float64"):
        replace_parameter(model, "0.weight", pack_tensor(torch.randn(32, 64).double(), "double"))
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("trained", [False, True])
def test_a_weight_that_is_replaced_says_what_the_one_before_said(trained: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 64)).requires_grad_(trained)
    made = pack_tensor(model[0].weight.detach(), "w")
    assert made is not None
    replace_parameter(model, "0.weight", made)
    assert model[0].weight.plain_requires_grad is trained
    assert finish(model)(torch.ones(1, 64)).requires_grad is trained


def test_packing_in_steps(pair: tuple[Model, Model]) -> None:
    """Whoever packs a block again, or more of it, gets one model."""
    plain, ours = pair
    unpack_module(ours.blocks[1])
    pack_module(ours.blocks, min_bytes=0)
    finish(ours)
    assert_same_bits(ours(IDS), plain(IDS))
    replace_parameter(ours, "blocks.1.up.weight", ours.blocks[1].up.weight)
    assert list(ours.blocks[1].up.tpde_slots) == ["weight"]
    finish(ours)
    assert_same_bits(ours(IDS), plain(IDS))


def test_what_may_be_set(pair: tuple[Model, Model]) -> None:
    _, ours = pair
    layer, other = ours.blocks[0].up, ours.blocks[1].up
    with pytest.raises(PackedWeight, match="cannot be replaced"):
        layer.weight = other.weight
    with pytest.raises(PackedWeight, match="cannot be quantized"):
        layer.qconfig = None
    layer.weight = layer.weight
    ours.blocks[0].norm.qconfig = None
    layer.other = 7
    del layer.other
    layer.register_parameter("scale", nn.Parameter(torch.ones(1)))
    layer.scale = nn.Parameter(torch.zeros(1))
    assert list(layer._parameters) == ["weight", "bias", "scale"]


def test_a_weight_that_was_taken_out_is_missed(pair: tuple[Model, Model]) -> None:
    plain, ours = pair
    layer = ours.blocks[0].up
    held = layer._parameters.pop("weight")
    assert not hasattr(layer, "weight")
    with pytest.raises(PackedWeight, match="cannot be computed from a `weight_g`"):
        layer.register_parameter("weight_g", None)
    assert layer._parameters["weight"] is held
    assert list(layer._parameters) == ["weight", "bias"]
    with pytest.raises(PackedWeight, match="cannot be computed from a `weight_orig`"):
        layer.register_parameter("weight_orig", held)
    layer.register_parameter("weight_of_mine", nn.Parameter(torch.ones(2)))
    assert_same_bits(ours(IDS), plain(IDS))
