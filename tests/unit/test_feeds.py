"""What brings weights under a budget: what is opened, who owns it, who is told. Devices are made up."""

from __future__ import annotations

import gc
import json
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.simulated import MemoryFeed, probed

torch = pytest.importorskip("torch", reason="needs torch")

from support.card import DEVICE, GIB, Card  # noqa: E402
from support.contents import fill  # noqa: E402
from support.files import pack_bytes, safetensors_bytes  # noqa: E402

from tpde.errors import OutOfMemory, Truncated  # noqa: E402
from tpde.format.container import TensorSpec  # noqa: E402
from tpde.loading.budgeted import Streaming  # noqa: E402
from tpde.loading.checkpoint_files import Checkpoint  # noqa: E402
from tpde.loading.feeds import Feeds  # noqa: E402
from tpde.loading.footprint import OUTSIDE_BYTES  # noqa: E402
from tpde.loading.machine import loading_on  # noqa: E402
from tpde.loading.runs import Run  # noqa: E402
from tpde.nn import pack_module  # noqa: E402
from tpde.planning.budget import Budget  # noqa: E402
from tpde.planning.units import Placement  # noqa: E402
from tpde.streaming.trace import COPY, Trace, TraceSpan  # noqa: E402

SPEC = TensorSpec("BF16", (64, 128))
SECOND = torch.device("cuda", 1)


class Feed:
    """One that is made for some arguments."""

    def __init__(self, log: list[Any], name: str, ahead: int, given: tuple[Any, ...]) -> None:
        self.log, self.name, self.ahead, self.given = log, name, ahead, given

    def close(self) -> None:
        self.log.append(f"{self.name} closed")


class World:
    """What stands in for devices, memory and disks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        self.ring = 0
        self.placed: list[int] = []  # bytes that were allocated on a device
        empty = torch.empty

        def placed(size: Any, *args: Any, device: Any = None, **options: Any) -> Any:
            if device == SECOND:
                self.placed.append(size)
                device = None
            return empty(size, *args, device=device, **options)

        monkeypatch.setattr(torch, "empty", placed)

    # ---- a machine ----

    def memory(self, extents: Any, device: Any, progress: Any) -> Any:
        return Feed(self.log, "memory", 0, ([it.name for it in extents], device, progress))

    def disk(self, *given: Any) -> Any:
        return Feed(self.log, "disk", 1, given)

    def device(self, device: Any, size: int, beside: Any = None) -> Any:
        self.ring = size
        return SimpleNamespace(wait=lambda: self.log.append("waited"))

    def start_trace(self, device: Any) -> Any:
        return Traced(100 + device.index)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Checkpoint]:
    """Three tensors in two files."""
    for name, tensors in (("one", ("a", "b")), ("two", ("c",))):
        made = {it: (SPEC, fill("normal", SPEC)) for it in tensors}
        (tmp_path / name).write_bytes(pack_bytes(safetensors_bytes(made)))
    with Checkpoint([tmp_path / "one", tmp_path / "two"]) as found:
        yield found


@pytest.fixture
def world(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def still_open(sources: Any) -> list[str]:
    """Which of these are open."""
    return [Path(it.name).name for it in sources if it.fileno() >= 0]


PLAN: Any = SimpleNamespace(
    staging=48, piece=10, ring=1000, retained=70, slots=5, work=SimpleNamespace(disk=300, copied=400)
)


KEPT: Any = {"placements": {"": Placement.HOST}, "vram": GIB, "parts": defaultdict(int)}


def stored(checkpoint: Checkpoint, names: str) -> list[Any]:
    return [checkpoint.packed[it] for it in names]


@pytest.mark.parametrize(("host", "disk"), [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")])
def test_what_is_opened_for_a_device(host: str, disk: str, world: World, checkpoint: Checkpoint) -> None:
    told = object()
    made = Feeds(SECOND, PLAN, stored(checkpoint, host), stored(checkpoint, disk), world, progress=told)  # type: ignore[arg-type]
    opened = {it.name: it for it in made.feeds}  # type: ignore[attr-defined]
    assert list(opened) == ["memory"] * bool(host) + ["disk"] * bool(disk)
    if host:
        assert opened["memory"].given == (list(host), SECOND, told)
    if disk:
        assert opened["disk"].given == (4, 10, SECOND)
    assert len(world.placed) == 1, "all tables and maps, at once"
    streamer, tensors = made.open()
    assert sorted(tensors) == ["a", "b", "c"]
    for name, it in tensors.items():
        assert it.feed is opened["memory" if name in host else "disk"]
        assert it.in_host_memory(streamer) == (name in host)
    for feed in opened.values():
        feed.ahead = 0
    assert all(it.in_host_memory(streamer) for it in tensors.values()), "all are brought by it"
    # What takes longest is kept first.
    kept = streamer.ring.retained
    assert (kept.start, kept.room, kept.wanted) == (1000, 70, 70 + (300 if disk else 400))
    assert kept.feed is opened.get("disk")
    assert world.ring == 1070
    assert (streamer.ring.places, streamer.ring.room) == (5, 10)
    # Memory may still be read to where files lie: it is closed first.
    names = [it.name if isinstance(it, Feed) else Path(it.name).name for it in streamer.owned]
    assert names == [*(["disk"] if disk else []), *(["memory"] if host else []), "one", "two"]
    made.close()
    assert not world.log, "they are the streamer's"
    assert still_open(streamer.owned[-2:]) == ["one", "two"]


def test_what_no_streamer_owns_is_closed(world: World, checkpoint: Checkpoint) -> None:
    made = Feeds(SECOND, PLAN, stored(checkpoint, "a"), stored(checkpoint, "c"), world)
    files = made.owned[2:]
    assert still_open(files) == ["one", "two"]
    for _ in range(2):
        made.close()
        assert world.log == ["disk closed", "memory closed"]
        assert not still_open(files)


def test_a_streamer_that_is_dropped_leaves_nothing_open(world: World, checkpoint: Checkpoint) -> None:
    """Copies may still read the host's memory: the device is waited for, and all is closed."""
    made = Feeds(SECOND, PLAN, stored(checkpoint, "a"), stored(checkpoint, "c"), world)
    streamer: Any = made.open()[0]

    def fail() -> None:
        world.log.append("failed")
        raise RuntimeError("a device has crashed")

    streamer.owned[0].close = fail
    streamer.device.wait = fail
    files = streamer.owned[2:]
    del streamer, made
    gc.collect()
    assert world.log == ["failed", "failed", "memory closed"]
    assert not still_open(files)


