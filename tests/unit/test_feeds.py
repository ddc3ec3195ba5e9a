"""What brings weights under a budget: what is opened, who owns it, who is told. Devices are made up."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.simulated import probed

torch = pytest.importorskip("torch", reason="needs torch")

from support.card import DEVICE, GIB, Card  # noqa: E402
from support.contents import fill  # noqa: E402
from support.feeds import SECOND, Feed, World  # noqa: E402
from support.files import pack_bytes, safetensors_bytes  # noqa: E402

from tpde.errors import Truncated  # noqa: E402
from tpde.format.container import TensorSpec  # noqa: E402
from tpde.loading.budgeted import Streaming  # noqa: E402
from tpde.loading.checkpoint_files import Checkpoint  # noqa: E402
from tpde.loading.feeds import Feeds  # noqa: E402
from tpde.loading.machine import loading_on  # noqa: E402
from tpde.loading.runs import Run  # noqa: E402
from tpde.planning.budget import Budget  # noqa: E402
from tpde.planning.units import Placement  # noqa: E402

SPEC = TensorSpec("BF16", (64, 128))


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
