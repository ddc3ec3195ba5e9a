"""Loading under a budget: what a plan may take of a device, what is told of all devices, how they end."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.simulated import MemoryFeed

torch = pytest.importorskip("torch", reason="needs torch")

from support.card import DEVICE, GIB, MIB, Card  # noqa: E402
from support.feeds import SECOND, World  # noqa: E402

from tpde.errors import OutOfMemory  # noqa: E402
from tpde.loading.budgeted import Streaming  # noqa: E402
from tpde.loading.footprint import OUTSIDE_BYTES  # noqa: E402
from tpde.loading.machine import loading_on  # noqa: E402
from tpde.nn import pack_module  # noqa: E402
from tpde.planning.budget import Budget  # noqa: E402


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.mark.parametrize(
    ("held", "error", "least"),
    [
        (GIB, OutOfMemory("too little", least=6 * GIB), 7 * GIB),
        (GIB, OutOfMemory("too little"), None),
        (GIB, OutOfMemory("too little", least=6 * GIB, budget="ram"), 6 * GIB),
        (0, OutOfMemory("too little", least=6 * GIB), 6 * GIB),
    ],
)
def test_the_least_that_works_has_room_for_what_is_there(
    held: int, error: OutOfMemory, least: int | None, card: Card
) -> None:
    def plan(vram: int) -> Any:
        assert vram == 4 * GIB - held
        raise error

    card.keep(held)
    with pytest.raises(OutOfMemory) as caught:
        Streaming(Budget(4 * GIB)).decide(DEVICE, plan)
    assert caught.value.least == least
    assert (caught.value is error) == (least != 7 * GIB)
    if caught.value is not error:
        assert (caught.value.where, caught.value.found, caught.value.needed) == ("vram", 4 * GIB, least)


def test_what_is_told_of_a_budget_that_is_too_small(card: Card) -> None:
    def plan(vram: int) -> Any:
        assert vram == 4 * GIB - MIB
        raise OutOfMemory("the least is 6 GiB; pass that", least=6 * GIB)

    card.keep(GIB, 3 * GIB, MIB)
    says = (
        r"PyTorch holds 4\.00 GiB, 1\.00 GiB of it in tensors and 3\.00 GiB unused, on cuda:0 .* "
        r"of which 1\.00 GiB count"
    )
    with pytest.raises(OutOfMemory, match=says) as caught:
        Streaming(Budget(5 * GIB)).decide(DEVICE, plan)
    assert caught.value.least == 7 * GIB + MIB


@pytest.mark.parametrize("whole", [True, False])
def test_a_budget_is_taken_of_gpus_only(whole: bool, card: Card) -> None:
    streaming, plan = Streaming(Budget(4 * GIB), whole=whole), SimpleNamespace(parts={"pages": GIB})
    planned: list[int] = []

    def planner(vram: int) -> Any:
        planned.append(vram)
        return plan

    card.keep(GIB)
    streaming.decide(torch.device("cpu"), planner)
    assert card.fraction == 1.0
    streaming.decide(DEVICE, planner)
    assert planned == [4 * GIB, 3 * GIB if whole else 4 * GIB]
    assert (card.fraction < 1.0) == whole
    assert streaming.plans == {torch.device("cpu"): plan, DEVICE: plan}
    if whole:
        assert card.allowed == 4 * GIB - OUTSIDE_BYTES - GIB, "page tables are not PyTorch's"
    streaming.close()
    assert card.fraction == 1.0


def test_what_was_done_for_a_model_does_not_count(card: Card) -> None:
    card.keep(GIB)
    planned: list[int] = []

    def planner(vram: int) -> Any:
        planned.append(vram)
        return SimpleNamespace(parts={"pages": 0})

    Streaming(Budget(4 * GIB)).decide(DEVICE, planner, GIB // 4)
    assert planned == [4 * GIB - GIB // 4]


# ---- several devices ----


class Told:
    """A streamer that is asked what it has done."""

    def __init__(self, *owned: Any) -> None:
        self.owned, self.dropped_pieces = list(owned), 3
        self.traces: list[Any] = []

    def stats(self) -> dict[str, int]:
        return {"copied_bytes": 7}

    def record(self, trace: Any) -> None:
        self.traces.append(trace)


def test_what_is_recorded_is_told_of_each_device(world: World, tmp_path: Path) -> None:
    with loading_on(world):
        streaming: Any = Streaming(Budget(GIB))
    streaming.streamers = {DEVICE: Told(), SECOND: Told()}
    told = {it: [SimpleNamespace(trace=None), SimpleNamespace(trace=None)] for it in (DEVICE, SECOND)}
    streaming.feeds = told
    assert streaming.stats() == {"cuda:0": {"copied_bytes": 7}, "cuda:1": {"copied_bytes": 7}}
    streaming.record()
    for device, it in streaming.streamers.items():
        (trace,) = it.traces
        assert all(feed.trace is trace for feed in told[device])
        it.dropped_pieces += 2
    for device, found in streaming.stats().items():
        assert (found["copied_bytes"], found["pieces"], found["copying"]) == (7, 1, 1000)
        assert found["bytes"] == 100 + torch.device(device).index, "its own"
        assert found["dropped"] == 2, "since then"
    streaming.trace(tmp_path / "x.json")
    events = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    assert [it["args"]["bytes"] for it in events if it.get("name") == "w"] == [100, 101]


def test_host_memory_is_waited_for_on_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Memory(MemoryFeed):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def begin(self) -> None:
            log.append(f"{self.name} begins")

        def complete(self) -> None:
            log.append(f"{self.name} is there")

    model = pack_module(torch.nn.Sequential(torch.nn.Embedding(256, 64)), min_bytes=1)
    rows: Any = model[0].tpde_slots["weight"].packed  # type: ignore[union-attr, index]
    monkeypatch.setattr(rows, "prepare_rows", lambda: log.append("rows"))
    streaming: Any = Streaming(Budget(GIB))
    streaming.streamers = {DEVICE: Told(object(), Memory("one")), SECOND: Told(Memory("two"))}
    streaming.begin(model)
    streaming.wait()
    assert log == ["one begins", "two begins", "rows", "one is there", "two is there"]


def test_all_devices_are_checked_and_closed_once() -> None:
    log: list[str] = []
    streaming: Any = Streaming(Budget(GIB))
    streaming.streamers = {
        it: SimpleNamespace(
            check=lambda it=it: log.append(f"{it} checked"), close=lambda it=it: log.append(f"{it} closed")
        )
        for it in ("one", "two")
    }
    streaming.check()
    assert log == ["one checked", "two checked"]
    log.clear()
    for _ in range(2):
        streaming.close()
        assert log[:2] == ["one checked", "two checked"]
        assert sorted(log[2:]) == ["one closed", "two closed"]
