"""Page-locking without a device: what is locked is counted, refused or fails as a test asks."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

from tpde.codec import native
from tpde.host.page_lock import Refused

SHIFT = 1 << 44  # the device sees memory elsewhere than the host


class FakeLock:
    """A `PageLock` of no device.

    Parameters
    ----------
    step : int
        By default, whatever is locked is one step, at whichever address the system puts it.

    Attributes
    ----------
    locked : dict
        Size and `read_only` of what is locked, by address.
    attempts : int
        How often locking was tried.
    populated : list of tuple
        Addresses and sizes of what was brought into memory, or should have been.
    bound : list of str
        Names of the threads that use the device.
    refuse : callable
        Told `read_only` and how many were locked before; True refuses.
    error : Exception or None
        Raised by every attempt.
    first, then : callable
        Called before each attempt, and after each that locked something.
    populating : callable
        Called before pages are brought into memory.
    populates : int or None
        What that says instead of doing it.
    there : callable
        Where the device sees what was locked from an address on.
    """

    def __init__(self, step: int = 1 << 56) -> None:
        self.step = step
        self.locked: dict[int, tuple[int, bool]] = {}
        self.attempts = 0
        self.populated: list[tuple[int, int]] = []
        self.bound: list[str] = []
        self.refuse: Callable[[bool, int], bool] = lambda read_only, before: False
        self.error: Exception | None = None
        self.first: Callable[[], object] = lambda: None
        self.then: Callable[[], object] = lambda: None
        self.populating: Callable[[], object] = lambda: None
        self.populates: int | None = None
        self.there: Callable[[int], int | None] = lambda address: address + SHIFT

    @property
    def bytes(self) -> int:
        """How much is locked."""
        return sum(size for size, _ in self.locked.values())

    def bind(self) -> None:
        self.bound.append(threading.current_thread().name)

    def populate(self, address: int, size: int) -> int:
        self.populated.append((address, size))
        self.populating()
        return native.populate(address, size) if self.populates is None else self.populates

    def lock(self, address: int, size: int, *, read_only: bool) -> None:
        self.first()
        self.attempts += 1
        assert size > 0
        assert address % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
        for other, (length, _) in self.locked.items():
            assert address + size <= other or other + length <= address, "no page is locked twice"
        if self.error is not None:
            raise self.error
        if self.refuse(read_only, len(self.locked)):
            raise Refused("the driver says CUDA_ERROR_NOT_SUPPORTED")
        self.locked[address] = size, read_only
        self.then()

    def unlock(self, address: int) -> None:
        del self.locked[address]

    def device_address(self, address: int) -> int | None:
        assert address in self.locked
        return self.there(address)
