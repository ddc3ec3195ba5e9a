"""Page-locking host memory, through the driver.

Locked memory is what a GPU copies from at the full rate of the bus, beside what the host does, and what
kernels can read in place. Memory is locked for all devices at once (`PORTABLE`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Protocol

from tpde.codec import native
from tpde.cuda.capability import bindings, call

_PORTABLE, _DEVICEMAP, _READ_ONLY = 1, 2, 8  # CU_MEMHOSTREGISTER_*

# What says that this memory cannot be locked, here or by this process, and nothing about the device:
# INVALID_VALUE, OUT_OF_MEMORY (which is also what a limit of lockable memory looks like), OPERATING_SYSTEM,
# HOST_MEMORY_ALREADY_REGISTERED, NOT_PERMITTED, NOT_SUPPORTED.
_REFUSALS = frozenset({1, 2, 304, 712, 800, 801})


# The driver locks 20 to 24 GB/s on the host of an H200, and whoever allocates memory of a device meanwhile
# waits: 3 ms for a step like this, 50 for 1 GiB. In steps of 16 MiB it locked 15 to 17 GB/s.
STEP = 64 << 20


class Refused(Exception):
    """Memory cannot be locked here; something else may do."""


class PageLock(Protocol):
    """What makes pages of host memory ready for a device: it brings them into memory, and locks them."""

    @property
    def step(self) -> int:
        """Bytes that are locked at once, at most, and where: see `steps`."""

    def bind(self) -> None:
        """Let the calling thread use the device: otherwise the first call that needs one opens device 0."""

    def populate(self, address: int, size: int) -> int:
        """Bring mapped pages into memory, and into this process's tables; returns 0, or an `errno`."""

    def lock(self, address: int, size: int, *, read_only: bool) -> None:
        """Lock whole pages, and map them for the devices.

        Parameters
        ----------
        address, size : int
            Multiples of the page size.
        read_only : bool
            The memory is mapped for reading only.

        Raises
        ------
        Refused
            If this memory cannot be locked.
        UnsupportedDevice
            If the device is at fault.
        """

    def unlock(self, address: int) -> None:
        """Unlock what was locked from this address on.

        Fails silently: what can be wrong here (a device that has crashed, a process that ends) was reported
        by what noticed it first, and the memory is given back in any case.
        """

    def device_address(self, address: int) -> int | None:
        """Where kernels find what was locked from this address on; None if they cannot read it."""


class CudaPageLock:
    """What locks pages for CUDA devices.

    Parameters
    ----------
    device : int
        One of the devices.
    step : int
        Bytes that are locked at once, at most. Whoever copies from there cuts copies alike.
    driver : module, optional
        Speaks to it; by default `cuda.bindings.driver`, loaded when it is first needed.

    Attributes
    ----------
    step : int
        The same.
    """

    def __init__(self, device: int, step: int = STEP, driver: ModuleType | None = None) -> None:
        self.step, self._device, self._given = step, device, driver

    @functools.cached_property
    def _driver(self) -> ModuleType:
        return bindings()[0] if self._given is None else self._given

    @functools.cached_property
    def _primary(self) -> object:
        """The device's primary context, which torch uses too. Kept: giving it back could destroy it."""
        driver, device = self._driver, self._device
        call(driver.cuInit(0), "starting the CUDA driver")
        handle = call(driver.cuDeviceGet(device), f"looking for CUDA device {device}")
        return call(driver.cuDevicePrimaryCtxRetain(handle), f"opening CUDA device {device}")

    @contextlib.contextmanager
    def _current(self) -> Iterator[ModuleType]:
        driver = self._driver
        call(driver.cuCtxPushCurrent(self._primary), f"using CUDA device {self._device}")
        try:
            yield driver
        finally:
            driver.cuCtxPopCurrent()

    def bind(self) -> None:
        """Set the thread's context: see `PageLock`."""
        call(self._driver.cuCtxSetCurrent(self._primary), f"using CUDA device {self._device}")

    def populate(self, address: int, size: int) -> int:
        """Fault pages in, on this thread: the driver does so one by one."""
        return native.populate(address, size)

    def lock(self, address: int, size: int, *, read_only: bool) -> None:
        """Register pages with the driver."""
        flags = _PORTABLE | _DEVICEMAP | (_READ_ONLY if read_only else 0)
        with self._current() as driver:
            result = driver.cuMemHostRegister(address, size, flags)
        if int(result[0]) in _REFUSALS:
            raise Refused(f"the driver says {result[0].name}")
        call(result, f"page-locking {size} bytes")

    def unlock(self, address: int) -> None:
        """Unregister them."""
        with contextlib.suppress(Exception), self._current() as driver:
            driver.cuMemHostUnregister(address)

    def device_address(self, address: int) -> int | None:
        """Ask the driver."""
        with self._current() as driver:
            code, found = driver.cuMemHostGetDevicePointer(address, 0)
        return None if int(code) else int(found)


def steps(address: int, size: int, step: int = STEP) -> Iterator[tuple[int, int]]:
    """Cut memory at addresses that are multiples of a step: how it is locked, and therefore copied.

    One copy must not reach from what was locked by one call into what was by another.

    Parameters
    ----------
    address, size : int
        Of the memory.
    step : int
        The step.

    Yields
    ------
    offset, size : int
        Of each piece, from `address` on.

    Examples
    --------
    >>> list(steps(3 * STEP - 4096, 8192))
    [(0, 4096), (4096, 4096)]
    """
    at = 0
    while at < size:
        piece = min(size - at, step - (address + at) % step)
        yield at, piece
        at += piece
