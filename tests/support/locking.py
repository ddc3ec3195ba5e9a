"""Page-locking without a device: what is locked is counted, refused or fails as a test asks."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import pytest

from tpde.host import page_lock

SHIFT = 1 << 44  # the device sees memory elsewhere than the host


class FakeLock:
    """Stands in for `tpde.host.page_lock`.

    Attributes
    ----------
    locked : dict
        Size and `read_only` of what is locked, by address.
    refuse : callable
        Told `read_only` and how many were locked before; True refuses.
    error : Exception or None
        Raised by every attempt.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.locked: dict[int, tuple[int, bool]] = {}
        self.attempts = 0
        self.refuse: Callable[[bool, int], bool] = lambda read_only, before: False
        self.error: Exception | None = None
        for name in ("lock", "unlock", "device_address", "bind"):
            patch.setattr(page_lock, name, getattr(self, name))
        patch.delenv("TPDE_HOST_MEMORY", raising=False)

    @property
    def bytes(self) -> int:
        """How much is locked."""
        return sum(size for size, _ in self.locked.values())

    def lock(self, address: int, size: int, device: int, *, read_only: bool) -> None:
        self.attempts += 1
        assert size > 0
        assert address % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
        for other, (length, _) in self.locked.items():
            assert address + size <= other or other + length <= address, "no page is locked twice"
        if self.error is not None:
            raise self.error
        if self.refuse(read_only, len(self.locked)):
            raise page_lock.Refused("the driver says CUDA_ERROR_NOT_SUPPORTED")
        self.locked[address] = size, read_only

    def unlock(self, address: int, device: int) -> None:
        del self.locked[address]

    def device_address(self, address: int, device: int) -> int | None:
        assert address in self.locked
        return address + SHIFT

    def bind(self, device: int) -> None:
        pass