def test_nothing_runs_when_the_process_ends(
    world: World, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices are gone by then."""
    made: list[Any] = []

    class Noted(weakref.finalize):  # type: ignore[type-arg]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(weakref, "finalize", Noted)
    opened = Feeds(SECOND, PLAN, stored(checkpoint, "a"), [], world)
    streamer = opened.open()[0]
    Card(monkeypatch)
    streaming = Streaming(Budget(4 * GIB))
    streaming.decide(DEVICE, lambda _: SimpleNamespace(parts={"pages": 0}))  # type: ignore[arg-type,return-value]
    streaming.attach(SimpleNamespace())
    assert [it.atexit for it in made] == [False] * 3
    streaming.close()
    del streamer


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no list of open files here")
def test_a_file_that_is_too_short_is_not_opened(world: World, checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "two").write_bytes((tmp_path / "two").read_bytes()[:600])
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Truncated) as caught:
        Feeds(SECOND, PLAN, stored(checkpoint, "a"), stored(checkpoint, "c"), world)
    assert len(os.listdir("/proc/self/fd")) == before, f"left to whoever drops `{caught.value}`"


# ---- budgets ----


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


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


# ---- what is told ----


def test_progress_is_told_by_one_thread_at_a_time(world: World, checkpoint: Checkpoint) -> None:
    """By whoever reads, in the background, for any device."""
    seen, inside = list[int](), list[int]()

    def told(nbytes: int) -> None:
        if nbytes == 1:
            other.start()
            assert probe.asked.wait(60)
            inside.append(len(seen))
        seen.append(nbytes)
        probe.asked.set()  # had it not asked

    with loading_on(world):
        streaming, probe = probed(lambda: Streaming(Budget(GIB), told), "Lock")
    streaming.plans = {SECOND: SimpleNamespace(**vars(PLAN), **KEPT)}  # type: ignore[dict-item]
    model = torch.nn.ParameterDict({it: torch.empty(64, 128, device="meta") for it in "abc"})
    runs = {name: Run(it.spec.shape, it.dtype, [it]) for name, it in checkpoint.packed.items()}
    streaming.load(model, checkpoint, runs, dict.fromkeys("abc", SECOND))
    ((memory, *_),) = streaming.feeds.values()
    tell: Any = memory.given[2]  # type: ignore[attr-defined]
    other = threading.Thread(target=tell, args=(2,))
    tell(1)
    other.join(60)
    assert (inside, seen) == ([0], [1, 2])


class Told:
    """A streamer that is asked what it has done."""

    def __init__(self, *owned: Any) -> None:
        self.owned, self.dropped_pieces = list(owned), 3
        self.traces: list[Any] = []

    def stats(self) -> dict[str, int]:
        return {"copied_bytes": 7}

    def record(self, trace: Any) -> None:
        self.traces.append(trace)


class Traced(Trace):
    """What has seen one copy."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(None, 0)  # type: ignore[arg-type]
        self.nbytes = nbytes

    def spans(self) -> list[TraceSpan]:
        return [TraceSpan(COPY, "w", 0, 1000, self.nbytes, 0)]


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
