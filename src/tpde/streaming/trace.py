"""What a streamed model's reads, copies, decodes and computations did when: recorded, and written to look at.

A streamer without a `Trace` holds None and pays one comparison. With one, each call here appends a tuple; the
device's clock is read later, when the work is long done, so that recording never waits for the device.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from tpde.io.sinks import FileSink, unwritable

LIMIT = 200_000  # spans kept: about 60 MB of memory, 40 MB of file, half an hour of 100 pieces a second
_PENDING = 1024  # spans whose events the device may not have passed: each holds two of its driver's events
_REANCHOR = 16_000.0  # ms: the driver gives 32-bit floats, whose steps are 1 us there

COPY, DECODE, COMPUTE, READ, WAIT = "copy", "decode", "compute", "disk", "host waits"
TRACKS = (COMPUTE, DECODE, COPY, READ, WAIT)  # as they are shown, from the top


class TimingEvent(Protocol):
    """A mark on a stream that tells its time, such as `torch.cuda.Event(enable_timing=True)`."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def synchronize(self) -> None:
        """Wait until the device has passed it."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from this one to another."""


class TraceSpan(NamedTuple):
    """Something that took time.

    Attributes
    ----------
    track : str
        One of `TRACKS`.
    name : str
        Of the block, tensor or piece.
    start, end : int
        Nanoseconds of `time.perf_counter_ns`.
    nbytes : int
        Moved or written; 0 where that says nothing.
    queued : int
        When the host asked for it.
    """

    track: str
    name: str
    start: int
    end: int
    nbytes: int
    queued: int


class _Pending(NamedTuple):
    track: str
    name: str
    start: TimingEvent
    end: TimingEvent
    nbytes: int
    queued: int


