"""Which weights `set_kernels` brings into the window layout, and that all is as before on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from support.fused import fuse, layer, weights
from support.models import assert_same_bits
from support.small import IDS, torch

import tpde
from tpde.codec import window_plan
from tpde.errors import InvalidInput, PackedWeight
from tpde.nn import (
    PackedParameter,
    add_deltas,
    pack_module,
    packed_modules,
    plain_state_dict,
    set_kernels,
    unpack_module,
)
from tpde.nn.kernels import MOST_SHARE, can_fuse

nn = torch.nn
functional = nn.functional


def stored(model: Any) -> dict[str, bytes]:
    return {it.name: it.sources[0].stored().numpy().tobytes() for it in weights(model)}


def test_outputs_and_files_are_the_plain_model_s(pair: Any) -> None:
    plain, model = pair
    before = stored(model)
    assert set_kernels(model, "fused") is model
    assert [it.multiplies for it in weights(model)] == [True] * 7
    with torch.no_grad():
        assert_same_bits(model(IDS), plain(IDS))
    assert_same_bits(model(IDS), plain(IDS))
    assert stored(model) == before
    for key, value in plain.state_dict().items():
        assert_same_bits(plain_state_dict(model)[key], value, key)
    set_kernels(model, "exact")
    assert not any(it.multiplies for it in weights(model))
    with torch.no_grad():
        assert_same_bits(model(IDS), plain(IDS))
    assert stored(model) == before


def test_twice_is_once(fused: Any) -> None:
    before = [it.sources[0] for it in weights(fused)]
    set_kernels(fused, "fused")
    assert [it.sources[0] for it in weights(fused)] == before


def test_blocks_have_no_workspace(fused: Any) -> None:
    assert all(slot.group is None for _, it in packed_modules(fused) for slot in it.tpde_slots.values())
    assert not any("forward" in it.__dict__ for it in fused.blocks)


def test_a_tied_weight_is_there_once(fused: Any) -> None:
    assert fused.head.weight.packed is fused.embed.weight.packed
    ids = torch.tensor([[0, 199, 7], [7, 7, 100]], dtype=torch.int32)
    rows = plain_state_dict(fused)["embed.weight"]
    assert_same_bits(fused.embed(ids), rows[ids.long()])
    with pytest.raises(IndexError):
        fused.embed(torch.tensor([200]))


@pytest.mark.parametrize("kernels", ["fast", None, True, 1, "EXACT", ["fused"]])
def test_what_it_may_be(pair: Any, kernels: Any) -> None:
    with pytest.raises(InvalidInput, match=r"`kernels` is .*"):
        set_kernels(pair[1], kernels)


def test_other_dtypes_keep_their_codes(caplog: pytest.LogCaptureFixture) -> None:
    fuse(layer())
    assert not caplog.text
    for dtype in (torch.float32, torch.float16):
        model, x = layer(dtype=dtype), torch.randn(3, 64, dtype=dtype)
        made = fuse(model)
        assert not made.weight.packed.multiplies
        assert f"packed are `Linear` in {str(dtype).removeprefix('torch.')}" in caplog.text
        assert_same_bits(made(x), model(x))


def test_many_escapes_keep_their_codes(caplog: pytest.LogCaptureFixture) -> None:
    plain = layer(64, 256)
    with torch.no_grad():  # pairs of exponents from end to end, but each row is small and shrinks
        plain.weight[:, ::2] = torch.exp2(torch.randint(-60, 60, (64, 128)).float()).bfloat16()
    made = pack_module(copy.deepcopy(plain), min_bytes=0)
    assert isinstance(made.weight, PackedParameter)
    assert not set_kernels(made, "fused").weight.packed.multiplies
    assert "as it is packed: windows would take more than 0.85 of their bytes" in caplog.text
    blob = window_plan.encode(plain.weight.detach().view(torch.int16).numpy())
    assert blob.size > MOST_SHARE * plain.weight.nbytes


class Doubling(nn.Linear):
    """Its forward pass is its own."""

    def forward(self, x: Any) -> Any:
        return functional.linear(x, 2 * self.weight, self.bias)


class Calling(nn.Linear):
    """A subclass that keeps the forward pass."""


def test_which_layers() -> None:
    torch.manual_seed(0)
    parts = {
        "linear": nn.Linear(64, 64),
        "calling": Calling(64, 64),
        "own": Doubling(64, 64),
        "convolution": nn.Conv1d(64, 64, 1),
        "embedding": nn.Embedding(64, 64),
    }
    model = nn.ModuleDict(parts).bfloat16()
    assert [can_fuse(it) for it in parts.values()] == [True, True, False, False, True]
    made = fuse(model)
    found = {name: it.weight.packed.multiplies for name, it in made.items()}
    assert [name for name, fused in found.items() if fused] == ["linear", "calling"]
    x = torch.randn(5, 64).bfloat16()
    for name in ("linear", "calling", "own"):
        assert_same_bits(made[name](x), model[name](x), name)


def test_a_weight_that_another_kind_of_module_shares() -> None:
    model = nn.ModuleList([layer(64, 64), Doubling(64, 64).bfloat16()])
    model[1].weight = model[0].weight
    made = fuse(model)
    assert not made[0].weight.packed.multiplies


def test_what_has_deltas_is_refused(pair: Any) -> None:
    plain, model = pair
    other = {name: it.clone() for name, it in plain.state_dict().items()}
    other["blocks.0.up.weight"][0, 0] += 1
    delta = tpde.make_delta(dict(plain.state_dict()), other)
    add_deltas(model, {"math": delta})
    with pytest.raises(PackedWeight, match="has deltas on it; nothing was changed"):
        set_kernels(model, "fused")
    assert not any(it.multiplies for it in weights(model))


def test_named_deltas_on_windows_are_refused(pair: Any, fused: Any) -> None:
    other = {name: it.clone() for name, it in pair[0].state_dict().items()}
    other["blocks.0.up.weight"][0, 0] += 1
    delta = tpde.make_delta(dict(pair[0].state_dict()), other)
    with pytest.raises(PackedWeight, match="window layout"):
        add_deltas(fused, {"math": delta})
    with torch.no_grad():
        assert_same_bits(fused(IDS), pair[0](IDS))


def test_unpacked_is_what_it_was(pair: Any, fused: Any) -> None:
    model = unpack_module(fused)
    assert type(model.head) is nn.Linear
    assert model.head.weight is model.embed.weight
    for key, value in pair[0].state_dict().items():
        assert_same_bits(model.state_dict()[key], value, key)
