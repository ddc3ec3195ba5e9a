"""Which pages of files hold some extents."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

from tpde.errors import ReadError, Truncated
from tpde.io.sources import ByteSource, Extent, FileSource

PAGE = mmap.PAGESIZE
# Between two tensors lie header, tables and index map of the second, 0.2 % of it. Copying more than this in
# vain takes longer than starting another copy.
GAP_BYTES = 1 << 20


class Range(NamedTuple):
    """Bytes `first` to `last` of a file, and the pages `begin` to `end` that hold them."""

    source: ByteSource
    first: int
    last: int

    @property
    def begin(self) -> int:
        """Where its first page starts."""
        return self.first // PAGE * PAGE

    @property
    def end(self) -> int:
        """Where its last page ends, maybe after the file does."""
        return -(-self.last // PAGE) * PAGE

    @property
    def size(self) -> int:
        """Bytes of its pages."""
        return self.end - self.begin


def merge(extents: Sequence[Extent]) -> list[Range]:
    """The least ranges that hold extents, those of a file in order.

    What lies between two extents is included where a piece may reach over it (`GAP_BYTES`).
    """
    files: dict[ByteSource, list[Extent]] = {}
    for extent in extents:
        files.setdefault(extent.source, []).append(extent)
    found: list[Range] = []
    for source, of in files.items():
        first, last = -1, -1
        for extent in sorted(of, key=lambda it: it.offset):
            if first >= 0 and extent.offset - last > GAP_BYTES:
                found.append(Range(source, first, last))
                first = -1
            first = extent.offset if first < 0 else first
            last = max(last, extent.offset + extent.size)
        found.append(Range(source, first, last))
    return found


def require(extents: Sequence[Extent]) -> None:
    """Refuse extents that end after their files do, as these are now.

    Raises
    ------
    Truncated
        Naming file and tensor.
    """
    sizes: dict[ByteSource, int] = {}
    for extent in extents:
        source = extent.source
        if source not in sizes:
            sizes[source] = source.size
            if isinstance(source, FileSource):
                sizes[source] = os.fstat(source.fileno()).st_size
        if extent.offset + extent.size > sizes[source]:
            raise Truncated(
                f"`{source.name}` has {sizes[source]} bytes, but `{extent.name}` ends at "
                f"{extent.offset + extent.size}",
                hint="the file is incomplete, fetch the rest",
                where=source.name,
                found=sizes[source],
                needed=extent.offset + extent.size,
            )


def read_error(name: str, offset: int, size: int, error: OSError) -> ReadError:
    """What a failed read means."""
    what = f"bytes {offset} to {offset + size} of `{name}` cannot be read: {os.strerror(error.errno or 0)}"
    if error.errno in {errno.EIO, errno.ENXIO, errno.ETIMEDOUT}:
        return ReadError(f"{what}: the disk failed", hint="check it, or copy the file to another", where=name)
    if error.errno in {errno.ESTALE, errno.EBADF, errno.ENOENT}:
        return ReadError(
            f"{what}: the file has gone", hint="load the model again from where it is now", where=name
        )
    return ReadError(what, hint="load the model again once that is mended", where=name)
