"""What packing a model in place holds meanwhile, and what it gives back to a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from support.card import DEVICE, MIB, Card
from support.models import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tpde.files import gpu_packing
from tpde.memory import device_memory
from tpde.nn import kernels, pack_model, pack_module, set_kernels


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A list of what a function says whenever a device is asked to take memory back."""

    def follow(module: Any, look: Any) -> list[Any]:
        found: list[Any] = []
        monkeypatch.setattr(module, "give_back", lambda device: found.append(look()))
        return found

    return follow


def test_a_plain_weight_goes_before_others_are_packed(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of weights that are packed one at a time: when one is asked for, the one before is not packed yet."""
    monkeypatch.setattr(gpu_packing, "BATCH_BYTES", 1)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    plain = [StorageWeakRef(it.weight.data.untyped_storage()) for it in model]
    there = given(pack_model, lambda: [not it.expired() for it in plain])
    pack_module(model)
    assert [sum(it) for it in there] == [4, 4, 3, 2, 0]


def test_what_was_converted_goes_before_others_are(given: Any) -> None:
    model = pack_module(nn.Sequential(*(nn.Linear(256, 64) for _ in range(3))).bfloat16())
    codes = [it.weight.packed for it in model]
    converted = given(kernels, lambda: [it.multiplies for it in codes])
    set_kernels(model, "fused")
    assert [sum(it) for it in converted] == [0, 1, 2, 3]


def test_little_is_kept_much_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    card, gone = Card(monkeypatch), []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: gone.append(card.reserved))
    card.reserved, card.allocated = 132 * MIB - 1, 100 * MIB
    device_memory.give_back(DEVICE)
    assert not gone
    card.reserved += 1
    device_memory.give_back(DEVICE)
    assert gone == [132 * MIB]
    device_memory.give_back(torch.device("cpu"))
    assert len(gone) == 1
