"""Blobs from files to devices, in bounded host memory."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from tpde.errors import OutOfMemory, Truncated
from tpde.format.source import Extent
from tpde.memory import free_bytes, gib, require
from tpde.packing.writer import default_threads

PIECE_BYTES = 8 << 20  # of a read: fewer and larger reads are no faster from the page cache
READERS = 8  # threads: from the page cache to a GPU four moved 23 GB/s, eight 34
_SMALL = 1 << 20  # larger allocations come out of the caching allocator's large blocks


def read_extents(extents: Sequence[Extent], device: torch.device) -> list[torch.Tensor]:
    """Read extents into one uint8 tensor each, in memory of its own.

    Parameters
    ----------
    extents : sequence of Extent
        Read in the order of files and offsets, whatever theirs.
    device : torch.device
        CPU or CUDA. Host memory beside the tensors is at most 128 MiB, pinned for CUDA.

    Returns
    -------
    list of torch.Tensor
        In the order of `extents`; complete when this returns.

    Raises
    ------
    Truncated
        If a file ends before an extent does.
    OutOfMemory
        If the device has too little free memory.
    """
    _check(extents)
    tensors = _allocate([extent.size for extent in extents], device)
    fill(tensors, extents)
    return tensors


def _check(extents: Sequence[Extent]) -> None:
    """Refuse extents that end after their files do.

    Raises
    ------
    Truncated
        Naming the first.
    """
    for extent in extents:
        if extent.offset + extent.size > extent.source.size:
            raise Truncated(
                f"`{extent.source.name}` has {extent.source.size} bytes, but `{extent.name}` ends at "
                f"{extent.offset + extent.size}; the file is incomplete, fetch the rest"
            )


def fill(tensors: Sequence[torch.Tensor], extents: Sequence[Extent]) -> None:
    """Read extents into tensors of their sizes, all on one device; complete when this returns.

    Raises
    ------
    Truncated
        If a file ends before an extent does.
    """
    if not tensors:
        return
    device = tensors[0].device
    order = sorted(range(len(extents)), key=lambda i: (extents[i].source.name, extents[i].offset))
    pieces = [
        (i, at, min(PIECE_BYTES, extents[i].size - at))
        for i in order
        for at in range(0, extents[i].size, PIECE_BYTES)
    ]
    readers = min(READERS, default_threads(), len(pieces))
    if readers == 0:
        return
    work = _Pieces(pieces)
    if device.type == "cpu":
        read = functools.partial(_to_host, work, extents, tensors)
    else:
        read = functools.partial(_to_device, work, extents, tensors, torch.cuda.current_stream(device))
    with ThreadPoolExecutor(readers, "tpde-read") as pool:
        jobs = [pool.submit(read) for _ in range(readers)]
        try:
            for job in jobs:
                job.result()
        finally:
            work.stop()


class _Pieces:
    """Pieces of extents, handed to whichever thread asks next."""

    def __init__(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        self._pieces, self._next, self._lock = pieces, 0, threading.Lock()

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        while True:
            with self._lock:
                at, self._next = self._next, self._next + 1
            if at >= len(self._pieces):
                return
            yield self._pieces[at]

    def stop(self) -> None:
        with self._lock:
            self._next = len(self._pieces)


def _allocate(sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """One tensor for each size; on a GPU without the rounding of separate allocations.

    The caching allocator asks the driver for multiples of 2 or 20 MiB: on average 1 MiB more than each
    tensor needs, 3 % of an 8 B model's packed weights. One large block that is freed at once is cut up
    without waste.
    """
    whole = sum(-(-size // 512) * 512 for size in sizes if size > _SMALL)
    try:
        if device.type == "cuda" and whole:
            with contextlib.suppress(torch.cuda.OutOfMemoryError):  # memory in pieces may do
                torch.empty(whole, dtype=torch.uint8, device=device)
        with torch.inference_mode(False):
            return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    except torch.cuda.OutOfMemoryError:
        require(sum(sizes), device, "the packed weights")
        raise OutOfMemory(
            f"the packed weights need {gib(sum(sizes))} on {device}; {gib(free_bytes(device))} are free, but "
            "not in one piece; load the model before others, or set "
            "`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`"
        ) from None
    except RuntimeError as error:
        if device.type != "cpu" or "allocate" not in str(error):
            raise
        raise OutOfMemory(
            f"the packed weights need {gib(sum(sizes))} of host memory, and the system refused; free some, "
            "or use a machine with more"
        ) from None


def _to_host(work: _Pieces, extents: Sequence[Extent], tensors: Sequence[torch.Tensor]) -> None:
    for i, at, size in work:
        out = tensors[i][at : at + size].numpy()
        extents[i].source.read_into(extents[i].offset + at, out.data)


def _to_device(
    work: _Pieces, extents: Sequence[Extent], tensors: Sequence[torch.Tensor], main: torch.cuda.Stream
) -> None:
    """Read into two pinned buffers in turn, and copy each on a stream of this thread's own."""
    device = main.device
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(main)  # the tensors' memory may still be in use there
        buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        copied = [torch.cuda.Event() for _ in buffers]  # type: ignore[no-untyped-call]
        turn = 0
        try:
            for i, at, size in work:
                buffer = buffers[turn]
                copied[turn].synchronize()  # returns at once the first time
                extents[i].source.read_into(extents[i].offset + at, buffer[:size].numpy().data)
                with torch.cuda.stream(stream):
                    tensors[i][at : at + size].copy_(buffer[:size], non_blocking=True)
                copied[turn].record(stream)
                turn = 1 - turn
        finally:
            stream.synchronize()
