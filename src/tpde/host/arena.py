"""Anonymous memory of exactly the size that is needed, which is locked as it is filled.

`cudaHostAlloc` clears pages on one thread, and torch's pinned memory is rounded up to powers of two.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import NamedTuple

import numpy as np

from tpde.errors import OutOfMemory
from tpde.host.page_lock import PageLock
from tpde.host.ranges import PAGE, Range, read_error

# However few processors: from the page cache into new pages 8 copied 24 GB/s, 16 copied 35; others
# wait for the disk.
THREADS = 16
PIECE_BYTES = 32 << 20  # of a read: 8 MiB were as fast, but want the interpreter four times as often


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
        self._locked: list[tuple[int, PageLock]] = []  # addresses, each with what locked them
        try:
            self._map = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise OutOfMemory(
                f"{self.size / (1 << 30):.2f} GiB of host memory are needed, and the system refused "
                f"({error})",
                hint="free some, or load the model with less `ram`",
                needed=self.size,
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

    def lock(self, page_lock: PageLock, at: int = 0, size: int | None = None) -> None:
        """Page-lock it, or whole pages of it. Raises `page_lock.Refused` if they cannot be."""
        page_lock.lock(self.address + at, self.size if size is None else size, read_only=False)
        self._locked.append((self.address + at, page_lock))

    def unlock(self) -> None:
        """Unlock all that is locked."""
        while self._locked:
            address, page_lock = self._locked.pop()
            page_lock.unlock(address)

    def close(self) -> None:
        """Give it back."""
        self.unlock()
        self.view.release()
        with contextlib.suppress(BufferError):  # the traceback of a failed read holds a part of it: later
            self._map.close()


class ArenaPart(NamedTuple):
    """Bytes of a file, and where in an arena they go."""

    of: Range
    offset: int
    to: int
    size: int


def parts(it: Range, at: int, begin: int, size: int) -> list[ArenaPart]:
    """What pages of a range hold, a few bytes at a time.

    Parameters
    ----------
    it : Range
        The range.
    at : int
        Where in the arena its first page goes.
    begin, size : int
        Which of its pages, in bytes from the first.
    """
    first, last = max(it.begin + begin, it.first), min(it.begin + begin + size, it.last)
    return [
        ArenaPart(it, offset, at + offset - it.begin, min(PIECE_BYTES, last - offset))
        for offset in range(first, last, PIECE_BYTES)
    ]


def fill(arena: Arena, part: ArenaPart) -> None:
    """Read bytes of a file.

    Raises
    ------
    Truncated
        If the file ends too early.
    ReadError
        If the disk fails.
    """
    try:
        with arena.view[part.to : part.to + part.size] as room:  # the traceback of an error must not hold it
            # New pages are faulted in here. Where the system does that for `read`, no other thread can map or
            # unmap memory while it clears a huge one, 0.3 ms; and drivers do whenever they load a kernel.
            np.frombuffer(room, np.uint8)[::PAGE] = 0
            part.of.source.read_into(part.offset, room)
    except OSError as error:
        raise read_error(part.of.source.name, part.offset, part.size, error) from error
