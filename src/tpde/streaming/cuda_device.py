"""A CUDA device as streaming sees it: a ring of places, a copy stream, and decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tpde.host.feed import Event
from tpde.host.page_lock import STEP, steps
from tpde.memory.device_memory import allocate
from tpde.streaming.pieces import Piece
from tpde.streaming.streamed_source import put_on_device
from tpde.streaming.trace import Trace
from tpde.weights.launch import Damage, DecodeLaunch, Launch, capturing, locked_reports, on_device

REPORTS = 4096  # 64 KiB: an 8 B model has 400 pieces


class Prepared:
    """Pieces that a device is ready to decode: each device's own, and nobody else looks into it."""


class Device(Protocol):
    """What copies pieces to places of a ring, and decodes them from there.

    Copies are done one after the other; so are decodes, as far as they are queued from one stream. Nothing
    here waits for the device, unless it says so.

    Attributes
    ----------
    trace : Trace or None
        What takes note of when things happen.
    """

    trace: Trace | None

    def prepare(self, pieces: Sequence[Piece]) -> Prepared:
        """Put what decoding some pieces needs on the device; returns a handle."""

    def copy(self, place: int, address: int, piece: Piece) -> Event:
        """Queue the copy of a piece's bytes to a place; returns the event of its end."""

    def hold(self, event: Event) -> None:
        """Let later copies wait for an event."""

    def decode(self, handle: Prepared, number: int, place: int, out: torch.Tensor, copied: Event) -> Event:
        """Queue the decoding of a prepared piece after its copy; returns the event of its end."""

    def damage(self, handle: Prepared) -> Damage | None:
        """What decoding has reported so far, if anything."""

    def wait(self) -> None:
        """Wait until all that was queued is done, from any stream."""

    def decoded(self) -> None:
        """Wait until what the caller's stream decodes is done; copies go on."""

    def close(self) -> None:
        """Wait, and free the places. Closing again does nothing."""

    def recording(self) -> bool:
        """Whether the caller's stream is recording a CUDA graph."""


@dataclass(frozen=True)
class _Handle(Prepared):
    """What launches them, and what a trace says of them."""

    launch: DecodeLaunch
    names: list[str]
    sizes: list[int]


class Reports:
    """Four words of locked host memory for each piece, which kernels write to.

    Many at a time: allocating such memory takes a call of the driver, which waits while pages are locked.

    Parameters
    ----------
    least : int
        How many at a time.
    """

    def __init__(self, least: int = REPORTS) -> None:
        self._least = least
        self._rows = locked_reports(least)

    def take(self, count: int) -> torch.Tensor:
        """Zeros."""
        if len(self._rows) < count:
            self._rows = locked_reports(max(count, self._least))
        taken, self._rows = self._rows[:count], self._rows[count:]
        return taken


class CudaDevice:
    """A CUDA device.

    Parameters
    ----------
    device : torch.device
        With its number.
    ring : int
        Bytes of all places together.
    beside : CudaDevice, optional
        What brings other weights of the same model to the device. Each has a copy stream of its own, and so
        waits for no copies of the other; what is computed is noted for both together.
    step : int
        By which the host memory that it copies from was locked: see `tpde.host.page_lock.steps`.

    Attributes
    ----------
    memory : torch.Tensor or None
        The places' bytes; None once they were given back.

    Raises
    ------
    OutOfMemory
        If there is no room for the places.
    """

    def __init__(
        self, device: torch.device, ring: int, *, beside: CudaDevice | None = None, step: int = STEP
    ) -> None:
        self.device, self._step = device, step
        self.trace: Trace | None = None
        # Since when, on the weights of what: one, or none.
        self._computing: list[tuple[torch.cuda.Event, str]] = [] if beside is None else beside._computing
        made = allocate(ring, device, "the room that packed weights are copied to")
        self.memory: torch.Tensor | None = made
        with torch.cuda.device(device):
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._copies.wait_stream(
                torch.cuda.current_stream(device)
            )  # the memory may still be in use there
        self._base = made.data_ptr()
        self._reports = Reports()

    def prepare(self, pieces: Sequence[Piece]) -> Prepared:
        """Put index maps, tables and descriptors on the device, and compile the kernels."""
        from tpde.cuda.decode import WorkList

        index = self.device.index
        assert index is not None
        put_on_device({id(span.tensor): span.tensor for it in pieces for span in it.spans}.values())
        works = [
            WorkList([s.tensor.span_item(s.out, s.chunks, s.at) for s in piece.spans], index)
            for piece in pieces
        ]
        for work in works:
            work.prepare()
        launch = Launch(works, self.device, self._reports.take(len(works)))
        return _Handle(launch, [it.extent.name for it in pieces], [it.extent.size for it in pieces])

    def copy(self, place: int, address: int, piece: Piece) -> Event:
        """Queue a copy on the copy stream."""
        from cuda.bindings import driver

        trace = self.trace
        with on_device(self.device):
            start = None if trace is None else self._mark(self._copies)
            to, size, stream = self._base + place, piece.extent.size, self._copies.cuda_stream
            for at, part in steps(address, size, self._step):
                (code,) = driver.cuMemcpyHtoDAsync(to + at, address + at, part, stream)
                if code != driver.CUresult.CUDA_SUCCESS:
                    raise RuntimeError(
                        f"copying {part} bytes of `{piece.extent.name}` to {self.device}: {code}"
                    )
            end = self._mark(self._copies)
        if trace is not None and start is not None:
            trace.copy(start, end, piece.extent.name, size)
        return end

    def hold(self, event: Event) -> None:
        """Let the copy stream wait."""
        assert isinstance(event, torch.cuda.Event)
        self._copies.wait_event(event)

    def decode(self, handle: Prepared, number: int, place: int, out: torch.Tensor, copied: Event) -> Event:
        """Launch on the current stream, checksums included."""
        assert isinstance(handle, _Handle)
        assert isinstance(copied, torch.cuda.Event)
        stream = torch.cuda.current_stream(self.device)
        trace = self.trace
        if trace is not None and number == 0 and self._computing:
            # What follows the last unit's decoding ends before this one's copy is waited for.
            since, name = self._computing.pop()
            trace.compute(since, self._mark(stream), name)
        stream.wait_event(copied)
        with on_device(self.device):
            start = None if trace is None else self._mark(stream)
            handle.launch(number, out.data_ptr(), True, self._base + place)
            end = self._mark(stream)
        if trace is not None and start is not None:
            trace.decode(start, end, handle.names[number], handle.sizes[number])
            last = number == len(handle.names) - 1
            self._computing[:] = [(self._mark(stream), handle.names[0])] if last else []
        return end

    def damage(self, handle: Prepared) -> Damage | None:
        """What the kernels have written to host memory."""
        assert isinstance(handle, _Handle)
        return handle.launch.damage()

    def wait(self) -> None:
        """Wait for all streams: kernels of others may read rows from memory that is given back next."""
        torch.cuda.synchronize(self.device)

    def decoded(self) -> None:
        """Wait for the current stream."""
        torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Wait, and free the places: the memory that copies read may be given back then."""
        try:
            self.wait()
        finally:
            self.memory = None

    def recording(self) -> bool:
        """Whether the current stream is recording a CUDA graph."""
        return capturing(self.device)

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=self.trace is not None)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event
