"""Reading files ahead as tests ask for it: small pieces, disks that are slow or fail, copies that last."""

from __future__ import annotations

import ctypes
import errno
import threading
import time
from collections.abc import Callable
from typing import Any

from support.locking import FakeLock
from tpde.host.direct_io import Files
from tpde.host.disk import ReadAhead
from tpde.io.sources import ByteSource, Extent

MIB = 1 << 20
SIZE = 6 * MIB + 1234
PIECE = 256 << 10


def reading(buffers: int, threads: int, page_lock: FakeLock | None, files: Any = None) -> ReadAhead:
    """Small reads, so that threads share a piece."""
    return ReadAhead(buffers, PIECE, threads, page_lock, files=files, read_bytes=64 << 10)


def threads() -> list[str]:
    return [it.name for it in threading.enumerate() if it.name == "tpde-disk"]


def soon(true: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + 20
    while not true():
        assert time.monotonic() < until, what
        time.sleep(0.002)


def piece(source: Any, offset: int, size: int = PIECE) -> Extent:
    return Extent(source, offset, size, f"at {offset}")


def waited(ticket: Any) -> int:
    """What `wait` gives, or raises; it must do either soon, whatever has become of the buffers."""
    found: list[int | BaseException] = []

    def wait() -> None:
        try:
            found.append(ticket.wait())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(20)
    assert found, f"`{ticket.extent.name}` is waited for in vain"
    if isinstance(found[0], BaseException):
        raise found.pop()  # type: ignore[misc]
    return found[0]


def check(feed: ReadAhead, ticket: Any, data: bytes) -> None:
    extent = ticket.extent
    found = ctypes.string_at(waited(ticket), extent.size)
    assert found == data[extent.offset : extent.offset + extent.size], extent.name
    assert ticket.ready()


class Copied:
    """An event that passes when it is told to, or after a delay."""

    def __init__(self, delay: float | None = 0.0) -> None:
        self.passed = threading.Event()
        self.delay = delay

    def synchronize(self) -> None:
        if self.delay is not None:
            time.sleep(self.delay)
            self.passed.set()
        assert self.passed.wait(20)


class Slow(Files):
    """Holds reads back until they are let go, those from some offset on."""

    def __init__(self, begin: int = 0) -> None:
        super().__init__()
        self.go, self.reading, self.begin = threading.Event(), 0, begin

    def read(self, source: ByteSource, offset: int, out: memoryview, size: int) -> None:
        if offset >= self.begin:
            self.reading += 1
            assert self.go.wait(20)
        super().read(source, offset, out, size)


class Failing(Files):
    """A disk that fails where it is read from some offset to another.

    Attributes
    ----------
    broken : range
        The offsets.
    """

    broken = range(0)

    def read(self, source: ByteSource, offset: int, out: memoryview, size: int) -> None:
        if offset in self.broken:
            raise OSError(errno.EIO, "Input/output error")
        super().read(source, offset, out, size)
