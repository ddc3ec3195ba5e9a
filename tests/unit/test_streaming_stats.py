"""Statistics of streaming: every nanosecond between the first and the last copy has one explanation."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tpde.streaming.stats import (
    Copy,
    Interval,
    StreamingTimes,
    length,
    merge,
    overlap,
    summarize,
    summarize_spans,
)
from tpde.streaming.trace import TraceSpan

MS = 1_000_000
interval = st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda t: Interval(t[0], t[0] + t[1]))
intervals = st.lists(interval, max_size=12)
copies = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 8), st.integers(-10, 10)).map(
        lambda t: Copy(t[0], t[0] + t[1], t[0] - t[2], 1)
    ),
    max_size=12,
)


def inside(time: int, many: list[Interval]) -> bool:
    return any(it.start <= time < it.end for it in many)


@given(intervals, intervals)
def test_unions_and_overlaps_are_those_of_sets(a: list[Interval], b: list[Interval]) -> None:
    first, second = merge(a), merge(b)
    assert all(x.end < y.start for x, y in pairwise(first))
    both = overlap(first, second)
    for time in range(60):
        assert inside(time, first) == inside(time, a)
        assert inside(time, both) == (inside(time, a) and inside(time, b))
    assert length(first) == sum(inside(time, a) for time in range(60))


@given(copies, intervals, intervals, intervals)
def test_every_moment_is_accounted_for(
    made: list[Copy], decodes: list[Interval], computes: list[Interval], waits: list[Interval]
) -> None:
    found = summarize(made, decodes, computes, waits)
    busy = [Interval(it.start, it.end) for it in made if it.end > it.start]
    begin = min((it.start for it in busy), default=0)
    end = max((it.end for it in busy), default=0)
    counts = dict.fromkeys(("hidden", "exposed", "ring_full", "host_late", "disk_late"), 0)
    for time in range(begin, end):
        if inside(time, busy):
            counts["hidden" if inside(time, decodes) or inside(time, computes) else "exposed"] += 1
            continue
        start = min(it.start for it in busy if it.start > time)
        if time >= min(it.queued for it in made if it.start == start and it.end > it.start):
            counts["ring_full"] += 1
        else:
            counts["disk_late" if inside(time, waits) else "host_late"] += 1
    assert counts == {name: getattr(found, name) for name in counts}
    assert found.window == found.copying + found.ring_full + found.host_late + found.disk_late
    assert found.copying == found.hidden + found.exposed
    ends = [it.end - 1 for it in made if it.end > it.start]
    assert found.waited == sum(not inside(time, decodes) and not inside(time, computes) for time in ends)
    assert found.text()


@given(copies, intervals, intervals, intervals, st.integers(0, 10**12))
def test_times_are_relative(
    made: list[Copy], decodes: list[Interval], computes: list[Interval], waits: list[Interval], by: int
) -> None:
    def later(many: list[Interval]) -> list[Interval]:
        return [Interval(it.start + by, it.end + by) for it in many]

    moved = [Copy(it.start + by, it.end + by, it.queued + by, it.nbytes) for it in made]
    one = summarize(made, decodes, computes, waits)
    assert one == summarize(moved, later(decodes), later(computes), later(waits))


def case(starts: list[int], queued: list[int], waits: list[Interval] | None = None) -> StreamingTimes:
    """Copies of 10 ms and 550 MB."""
    made = [
        Copy(start * MS, (start + 10) * MS, at * MS, 550_000_000)
        for start, at in zip(starts, queued, strict=True)
    ]
    return summarize(made, [], [], waits or [], 2)


def test_who_limits() -> None:
    assert case([0, 10, 20], [0, 0, 0]).limit == "copy"
    full = case([0, 20, 40], [0, 1, 2])
    assert (full.limit, full.ring_full, full.host_late) == ("compute", 20 * MS, 0)
    late = case([0, 20, 40], [0, 20, 40])
    assert (late.limit, late.ring_full, late.host_late) == ("host", 0, 20 * MS)
    disk = case([0, 20, 40], [0, 20, 40], [Interval(5 * MS, 19 * MS), Interval(31 * MS, 40 * MS)])
    assert (disk.limit, disk.disk_late, disk.host_late) == ("disk", 18 * MS, 2 * MS)


def test_text_and_dict() -> None:
    text = case([0, 20, 40], [0, 15, 40]).text()
    assert "copied 1.65 GB in 3 pieces at 55.0 GB/s; 3 were waited for, 2 were not wanted after all" in text
    assert "busy for 60.0 % of 50.00 ms" in text
    assert "idle for 15.00 ms (30.0 %): the host had not queued the next copy" in text
    assert "the host is the limit" in text
    found = case([0, 20], [0, 16]).as_dict()
    assert (found["limit"], found["bytes"], found["ring_full"]) == ("host", 1_100_000_000, 4 * MS)
    assert found["rate"] == 55e9
    assert summarize([], [], [], []).text() == "nothing was copied"


def test_times_are_written_in_seconds_from_one_on() -> None:
    def copied(ms: int) -> str:
        return summarize([Copy(0, ms * MS, 0, 10**9)], [Interval(0, 250 * MS)], [], [], 0).text()

    assert "busy for 100.0 % of 1.000 s; of its copying 25.0 % was hidden" in copied(1000)
    assert "busy for 100.0 % of 999.00 ms; of its copying 25.0 % was hidden" in copied(999)
    assert copied(1000).startswith("copied 1.00 GB in 1 pieces at 1.0 GB/s; 1 were waited for, 0 were not")


def test_nothing_is_said_of_what_did_not_hold_copies_up() -> None:
    text = case([0, 10], [0, 0]).text()
    assert "idle" not in text
    assert text.endswith("the bus is the limit: only more `vram` makes this faster")
    every = case([0, 20, 40], [0, 14, 32], [Interval(11 * MS, 13 * MS)]).text()
    assert [line.partition("(")[0] for line in every.splitlines() if line.startswith("idle")] == [
        "idle for 14.00 ms ",
        "idle for 4.00 ms ",
        "idle for 2.00 ms ",
    ]


def test_a_bus_that_is_busy_for_95_of_100_is_the_limit() -> None:
    def limit(busy: int) -> str:
        made = [Copy(0, busy - 1, 0, 1), Copy(99, 100, 0, 1)]
        return summarize(made, [], [], []).limit

    assert [limit(busy) for busy in (94, 95, 96)] == ["compute", "copy", "copy"]


def test_what_was_dropped_is_told_where_nothing_was_copied() -> None:
    found = summarize([], [], [], [], 3)
    assert found.text() == "nothing was copied (3 were not wanted after all)"
    assert found.rate == 0.0


def test_of_copies_that_start_together_the_first_queued_counts() -> None:
    made = [Copy(0, 10, 0, 1), Copy(20, 30, 18, 1), Copy(20, 25, 13, 1), Copy(20, 20, 1, 1)]
    found = summarize(made, [], [], [])
    assert (found.host_late, found.ring_full) == (3, 7)


def test_of_a_trace() -> None:
    spans = [
        TraceSpan("copy", "a", 0, 10, 7, -5),
        TraceSpan("decode", "a", 12, 14, 9, 0),
        TraceSpan("host waits", "b", 11, 13, 0, 11),
        TraceSpan("copy", "b", 15, 20, 7, 14),
        TraceSpan("compute", "a", 14, 18, 0, 0),
        TraceSpan("disk", "b", 8, 13, 7, 8),
    ]
    found = summarize_spans(spans, dropped=5)
    assert (found.window, found.copying, found.hidden) == (20, 15, 3)
    assert (found.disk_late, found.host_late, found.ring_full) == (2, 2, 1)
    assert (found.bytes, found.pieces, found.waited, found.dropped) == (14, 2, 2, 5)
