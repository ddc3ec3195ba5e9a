"""Anonymous memory of exactly the size that is needed, which is locked once it is filled.

`cudaHostAlloc` clears pages on one thread, and torch's pinned memory is rounded up to powers of two.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Sequence

import numpy as np

from tpde.errors import OutOfMemory
from tpde.format.source import Source
from tpde.streaming import lock
from tpde.streaming.parallel import for_each
from tpde.streaming.ranges import PAGE, Range, read_error

_THREADS = 8  # however few processors: one copies 4 to 8 GB/s from the page cache, others wait for the disk
_PIECE_BYTES = 8 << 20  # of a read: larger ones are no faster


class Arena:
    """Memory of this process.

    Parameters
    ----------
    size : int
        Bytes, rounded up to whole pages.

    Raises
    ------
    OutOfMemory
        If the system refuses.

    Attributes
    ----------
    address, size : int
        Where it lies.
    view : memoryview
        Its bytes.
    device_address : int or None
        Where kernels can read it, once it is locked.
    """

    def __init__(self, size: int) -> None:
        self.size = -(-size // PAGE) * PAGE
        self._device: int | None = None
        self.device_address: int | None = None
        try:
            self._map = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise OutOfMemory(
                f"{self.size / (1 << 30):.2f} GiB of host memory are needed, and the system refused "
                f"({error}); free some, or load the model with less `ram`"
            ) from error
        # Huge pages are faulted in, and locked, 512 at a time. A process that forks would copy locked pages.
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            with contextlib.suppress(OSError, AttributeError):  # kernels without it
                self._map.madvise(getattr(mmap, advice))
        self.view = memoryview(self._map)
        self.address = int(np.frombuffer(self.view, np.uint8).ctypes.data)

    @property
    def locked(self) -> bool:
        """Whether it is page-locked."""
        return self._device is not None

    def lock(self, device: int) -> None:
        """Page-lock it. Raises `lock.Refused` if it cannot be."""
        lock.lock(self.address, self.size, device, read_only=False)
        self._device = device
        self.device_address = lock.device_address(self.address, device)

    def close(self) -> None:
        """Give it back."""
        if self._device is not None:
            lock.unlock(self.address, self._device)
            self._device = self.device_address = None
        self.view.release()
        with contextlib.suppress(BufferError):  # the traceback of a failed read holds a part of it: later
            self._map.close()


def fill(arena: Arena, ranges: Sequence[Range], report: Callable[[int], None]) -> list[int]:
    """Read ranges of files, one after the other.

    Parameters
    ----------
    arena : Arena
        Where to: the sum of their sizes.
    ranges : sequence of Range
        What.
    report : callable
        Called with numbers of bytes that were read.

    Returns
    -------
    list of int
        The address of each range's first page.

    Raises
    ------
    Truncated
        If a file ends too early.
    ReadError
        If the disk fails.
    """
    starts, work, at = [], [], 0
    for it in ranges:
        starts.append(arena.address + at)
        work += [
            (it.source, offset, at + offset - it.begin, min(_PIECE_BYTES, it.last - offset))
            for offset in range(it.first, it.last, _PIECE_BYTES)
        ]
        at += it.size

    def read(piece: tuple[Source, int, int, int]) -> None:
        source, offset, to, size = piece
        try:
            source.read_into(offset, arena.view[to : to + size])
        except OSError as error:
            raise read_error(source.name, offset, size, error) from error

    for_each(work, read, _THREADS, lambda piece: report(piece[3]))
    return starts
