"""Reading files past the page cache: what is read once for each token is not worth its room there."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from typing import Protocol

from tpde.errors import Truncated
from tpde.host.ranges import PAGE
from tpde.io.sources import ByteSource, FileSource

BLOCK = max(PAGE, 4096)  # what O_DIRECT asks of offsets, sizes and addresses, on any disk


class BlockReader(Protocol):
    """What reads files, in any thread."""

    def read(self, source: ByteSource, offset: int, out: memoryview, size: int) -> None:
        """Read `size` bytes.

        Parameters
        ----------
        source : ByteSource
            The file.
        offset : int
            Where in it, a multiple of `BLOCK`.
        out : memoryview
            Where to: whole blocks, aligned. What comes after `size` bytes in the last of them is arbitrary.
        size : int
            How many.

        Raises
        ------
        Truncated
            If the file ends too early.
        OSError
            If it cannot be read.
        """

    def close(self) -> None:
        """Close what was opened here. Nobody may be reading."""


class Files:
    """Files that are read with `O_DIRECT`, or as if they were. Any thread may read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._direct: dict[ByteSource, int | None] = {}
        self._opened: list[int] = []

    def read(self, source: ByteSource, offset: int, out: memoryview, size: int) -> None:
        """Read bytes: see `BlockReader`."""
        descriptor = self._open(source)
        if descriptor is None or not _read_direct(descriptor, source.name, offset, out, size):
            self._direct[source] = None
            _read_cached(source, offset, out[:size])

    def direct(self, source: ByteSource) -> bool:
        """Whether a file is read past the page cache: some file systems tell only when it is read.

        Raises
        ------
        Truncated
            If it has become shorter since it was opened.
        OSError
            If it cannot be read.
        """
        block = mmap.mmap(-1, BLOCK)  # not closed here: the traceback of an error has views of it
        self.read(source, 0, memoryview(block), min(source.size, BLOCK))
        return self._direct[source] is not None

    def _open(self, source: ByteSource) -> int | None:
        """A descriptor that reads past the page cache; None if the file system has no such."""
        with self._lock:
            if source not in self._direct:
                self._direct[source] = None
                if isinstance(source, FileSource) and hasattr(os, "O_DIRECT"):
                    with contextlib.suppress(OSError):
                        # Not by its name, which may be another file's by now.
                        name = f"/proc/self/fd/{source.fileno()}"
                        found = os.open(name, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
                        self._direct[source] = found
                        self._opened.append(found)
            return self._direct[source]

    def close(self) -> None:
        """Close what was opened here. Nobody may be reading."""
        for descriptor in self._opened:
            os.close(descriptor)
        self._opened, self._direct = [], {}


def _read_direct(descriptor: int, name: str, offset: int, out: memoryview, size: int) -> bool:
    """Read at least `size` bytes of whole blocks; False if the file system cannot after all."""
    done = 0
    while done < size:
        whole = done // BLOCK * BLOCK  # after a short read, from the start of a block again
        try:
            got = os.preadv(descriptor, [out[whole:]], offset + whole)
        except OSError as error:
            if error.errno in {errno.EINVAL, errno.EOPNOTSUPP}:
                return False
            raise
        if whole + got <= done:
            found = os.fstat(descriptor).st_size
            raise Truncated(
                f"`{name}` ends at byte {found}, but bytes up to {offset + size} are needed; it has become "
                "shorter since it was opened",
                hint="fetch it again",
                where=name,
                found=found,
                needed=offset + size,
            )
        done = whole + got
    return True


def _read_cached(source: ByteSource, offset: int, out: memoryview) -> None:
    """Read through the page cache, and drop from it what this brought there."""
    source.read_into(offset, out)
    if isinstance(source, FileSource) and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(source.fileno(), offset, out.nbytes, os.POSIX_FADV_DONTNEED)
