"""What a review of linear layers in the window layout found: each test failed before its fix."""

from __future__ import annotations

from typing import Any

import pytest
from support.models import assert_same_bits
from support.small import IDS, torch

import tpde
from tpde.nn import kernels, packed_modules, set_kernels


def delta_of(model: Any) -> bytes:
    other = {name: it.clone() for name, it in model.state_dict().items()}
    for it in other.values():
        it.view(-1)[::50] *= 1.5
    return tpde.make_delta(dict(model.state_dict()), other)


def test_a_model_that_a_delta_changed_goes_to_windows(pair: Any) -> None:
    plain, model = pair
    delta = delta_of(plain)
    tpde.apply_delta(model, delta)
    tpde.apply_delta(plain, delta)
    set_kernels(model, "fused")
    assert any(slot.packed.multiplies for _, it in packed_modules(model) for slot in it.tpde_slots.values())
    with torch.no_grad():
        assert_same_bits(model(IDS), plain(IDS))
    set_kernels(model, "exact")
    with torch.no_grad():
        assert_same_bits(model(IDS), plain(IDS))


@pytest.mark.parametrize("way", ["fused", "exact"])
def test_what_was_interrupted_leaves_no_weight_in_a_wrong_group(
    pair: Any, way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = pair
    if way == "exact":
        set_kernels(model, "fused")
    real, done = kernels.convert, []

    def convert(packed: Any, to_windows: bool) -> None:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(packed)
        real(packed, to_windows)

    monkeypatch.setattr(kernels, "convert", convert)
    with pytest.raises(KeyboardInterrupt):
        set_kernels(model, way)
    slots = [slot for _, it in packed_modules(model) for name, slot in it.tpde_slots.items()]
    assert sum(slot.packed.multiplies for slot in slots) not in (0, len(slots))
    own = [model.embed.tpde_slots["weight"]]  # rows of it are looked up
    assert all((slot.group is None) == slot.packed.multiplies for slot in slots if slot not in own)
    with torch.no_grad():
        assert_same_bits(model(IDS), plain(IDS))
    monkeypatch.undo()
    set_kernels(model, way)
    assert {slot.packed.multiplies for slot in slots} == {way == "fused"}


def test_nothing_to_do_regroups_nothing(pair: Any) -> None:
    model = pair[1]
    before = [slot.group for _, it in packed_modules(model) for slot in it.tpde_slots.values()]
    set_kernels(model.blocks[0], "exact")
    assert [slot.group for _, it in packed_modules(model) for slot in it.tpde_slots.values()] == before
