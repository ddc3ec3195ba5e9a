"""Files mapped and page-locked in place: no copy of them in memory beside the page cache.

The processor never reads through a mapping: where a file that is mapped has become shorter, that kills the
process. The device reads pages that are locked, and those stay until they are unlocked, whatever becomes of
the file: one that is truncated, removed or replaced loses its length or its name, not pages in use. What is
overwritten in place does change, and so does the rest of the page in which a truncated file now ends; the
checksums of chunks notice.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tpde.errors import Truncated
from tpde.host.page_lock import PageLock, Refused
from tpde.host.ranges import Range, read_error
from tpde.io.sources import ByteSource, FileSource

THREADS = 8  # that populate; the driver faults pages in one by one, on one thread
_PIECE_BYTES = 8 << 20


class Pages(NamedTuple):
    """Pages of a mapped range: where in the file, and at which address."""

    of: Range
    offset: int
    address: int
    size: int


class Mapping:
    """Ranges of files, mapped, and locked where they lie.

    Parameters
    ----------
    ranges : sequence of Range
        Of each file in order.
    page_lock : PageLock
        Of one of the devices that will read them.

    Raises
    ------
    Refused
        If any of them cannot be mapped.
    Truncated
        If a file has become shorter.

    Attributes
    ----------
    starts : list of int
        The host address of each range's first page.
    """

    def __init__(self, ranges: Sequence[Range], page_lock: PageLock) -> None:
        self._ranges, self._page_lock = ranges, page_lock
        self._maps = list[mmap.mmap]()
        self._locked: dict[int, list[int]] = {}  # addresses, by the range's number
        self.starts = list[int]()
        try:
            files: dict[ByteSource, list[Range]] = {}
            for it in ranges:
                files.setdefault(it.source, []).append(it)
            for source, of in files.items():
                self.starts += self._map(source, of)
        except BaseException:
            self.close()
            raise

    def _map(self, source: ByteSource, ranges: Sequence[Range]) -> list[int]:
        """Map a file once, from its first range to its last: what lies between costs addresses only."""
        if not isinstance(source, FileSource):
            raise Refused(f"`{source.name}` is not a file")
        begin, last = ranges[0].begin, ranges[-1].last
        size = os.fstat(source.fileno()).st_size
        if last > size:
            raise _shrunk(source.name, size, last)
        try:
            made = mmap.mmap(
                source.fileno(), last - begin, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=begin
            )
        except OSError as error:
            raise Refused(f"`{source.name}` cannot be mapped: {error}") from error
        self._maps.append(made)
        base = int(np.frombuffer(made, np.uint8).ctypes.data)
        return [base + it.begin - begin for it in ranges]

    def lock(self, number: int, at: int, size: int) -> None:
        """Lock pages of a range, from byte `at` of them on. Raises `page_lock.Refused` if they cannot be."""
        start = self.starts[number] + at
        self._page_lock.lock(start, size, read_only=True)
        self._locked.setdefault(number, []).append(start)

    def unlock(self, number: int) -> None:
        """Unlock what is locked of a range."""
        for start in self._locked.pop(number, []):
            self._page_lock.unlock(start)

    def pieces(self, number: int, at: int, size: int) -> list[Pages]:
        """The same pages, a few at a time, to be brought into memory, and into this process's tables."""
        it, start = self._ranges[number], self.starts[number]
        return [
            Pages(it, it.begin + begin, start + begin, min(_PIECE_BYTES, at + size - begin))
            for begin in range(at, at + size, _PIECE_BYTES)
        ]

    def populate(self, pages: Pages) -> None:
        """Bring pages into memory: locking is fast then.

        Raises
        ------
        Truncated
            If the file has become shorter.
        ReadError
            If the disk fails.
        """
        it, offset, address, size = pages
        assert isinstance(it.source, FileSource)
        descriptor = it.source.fileno()
        os.posix_fadvise(
            descriptor, offset, size, os.POSIX_FADV_WILLNEED
        )  # in large reads, if it is on the disk
        if (
            self._page_lock.populate(address, size) == errno.EFAULT
        ):  # the file has become shorter, or cannot be read
            found, last = os.fstat(descriptor).st_size, min(offset + size, it.last)
            if found < last:
                raise _shrunk(it.source.name, found, last)
            raise read_error(it.source.name, offset, size, OSError(errno.EIO, ""))
        # Any other error says that the system does not know how: locking will fault the pages in.

    def close(self) -> None:
        """Unlock and unmap."""
        for number in list(self._locked):
            self.unlock(number)
        for made in self._maps:
            made.close()
        self._maps = []


def _shrunk(name: str, size: int, last: int) -> Truncated:
    return Truncated(
        f"`{name}` ends at byte {size}, but bytes up to {last} are needed; it has become shorter since it "
        "was opened",
        hint="fetch it again",
        where=name,
        found=size,
        needed=last,
    )
