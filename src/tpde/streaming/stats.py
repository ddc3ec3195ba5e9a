"""How well copies were hidden behind decoding and computing, and why the bus stood still when it did.

Everything is computed from spans after the fact: integers in, integers out, nothing of a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from tpde.streaming.trace import COMPUTE, COPY, DECODE, WAIT, TraceSpan

BUSY = 0.95  # of the time copying: then the bus itself is what limits


class Interval(NamedTuple):
    """From one time to another, in nanoseconds."""

    start: int
    end: int


class Copy(NamedTuple):
    """A copy: when it ran, when the host had queued it, and how much it moved."""

    start: int
    end: int
    queued: int
    nbytes: int


@dataclass(frozen=True)
class StreamingTimes:
    """Times in nanoseconds.

    Attributes
    ----------
    window : int
        From the start of the first copy to the end of the last. It is the sum of `copying`, `ring_full`,
        `host_late` and `disk_late`.
    copying : int
        In which bytes were on the bus: `hidden` and `exposed`.
    hidden, exposed : int
        While the device decoded or computed, and while it did neither.
    ring_full : int
        The next copy was queued, but all slots were in use: decoding or computing was slower.
    host_late : int
        The host had not queued the next copy, though its bytes were there.
    disk_late : int
        The host waited for its bytes to be read.
    decoding, computing : int
        In the window.
    bytes, pieces : int
        Copied.
    waited : int
        Copies at whose end the device was idle: computing waited for them.
    dropped : int
        Pieces that were copied in vain.
    """

    window: int
    copying: int
    hidden: int
    exposed: int
    ring_full: int
    host_late: int
    disk_late: int
    decoding: int
    computing: int
    bytes: int
    pieces: int
    waited: int
    dropped: int

    @property
    def rate(self) -> float:
        """Bytes a second while copying."""
        return self.bytes / self.copying * 1e9 if self.copying else 0.0

    @property
    def limit(self) -> str:
        """What to make faster: `copy`, or the largest reason for the bus to stand still."""
        if self.copying >= BUSY * self.window:
            return "copy"
        reasons = {"compute": self.ring_full, "host": self.host_late, "disk": self.disk_late}
        return max(reasons, key=lambda reason: reasons[reason])

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return asdict(self) | {"rate": self.rate, "limit": self.limit}

    def text(self) -> str:
        """Lines for `--stats`."""
        if not self.window:
            return f"nothing was copied ({_mispredicted(self)})" if self.dropped else "nothing was copied"
        lines = [
            f"copied {self.bytes / 1e9:.2f} GB in {self.pieces} pieces at {self.rate / 1e9:.1f} GB/s; "
            f"{self.waited} were waited for, {_mispredicted(self)}",
            f"the bus was busy for {_share(self.copying, self.window)} of {_seconds(self.window)}; of its "
            f"copying {_share(self.hidden, self.copying)} was hidden behind decoding and computing",
        ]
        idle = [
            (self.ring_full, "the ring was full (decoding or computing was slower)"),
            (self.host_late, "the host had not queued the next copy"),
            (self.disk_late, "the disk had not delivered"),
        ]
        lines += [
            f"idle for {_seconds(took)} ({_share(took, self.window)}): {why}" for took, why in idle if took
        ]
        lines.append(_LIMITS[self.limit])
        return "\n".join(lines)


_LIMITS = {
    "copy": "the bus is the limit: only more `vram` makes this faster",
    "compute": "decoding and computing are the limit: they keep the ring full",
    "host": "the host is the limit: it queues copies too late",
    "disk": "the disk is the limit: more `ram`, or a faster disk",
}


def _mispredicted(summary: StreamingTimes) -> str:
    return f"{summary.dropped} were not wanted after all"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %"


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:.3f} s" if ns >= 10**9 else f"{ns / 1e6:.2f} ms"


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals: disjoint, not touching, ascending. Empty ones are left out."""
    out: list[Interval] = []
    for start, end in sorted((it.start, it.end) for it in intervals if it.end > it.start):
        if out and start <= out[-1].end:
            out[-1] = Interval(out[-1].start, max(out[-1].end, end))
        else:
            out.append(Interval(start, end))
    return out


def length(merged: Iterable[Interval]) -> int:
    """Time covered by disjoint intervals."""
    return sum(it.end - it.start for it in merged)


def overlap(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """What two unions have in common."""
    out, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i].start, b[j].start), min(a[i].end, b[j].end)
        if start < end:
            out.append(Interval(start, end))
        if a[i].end < b[j].end:
            i += 1
        else:
            j += 1
    return out


def summarize(
    copies: Sequence[Copy],
    decodes: Iterable[Interval],
    computes: Iterable[Interval],
    waits: Iterable[Interval],
    dropped: int = 0,
) -> StreamingTimes:
    """Account for every nanosecond between the first and the last copy.

    Parameters
    ----------
    copies : sequence of Copy
        In any order; they may overlap.
    decodes, computes : iterable of Interval
        Of the device.
    waits : iterable of Interval
        Of the host for bytes to be read.
    dropped : int
        Pieces that were copied in vain, as the streamer counts them.

    Returns
    -------
    StreamingTimes
        A gap between copies is split at the time when the copy that ends it was queued: before, the host (or
        the disk, where the host waited for it) was late; after, the ring was full.
    """
    copying = merge(Interval(it.start, it.end) for it in copies)
    window = copying[-1].end - copying[0].start if copying else 0
    whole = [Interval(copying[0].start, copying[-1].end)] if copying else []
    decoding, computing = overlap(merge(decodes), whole), overlap(merge(computes), whole)
    working = merge([*decoding, *computing])
    hidden = length(overlap(copying, working))
    queued: dict[int, int] = {}  # by start; of copies that start together, the first
    for it in copies:
        if it.end > it.start:
            queued[it.start] = min(it.queued, queued.get(it.start, it.queued))
    late, ring_full = [], 0
    for before, after in pairwise(copying):
        turn = min(max(queued[after.start], before.end), after.start)
        ring_full += after.start - turn
        late.append(Interval(before.end, turn))
    late = merge(late)
    disk_late = length(overlap(late, merge(waits)))
    return StreamingTimes(
        window=window,
        copying=length(copying),
        hidden=hidden,
        exposed=length(copying) - hidden,
        ring_full=ring_full,
        host_late=length(late) - disk_late,
        disk_late=disk_late,
        decoding=length(decoding),
        computing=length(computing),
        bytes=sum(it.nbytes for it in copies),
        pieces=len(copies),
        waited=_idle_at(sorted(it.end - 1 for it in copies if it.end > it.start), working),
        dropped=dropped,
    )


def _idle_at(times: Sequence[int], working: Sequence[Interval]) -> int:
    """How many of some ascending times lie outside of disjoint intervals."""
    count = i = 0
    for time in times:
        while i < len(working) and working[i].end <= time:
            i += 1
        count += i == len(working) or time < working[i].start
    return count


def summarize_spans(spans: Iterable[TraceSpan], dropped: int = 0) -> StreamingTimes:
    """The summary of a trace: see `summarize`."""
    tracks: dict[str, list[TraceSpan]] = {}
    for span in spans:
        tracks.setdefault(span.track, []).append(span)

    def intervals(track: str) -> list[Interval]:
        return [Interval(span.start, span.end) for span in tracks.get(track, [])]

    copies = [Copy(span.start, span.end, span.queued, span.nbytes) for span in tracks.get(COPY, [])]
    return summarize(copies, intervals(DECODE), intervals(COMPUTE), intervals(WAIT), dropped)
