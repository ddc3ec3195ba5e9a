"""Anonymous memory of exactly the size that is needed, which is locked as it is filled.

`cudaHostAlloc` clears pages on one thread, and torch's pinned memory is rounded up to powers of two.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable

import numpy as np

from tpde.errors import OutOfMemory
from tpde.streaming import lock
from tpde.streaming.parallel import for_each
from tpde.streaming.ranges import PAGE, Range, read_error

# However few processors: from the page cache into new pages 8 copied 24 GB/s, 16 copied 35; others
# wait for the disk.
_THREADS = 16
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
    """

    def __init__(self, size: int) -> None:
        self.size = -(-size // PAGE) * PAGE
        self._locked: list[tuple[int, int]] = []  # addresses, each with the device
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
        """Whether any of it is page-locked."""
        return bool(self._locked)

    def lock(self, device: int, at: int = 0, size: int | None = None) -> None:
        """Page-lock it, or whole pages of it. Raises `lock.Refused` if they cannot be."""
        lock.lock(self.address + at, self.size if size is None else size, device, read_only=False)
        self._locked.append((self.address + at, device))

    def unlock(self) -> None:
        """Unlock all that is locked."""
        while self._locked:
            lock.unlock(*self._locked.pop())

    def close(self) -> None:
        """Give it back."""
        self.unlock()
        self.view.release()
        with contextlib.suppress(BufferError):  # the traceback of a failed read holds a part of it: later
            self._map.close()


def fill(arena: Arena, at: int, it: Range, report: Callable[[int], None]) -> None:
    """Read a range of a file.

    Parameters
    ----------
    arena : Arena
        Where to.
    at : int
        Where in it the first page of the range goes.
    it : Range
        What.
    report : callable
        Called with numbers of bytes that were read.

    Raises
    ------
    Truncated
        If the file ends too early.
    ReadError
        If the disk fails.
    """

    def read(offset: int) -> None:
        to, size = at + offset - it.begin, min(_PIECE_BYTES, it.last - offset)
        try:
            it.source.read_into(offset, arena.view[to : to + size])
        except OSError as error:
            raise read_error(it.source.name, offset, size, error) from error

    work = range(it.first, it.last, _PIECE_BYTES)
    for_each(work, read, _THREADS, lambda offset: report(min(_PIECE_BYTES, it.last - offset)))
