"""What running takes of memory: peaks, footprints, budgets given back, and what is said when none is left."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from support.card import DEVICE, Card  # noqa: E402
from support.small import Model  # noqa: E402

from tpde.errors import OutOfMemory, PackedWeight  # noqa: E402
from tpde.integrations.transformers import run_memory  # noqa: E402
from tpde.loading.budgeted import Streaming  # noqa: E402
from tpde.memory.allowance import Allowance  # noqa: E402
from tpde.nn import pack_module, packed_modules  # noqa: E402
from tpde.planning.budget import Budget  # noqa: E402


def test_a_peak_counts_what_was_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    card.reserved = card.allocated = 20
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 50)
    peak = run_memory.Peak(DEVICE)
    card.free -= 25
    assert peak.bytes() == 25 + 30


def test_a_footprint_is_of_weights_and_buffers() -> None:
    model: Any = torch.nn.Linear(4, 3)
    model.register_buffer("more", torch.zeros(10, dtype=torch.int64))
    footprint = run_memory.MemoryFootprintMethod(model)
    assert footprint() == 4 * 15 + 80
    assert footprint(return_buffers=False) == 4 * 15


def test_a_closed_model_gives_its_budget_back(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    streaming = Streaming(Budget(4 << 30))
    plan: Any = SimpleNamespace(parts={"pages": 2 << 20})
    streaming.decide(DEVICE, lambda _: plan)
    assert card.fraction < 1
    streaming.close()
    assert card.fraction == 1
    Allowance(DEVICE, 8 << 30, 0)  # what it had is there again
    gc.collect()


def test_what_streams_a_model_is_not_copied() -> None:
    """Though nothing of it were packed: its files and memory are this process's."""
    for duplicate in (pickle.dumps, copy.deepcopy):
        with pytest.raises(PackedWeight, match="cannot be copied or pickled"):
            duplicate(Streaming(Budget(4 << 30)))


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_a_peak_of_the_process(platform: str, unit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource", reason="needs POSIX")
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3000))
    assert run_memory.Peak(torch.device("cpu")).bytes() == 3000 * unit


def test_a_footprint_counts_packed_weights_once_as_what_they_take() -> None:
    torch.manual_seed(0)
    model: Any = Model().to(torch.bfloat16)
    plain = sum(it.nbytes for it in model.parameters())
    pack_module(model, min_bytes=0)
    sizes = run_memory.weight_bytes(model)
    packed = {
        id(slot.packed): slot.packed for _, it in packed_modules(model) for slot in it.tpde_slots.values()
    }
    assert sizes["packed_bytes"] == sum(it.packed_bytes for it in packed.values())
    assert sizes["unpacked_bytes"] == sum(it.nbytes for it in packed.values())
    assert sizes["unpacked_bytes"] + sizes["plain_bytes"] == plain
    assert run_memory.MemoryFootprintMethod(model)(False) == sizes["packed_bytes"] + sizes["plain_bytes"]


def test_a_footprint_keeps_no_model_and_goes_with_its_copy() -> None:
    model = torch.nn.Linear(4, 3)
    model.footprint = run_memory.MemoryFootprintMethod(model)
    gone, other = weakref.ref(model), copy.deepcopy(model)
    other.bias = None
    assert (model.footprint(), other.footprint()) == (60, 48)
    del model
    assert gone() is None


def test_running_out_while_running(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch).free = 1 << 29
    text = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ..."
    with (
        pytest.raises(OutOfMemory, match=r"generating needs 2\.50 GiB more on cuda:0, 0\.50 GiB are free"),
        run_memory.explained(torch.device("cuda", 0), "generating"),
    ):
        raise torch.cuda.OutOfMemoryError(text)
