"""A CUDA device as streaming sees it: a ring of places, a copy stream, and decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from tpde.memory import allocate
from tpde.streaming.lock import steps
from tpde.streaming.pieces import Piece
from tpde.streaming.tensor import put_on_device
from tpde.weights.launch import REPORTED, capturing, on_device, upload

_STATUSES = 4096  # 64 KiB: an 8 B model has 400 pieces


class Damage(NamedTuple):
    """A chunk whose checksum does not match."""

    piece: int
    span: int
    chunk: int


class Device(Protocol):
    """What copies pieces to places of a ring, and decodes them from there.

    Copies are done one after the other; so are decodes, as far as they are queued from one stream. Nothing
    here waits for the device, unless it says so.

    Attributes
    ----------
    trace : Trace or None
        What takes note of when things happen.
    """

    trace: Any

    def prepare(self, pieces: Sequence[Piece]) -> Any:
        """Put what decoding some pieces needs on the device; returns a handle."""

    def copy(self, place: int, address: int, piece: Piece) -> Any:
        """Queue the copy of a piece's bytes to a place; returns the event of its end."""

    def hold(self, event: Any) -> None:
        """Let later copies wait for an event."""

    def decode(self, handle: Any, number: int, place: int, out: torch.Tensor, copied: Any) -> Any:
        """Queue the decoding of a prepared piece after its copy; returns the event of its end."""

    def damage(self, handle: Any) -> Damage | None:
        """What decoding has reported so far, if anything."""

    def wait(self) -> None:
        """Wait until all that was queued is done, from any stream."""

    def decoded(self) -> None:
        """Wait until what the caller's stream decodes is done; copies go on."""

    def close(self) -> None:
        """Wait, and free the places. Closing again does nothing."""

    def recording(self) -> bool:
        """Whether the caller's stream is recording a CUDA graph."""


class _Handle(NamedTuple):
    """Prepared pieces: launches, where their descriptors lie, and four words of host memory for each."""

    works: list[Any]
    names: list[str]
    sizes: list[int]  # of the pieces
    offsets: list[int]
    descriptors: torch.Tensor
    status: torch.Tensor
    reports: Any  # the same memory as an array


class _Statuses:
    """Four words of locked host memory for each piece, which kernels write to.

    Many at a time: allocating such memory takes a call of the driver, which waits while pages are locked.
    """

    def __init__(self) -> None:
        self._rows = self._zeros(_STATUSES)

    def _zeros(self, count: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.zeros((count, 4), dtype=torch.int32, pin_memory=True)

    def take(self, count: int) -> torch.Tensor:
        """Zeros."""
        if len(self._rows) < count:
            self._rows = self._zeros(max(count, _STATUSES))
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

    Raises
    ------
    OutOfMemory
        If there is no room for the places.
    """

    def __init__(self, device: torch.device, ring: int, *, beside: CudaDevice | None = None) -> None:
        self.device = device
        self.trace: Any = None
        # Since when, on the weights of what: one, or none.
        self._computing: list[tuple[Any, str]] = [] if beside is None else beside._computing
        made = allocate(ring, device, "the room that packed weights are copied to")
        self._ring: torch.Tensor | None = made
        with torch.cuda.device(device):
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._copies.wait_stream(
                torch.cuda.current_stream(device)
            )  # the memory may still be in use there
        self._base = made.data_ptr()
        self._statuses = _Statuses()

    def prepare(self, pieces: Sequence[Piece]) -> _Handle:
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
        sizes = [-(-work.descriptors.size // 16) * 16 for work in works]
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        rows = np.zeros(max(sum(sizes), 16), np.uint8)
        for work, at in zip(works, offsets, strict=True):
            rows[at : at + work.descriptors.size] = work.descriptors
        names, lengths = [it.extent.name for it in pieces], [it.extent.size for it in pieces]
        status = self._statuses.take(len(works))
        reports = status.numpy().view("<u4")
        return _Handle(works, names, lengths, offsets, upload(rows, self.device), status, reports)

    def copy(self, place: int, address: int, piece: Piece) -> Any:
        """Queue a copy on the copy stream."""
        from cuda.bindings import driver

        with on_device(self.device):
            start = self._mark(self._copies) if self.trace is not None else None
            to, size, stream = self._base + place + piece.pad, piece.extent.size, self._copies.cuda_stream
            for at, part in steps(address, size):
                (code,) = driver.cuMemcpyHtoDAsync(to + at, address + at, part, stream)
                if code != driver.CUresult.CUDA_SUCCESS:
                    raise RuntimeError(
                        f"copying {part} bytes of `{piece.extent.name}` to {self.device}: {code}"
                    )
            end = self._mark(self._copies)
        if self.trace is not None:
            self.trace.copy(start, end, piece.extent.name, size)
        return end

    def hold(self, event: Any) -> None:
        """Let the copy stream wait."""
        self._copies.wait_event(event)

    def decode(self, handle: _Handle, number: int, place: int, out: torch.Tensor, copied: Any) -> Any:
        """Launch on the current stream, checksums included."""
        stream = torch.cuda.current_stream(self.device)
        if self.trace is not None and number == 0 and self._computing:
            # What follows the last unit's decoding ends before this one's copy is waited for.
            since, name = self._computing.pop()
            self.trace.compute(since, self._mark(stream), name)
        stream.wait_event(copied)
        work = handle.works[number]
        with on_device(self.device):
            start = self._mark(stream) if self.trace is not None else None
            work.launch(
                handle.descriptors.data_ptr() + handle.offsets[number],
                out.data_ptr(),
                handle.status.data_ptr() + 16 * number,
                stream.cuda_stream,
                check=True,
                base=self._base + place,
            )
            end = self._mark(stream)
        if self.trace is not None:
            self.trace.decode(start, end, handle.names[number], handle.sizes[number])
            last = number == len(handle.works) - 1
            self._computing[:] = [(self._mark(stream), handle.names[0])] if last else []
        return end

    def damage(self, handle: _Handle) -> Damage | None:
        """What the kernels have written to host memory."""
        for piece in np.flatnonzero(handle.reports[:, 0] == REPORTED).tolist():
            _, span, low, high = handle.reports[piece].tolist()
            handle.reports[piece] = 0
            return Damage(piece, span, high << 32 | low)
        return None

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
            self._ring = None

    def recording(self) -> bool:
        """Whether the current stream is recording a CUDA graph."""
        return capturing(self.device)

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=self.trace is not None)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event
