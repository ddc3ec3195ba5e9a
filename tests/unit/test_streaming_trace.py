"""Traces: one clock for host and device, bounded memory, a file that appears whole; lanes."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.simulated import probed

from tpde.errors import InvalidDestination
from tpde.io.temporary import temporary_name
from tpde.streaming.trace import TRACKS, TimingEvent, Trace, TraceSpan, _events, write_trace


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
    start: TimingEvent = Mark(begin)
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


def test_times_in_the_file_are_from_the_first_span_of_all_devices(tmp_path: Path) -> None:
    one, two = trace(), trace()
    one.read(5_000, 6_000, "late", 0)
    two.read(3_000, 4_500, "early", 3)
    found = [it for it in written(tmp_path / "t.json", one, two)["traceEvents"] if it["ph"] == "X"]
    assert [(it["pid"], it["name"], it["ts"], it["dur"]) for it in found] == [
        (0, "late", 2.0, 1.0),
        (1, "early", 0.0, 1.5),
    ]
    assert [it["args"] for it in found] == [{}, {"bytes": 3, "GB/s": 0.002}]


def test_what_was_queued_before_it_began_says_how_long() -> None:
    it = trace()
    spans = [
        TraceSpan("copy", "waited", 5_000, 6_000, 0, 2_500),
        TraceSpan("copy", "at once", 7_000, 8_000, 0, 7_000),
        TraceSpan("copy", "nothing took no time", 9_000, 9_000, 7, 9_500),
    ]
    it._spans.extend(spans)
    assert [e["args"] for e in _events([it]) if e["ph"] == "X"] == [
        {"queued before, us": 2.5},
        {},
        {"bytes": 7},
    ]


def test_a_copy_is_queued_when_it_is_noted() -> None:
    it = Trace(Mark(0), 1_000_000, clock=iter([70, 80, 90]).__next__)
    it.copy(Mark(0), Mark(10), "c", 1)
    it.decode(Mark(20), Mark(30), "d", 1)
    it.compute(Mark(40), Mark(50), "k")
    it.read(60, 65, "r", 1)
    it.wait(66, 67, "w")
    assert {s.name: s.queued for s in it.spans()} == {"c": 70, "d": 80, "k": 90, "r": 60, "w": 66}


def test_as_many_spans_are_kept_as_there_is_room_for() -> None:
    it = trace(limit=2)
    for i in range(2):
        it.read(i, i + 1, str(i), 1)
    assert (len(it.spans()), it.dropped) == (2, 0)
    it.read(2, 3, "2", 1)
    assert ([s.name for s in it.spans()], it.dropped) == (["1", "2"], 1)


def test_as_many_events_are_kept_as_there_is_room_for() -> None:
    it = trace(5000)
    for i in range(1024):
        span(it, i, i + 1, passed=False)
    assert it.dropped == 0
    span(it, 1024, 1025, passed=False)
    assert it.dropped == 1
    assert len(it.spans()) == 1024


def test_spans_that_begin_together_are_in_the_order_of_their_ends() -> None:
    it = trace()
    for end in (9, 7, 8):
        it.read(5, end, str(end), 1)
    assert [s.name for s in it.spans()] == ["7", "8", "9"]


def test_lanes_have_numbers_of_their_own_and_are_sorted_by_track() -> None:
    it = trace()
    for name in "abc":
        it.read(0, 10, name, 1)
        it.wait(0, 10, name)
    it.read(10, 20, "d", 1)
    events = [*_events([it])]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(lanes) == 6
    order = {e["args"]["sort_index"]: lanes[e["tid"]] for e in events if e["name"] == "thread_sort_index"}
    assert [order[key] for key in sorted(order)] == [
        *("disk", "disk 2", "disk 3"),
        *("host waits", "host waits 2", "host waits 3"),
    ]
    (after,) = (e for e in events if e["name"] == "d")
    assert lanes[after["tid"]] == "disk", "it begins where another ends"


def test_a_file_of_many_spans_is_one_document(tmp_path: Path) -> None:
    it = trace(5000)
    for i in range(2500):
        it.read(i, i + 1, str(i), 1)
    found = [e["name"] for e in written(tmp_path / "t.json", it)["traceEvents"] if e["ph"] == "X"]
    assert found == [str(i) for i in range(2500)]


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    path.write_text("before")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(InvalidDestination, match="No space left"):
        write_trace(path, [trace()])
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("what", ["read", "copy", "spans"])
def test_spans_are_noted_by_one_thread_at_a_time(what: str) -> None:
    it, probe = probed(trace, "Lock")
    calls = {
        "read": lambda: it.read(0, 1, "r", 1),
        "copy": lambda: span(it, 5, 6),
        "spans": it.spans,
    }
    asked: list[bool] = []

    def call() -> None:
        calls[what]()
        probe.asked.set()

    other = threading.Thread(target=call)

    class Slow(Mark):
        def synchronize(self) -> None:
            super().synchronize()
            other.start()
            assert probe.asked.wait(60)
            asked.append(other.is_alive())

    it.copy(Mark(0), Slow(1), "c", 1)
    it.spans()
    other.join()
    assert asked == [True], "it waits for this one"