class Trace:
    """Records the spans of one device, any thread's.

    Parameters
    ----------
    anchor : TimingEvent
        A timing event of the device that it has passed.
    anchor_ns : int
        `time.perf_counter_ns()` right after waiting for it: ties the device's clock to the host's.
    device : str
        What the file calls the device.
    limit : int
        Spans to keep; when there are more, the oldest are dropped.
    clock : callable
        Gives the host's time, in nanoseconds.

    Attributes
    ----------
    dropped : int
        Spans dropped so far.

    Notes
    -----
    Give every span events of its own: one that is recorded again tells its last time. The start of a copy is
    to be recorded after the copy stream's wait for the slot, that of a computation after the decode of its
    weights was queued: spans then hold no waiting.
    """

    def __init__(
        self,
        anchor: TimingEvent,
        anchor_ns: int,
        *,
        device: str = "cuda:0",
        limit: int = LIMIT,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.device, self.dropped = device, 0
        self._anchor, self._anchor_ns = anchor, anchor_ns
        self._limit, self._lock, self._clock = limit, threading.Lock(), clock
        self._spans: deque[TraceSpan] = deque()
        self._pending: deque[_Pending] = deque()

    def copy(self, start: TimingEvent, end: TimingEvent, name: str, nbytes: int) -> None:
        """Bytes from the host to the device; called when the copy has been queued."""
        self._queue(_Pending(COPY, name, start, end, nbytes, self._clock()))

    def decode(self, start: TimingEvent, end: TimingEvent, name: str, nbytes: int) -> None:
        """One launch that writes so many plain bytes."""
        self._queue(_Pending(DECODE, name, start, end, nbytes, self._clock()))

    def compute(self, start: TimingEvent, end: TimingEvent, name: str) -> None:
        """A block, or a module outside of blocks."""
        self._queue(_Pending(COMPUTE, name, start, end, 0, self._clock()))

    def read(self, t0_ns: int, t1_ns: int, name: str, nbytes: int) -> None:
        """Bytes from a file to host memory."""
        self._keep(TraceSpan(READ, name, t0_ns, t1_ns, nbytes, t0_ns))

    def wait(self, t0_ns: int, t1_ns: int, name: str) -> None:
        """The host could not queue a copy, since its bytes were not read yet."""
        self._keep(TraceSpan(WAIT, name, t0_ns, t1_ns, 0, t0_ns))

    def spans(self) -> list[TraceSpan]:
        """All spans that are kept, by their starts. Waits for the device to pass the last of them."""
        with self._lock:
            while self._pending:
                self._pending[0].end.synchronize()
                self._resolve(self._pending.popleft())
            return sorted(self._spans, key=lambda span: (span.start, span.end))

    def _queue(self, pending: _Pending) -> None:
        with self._lock:
            self._pending.append(pending)
            # The oldest only: what the device has not passed lies behind it, on this or another stream.
            while len(self._pending) > _PENDING // 2 and self._pending[0].end.query():
                self._resolve(self._pending.popleft())
            if len(self._pending) > _PENDING:
                self._pending.popleft()
                self.dropped += 1

    def _keep(self, span: TraceSpan) -> None:
        with self._lock:
            self._append(span)

    def _append(self, span: TraceSpan) -> None:
        self._spans.append(span)
        if len(self._spans) > self._limit:
            self._spans.popleft()
            self.dropped += 1

    def _resolve(self, it: _Pending) -> None:
        """Give a span whose events the device has passed the host's times."""
        after = self._anchor.elapsed_time(it.end)
        end = self._anchor_ns + round(after * 1e6)
        start = end - round(it.start.elapsed_time(it.end) * 1e6)
        self._append(TraceSpan(it.track, it.name, start, end, it.nbytes, it.queued))
        if after > _REANCHOR:
            self._anchor, self._anchor_ns = it.end, end


def start_trace(device: Any, limit: int = LIMIT) -> Trace:
    """A trace of a CUDA device, its clock tied to the host's now: the device is waited for.

    Parameters
    ----------
    device : torch.device
        With its number.
    limit : int
        See `Trace`.
    """
    import torch

    with torch.cuda.device(device):
        torch.cuda.synchronize()  # an event on an idle device is passed at once
        anchor = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        anchor.record()
        anchor.synchronize()
        return Trace(anchor, time.perf_counter_ns(), device=str(device), limit=limit)


def write_trace(path: str | os.PathLike[str], traces: Sequence[Trace]) -> None:
    """Write what was recorded as a file for https://ui.perfetto.dev or `chrome://tracing`.

    Parameters
    ----------
    path : path-like
        Replaced if it is there; the file appears whole or not at all.
    traces : sequence of Trace
        One for each device.

    Raises
    ------
    InvalidDestination
        If it cannot be written.
    """
    sink, at = FileSink(path, force=True), 0
    try:
        for text in _texts(traces):
            data = text.encode()
            sink.write(at, [data])
            at += len(data)
        sink.commit()
    except OSError as error:
        raise unwritable(sink.path, error) from error
    finally:
        sink.abort()  # nothing, once it is committed


def _texts(traces: Sequence[Trace]) -> Iterator[str]:
    """The file, in pieces of some 100 kB."""
    about = json.dumps({"dropped_spans": sum(trace.dropped for trace in traces)})
    yield f'{{"displayTimeUnit": "ms", "otherData": {about},\n"traceEvents": ['
    lead, events = "\n", map(json.dumps, _events(traces))
    while lines := list(itertools.islice(events, 1000)):
        yield lead + ",\n".join(lines)
        lead = ",\n"
    yield "\n]}\n"


def _events(traces: Sequence[Trace]) -> Iterator[dict[str, Any]]:
    found = [trace.spans() for trace in traces]
    zero = min((spans[0].start for spans in found if spans), default=0)
    for pid, (trace, spans) in enumerate(zip(traces, found, strict=True)):
        name = trace.device
        if trace.dropped:
            name += f" (the oldest {trace.dropped} spans were dropped)"
        yield _meta("process_name", pid, 0, name=name)
        for i, track in enumerate(TRACKS):
            lanes: list[int] = []  # ends: what overlaps must lie in another lane
            for span in spans:
                if span.track != track:
                    continue
                lane = next((n for n, end in enumerate(lanes) if end <= span.start), len(lanes))
                tid = 1 + i + len(TRACKS) * lane
                if lane == len(lanes):
                    lanes.append(0)
                    yield _meta("thread_name", pid, tid, name=track if not lane else f"{track} {lane + 1}")
                    yield _meta("thread_sort_index", pid, tid, sort_index=1000 * i + lane)
                lanes[lane] = span.end
                yield _complete(span, pid, tid, zero)


def _meta(what: str, pid: int, tid: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _complete(span: TraceSpan, pid: int, tid: int, zero: int) -> dict[str, Any]:
    took = span.end - span.start
    args: dict[str, Any] = {}
    if span.nbytes:
        args["bytes"] = span.nbytes
        if took > 0:
            args["GB/s"] = round(span.nbytes / took, 3)
    if span.queued < span.start:
        args["queued before, us"] = (span.start - span.queued) / 1e3
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.track,
        "pid": pid,
        "tid": tid,
        "ts": (span.start - zero) / 1e3,
        "dur": took / 1e3,
        "args": args,
    }
