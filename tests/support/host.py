"""Packed weights in host memory as tests ask for them: whether they are there, and what is locked."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest

from support.locking import SHIFT, FakeLock
from tpde.host.pinned import HostMemory
from tpde.host.ranges import PAGE
from tpde.host.workers import NAME
from tpde.io.sources import Extent

MIB = 1 << 20


def bring_in_vain(wanted: list[Extent], fake: FakeLock, **options: Any) -> None:
    """Memory that cannot be brought; giving it back leaves nothing locked, and no thread."""
    memory = HostMemory(wanted, fake, **options)
    try:
        memory.complete()
        pytest.fail("all of it came")
    finally:
        memory.close()


def extents(source: Any) -> list[Extent]:
    """Two neighbours, one after a small gap, one far off at the end of the file."""
    places = [(5000, 70_000), (75_008, 9000), (90_112, 4096), (4 * MIB, source.size - 4 * MIB)]
    return [Extent(source, at, size, f"t{i}") for i, (at, size) in enumerate(places)]


def content(source: Any, extent: Extent) -> bytes:
    out = bytearray(extent.size)
    source.read_into(extent.offset, memoryview(out))
    return bytes(out)


def at(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


def check(fake: FakeLock, memory: HostMemory, wanted: list[Extent]) -> None:
    """Bytes are compared, in mappings too: nothing truncates these files."""
    for extent in wanted:
        address = memory.request(extent).wait()
        assert at(address, extent.size) == content(extent.source, extent), extent.name
        assert (address - extent.offset) % PAGE == 0, "blobs are aligned as they are in the file"
        assert memory.there(extent)
        device = memory.device_address(extent)
        assert device == (address + SHIFT if covered(fake, address, extent.size) else None)


def covered(fake: FakeLock, address: int, size: int) -> bool:
    """Whether all of it is locked."""
    end = address + size
    while address < end:
        step = next((it + n for it, (n, _) in fake.locked.items() if it <= address < it + n), None)
        if step is None:
            return False
        address = step
    return True


def threads() -> list[threading.Thread]:
    """What works for host memory."""
    return [it for it in threading.enumerate() if it.name == NAME]


def wait_for_threads() -> None:
    """Until none works any more."""
    for it in threads():
        it.join(60)
        assert not it.is_alive()


class Gate:
    """Lets locking go on when a test says so: what comes after so many attempts."""

    def __init__(self, fake: FakeLock, after: int) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

        def wait() -> None:
            if fake.attempts == after:
                self.reached.set()
                assert self.open.wait(60)

        fake.first = wait
