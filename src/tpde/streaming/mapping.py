"""Files mapped and page-locked in place: no copy of them in memory beside the page cache.

The processor never reads through a mapping: where a file that is mapped has become shorter, that kills the
process. The device reads pages that are locked, and those stay until they are unlocked, whatever becomes of
the file: one that is truncated, removed or replaced loses its length or its name, not pages in use. What is
overwritten in place does change, and so does the rest of the page in which a truncated file now ends; the
checksums of chunks notice.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tpde.errors import Truncated
from tpde.format.source import FileSource
from tpde.streaming import lock
from tpde.streaming.parallel import for_each
from tpde.streaming.ranges import Range, read_error

_THREADS = 8  # the driver faults pages in one by one, on one thread
_PIECE_BYTES = 32 << 20
_POPULATE_READ = 22  # MADV_POPULATE_READ, of Linux 5.14: an error where a touch would kill


class Mapping:
    """Ranges of files, mapped, and locked where they lie.

    Parameters
    ----------
    ranges : sequence of Range
        Of each file in order.
    device : int
        One of the devices that will read them.

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

    def __init__(self, ranges: Sequence[Range], device: int) -> None:
        self._ranges, self._device = ranges, device
        self._maps, self._locked = list[Any](), list[int]()
        self.starts = list[int]()
        try:
            files: dict[Any, list[Range]] = {}
            for it in ranges:
                files.setdefault(it.source, []).append(it)
            for source, of in files.items():
                self.starts += self._map(source, of)
        except BaseException:
            self.close()
            raise

    def _map(self, source: Any, ranges: Sequence[Range]) -> list[int]:
        """Map a file once, from its first range to its last: what lies between costs addresses only."""
        if not isinstance(source, FileSource):
            raise lock.Refused(f"`{source.name}` is not a file")
        begin, last = ranges[0].begin, ranges[-1].last
        size = os.fstat(source.fileno()).st_size
        if last > size:
            raise _shrunk(source.name, size, last)
        try:
            made = mmap.mmap(
                source.fileno(), last - begin, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=begin
            )
        except OSError as error:
            raise lock.Refused(f"`{source.name}` cannot be mapped: {error}") from error
        self._maps.append(made)
        base = int(np.frombuffer(made, np.uint8).ctypes.data)
        return [base + it.begin - begin for it in ranges]

    def lock(self, number: int) -> None:
        """Lock a range. Raises `lock.Refused` if it cannot be."""
        start = self.starts[number]
        lock.lock(start, self._ranges[number].size, self._device, read_only=True)
        self._locked.append(start)

    def populate(self, number: int, report: Callable[[int], None]) -> None:
        """Bring a range's pages into memory, and into this process's tables: locking is fast then.

        Parameters
        ----------
        number : int
            Of the range.
        report : callable
            Called with numbers of bytes that are in memory.

        Raises
        ------
        Truncated
            If the file has become shorter.
        ReadError
            If the disk fails.
        """
        it, start = self._ranges[number], self.starts[number]
        work = [
            (it, at, start + at - it.begin, min(_PIECE_BYTES, it.end - at))
            for at in range(it.begin, it.end, _PIECE_BYTES)
        ]
        for_each(work, _populate, _THREADS, lambda piece: report(piece[3]))

    def close(self) -> None:
        """Unlock and unmap."""
        for start in self._locked:
            lock.unlock(start, self._device)
        for made in self._maps:
            made.close()
        self._locked, self._maps = [], []


def _populate(piece: tuple[Range, int, int, int]) -> None:
    it, offset, address, size = piece
    assert isinstance(it.source, FileSource)
    descriptor = it.source.fileno()
    os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)  # in large reads, if it is on the disk
    madvise = _libc().madvise
    if not madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _POPULATE_READ):
        return
    code = ctypes.get_errno()
    if code == errno.EFAULT:  # no such bytes: the file has become shorter, or cannot be read
        found, last = os.fstat(descriptor).st_size, min(offset + size, it.last)
        if found < last:
            raise _shrunk(it.source.name, found, last)
        raise read_error(it.source.name, offset, size, OSError(errno.EIO, ""))
    # Any other error says that the kernel does not know how: locking will fault the pages in.


def _shrunk(name: str, size: int, last: int) -> Truncated:
    return Truncated(
        f"`{name}` ends at byte {size}, but bytes up to {last} are needed; it has become shorter since it "
        "was opened: fetch it again"
    )


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
