"""Traces: one clock for host and device, bounded memory, a file that appears whole; lanes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpde.errors import InvalidDestination
from tpde.format.temporary import temporary_name
from tpde.streaming.trace import TRACKS, Event, Trace, write_trace


class Mark:
    """An event at a time of the device's clock, in ns; passed or not. Elapsed times are floats of 32 bits."""

    def __init__(self, at: int, passed: bool = True) -> None:
        self.at, self.passed, self.waits = at, passed, 0

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.waits += 1
        self.passed = True

    def elapsed_time(self, end: Mark) -> float:
        import numpy as np

        assert self.passed
        assert end.passed, "read before the device passed it"
        return float(np.float32((end.at - self.at) / 1e6))


def trace(limit: int = 1000) -> Trace:
    return Trace(Mark(0), 1_000_000, limit=limit)


def span(it: Trace, begin: int, end: int, name: str = "x", passed: bool = True) -> None:
    start: Event = Mark(begin)
    it.copy(start, Mark(end, passed), name, 10)


def written(path: Path, *traces: Trace) -> dict[str, Any]:
    write_trace(path, traces)
    return dict(json.loads(path.read_text()))


def test_one_clock_for_host_and_device() -> None:
    it = trace()
    it.read(1_200_000, 1_300_000, "r", 5)
    it.copy(Mark(400_000), Mark(600_000), "c", 7)
    it.wait(1_250_000, 1_300_000, "w")
    it.decode(Mark(600_000), Mark(650_000), "d", 9)
    it.compute(Mark(650_000), Mark(900_000), "k")
    found = {s.name: (s.track, s.start, s.end, s.nbytes) for s in it.spans()}
    assert found == {
        "r": ("disk", 1_200_000, 1_300_000, 5),
        "w": ("host waits", 1_250_000, 1_300_000, 0),
        "c": ("copy", 1_400_000, 1_600_000, 7),
        "d": ("decode", 1_600_000, 1_650_000, 9),
        "k": ("compute", 1_650_000, 1_900_000, 0),
    }
    assert [s.name for s in it.spans()] == ["r", "w", "c", "d", "k"]


def test_an_hour_later_times_are_still_exact() -> None:
    it, draw = trace(100_000), random.Random(0)
    ends = [i * 10**9 + draw.randrange(10**9) for i in range(1, 3601)]
    for end in ends:
        span(it, end - 1_000_000, end)
    found = it.spans()
    # Floats of 32 bits are 0.25 ms apart there: times from the start on would be off by half of that.
    assert max(abs(one.end - 1_000_000 - end) for one, end in zip(found, ends, strict=True)) < 50_000
    assert {one.end - one.start for one in found} == {1_000_000}


def test_recording_never_waits_or_reads_what_has_not_passed() -> None:
    it = trace(limit=5000)
    marks = [Mark(i, passed=False) for i in range(3000)]
    for mark in marks:
        it.copy(mark, mark, "x", 1)
    assert not any(mark.waits for mark in marks)
    assert it.dropped == 3000 - 1024
    assert len(it.spans()) == 1024


def test_memory_is_bounded_and_the_newest_are_kept(tmp_path: Path) -> None:
    it = trace(limit=10)
    for i in range(2000):
        span(it, 100 * i, 100 * i + 50, str(i))
    assert [s.name for s in it.spans()] == [str(i) for i in range(1990, 2000)]
    assert it.dropped == 1990
    found = written(tmp_path / "t.json", it)
    assert found["otherData"] == {"dropped_spans": 1990}
    assert "1990 spans were dropped" in json.dumps(found["traceEvents"])


def test_the_file(tmp_path: Path) -> None:
    it = trace()
    it.copy(Mark(0), Mark(1000), "layers.0 [0]", 55_000)
    it.compute(Mark(500), Mark(2500), "layers.0")
    found = written(tmp_path / "t.json", it, trace())
    events = found["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X"}
    copy, compute = (next(e for e in events if e.get("cat") == cat) for cat in ("copy", "compute"))
    assert (copy["ts"], copy["dur"], copy["args"]["bytes"]) == (0.0, 1.0, 55_000)
    assert copy["args"]["GB/s"] == 55.0
    assert (compute["ts"], compute["dur"], compute["args"]) == (0.5, 2.0, {})
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[copy["pid"], copy["tid"]] == "copy"
    assert {e["pid"] for e in events if e["name"] == "process_name"} == {0, 1}


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=30))
def test_what_overlaps_lies_in_lanes_of_its_own(reads: list[tuple[int, int]]) -> None:
    from tpde.streaming.trace import _events

    it = trace()
    for begin, size in reads:
        it.read(begin, begin + size, "r", 1)
    events = [e for e in _events([it]) if e["ph"] == "X"]
    assert len(events) == len(reads)
    ends: dict[int, float] = {}
    for event in sorted(events, key=lambda e: (e["ts"], e["dur"])):
        assert event["ts"] >= ends.get(event["tid"], 0) - 1e-9
        ends[event["tid"]] = event["ts"] + event["dur"]
    labels = [e["args"]["name"] for e in _events([it]) if e["name"] == "thread_name"]
    assert labels == [TRACKS[3] if not i else f"{TRACKS[3]} {i + 1}" for i in range(len(labels))]


def test_the_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("before")
    it = trace()
    it.read(0, 1, object(), 1)  # type: ignore[arg-type] - a name that JSON cannot hold
    with pytest.raises(TypeError):
        write_trace(path, [it])
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(InvalidDestination, match="create the folder first"):
        write_trace(tmp_path / "none" / "t.json", [trace()])


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    temporary_name(path).write_text("half")
    write_trace(path, [trace()])
    assert list(tmp_path.iterdir()) == [path]
