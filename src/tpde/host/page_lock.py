"""Page-locking host memory, through the driver.

Locked memory is what a GPU copies from at the full rate of the bus, beside what the host does, and what
kernels can read in place. Memory is locked for all devices at once (`PORTABLE`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import ModuleType

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


@functools.cache
def _primary(device: int) -> object:
    """The device's primary context, which torch uses too. Kept: giving it back could destroy it."""
    driver, _ = bindings()
    call(driver.cuInit(0), "starting the CUDA driver")
    handle = call(driver.cuDeviceGet(device), f"looking for CUDA device {device}")
    return call(driver.cuDevicePrimaryCtxRetain(handle), f"opening CUDA device {device}")


@contextlib.contextmanager
def _current(device: int) -> Iterator[ModuleType]:
    driver, _ = bindings()
    call(driver.cuCtxPushCurrent(_primary(device)), f"using CUDA device {device}")
    try:
        yield driver
    finally:
        driver.cuCtxPopCurrent()


def bind(device: int) -> None:
    """Let the calling thread use a device: otherwise the first call that needs one opens device 0."""
    driver, _ = bindings()
    call(driver.cuCtxSetCurrent(_primary(device)), f"using CUDA device {device}")


def lock(address: int, size: int, device: int, *, read_only: bool) -> None:
    """Lock whole pages, and map them for the devices.

    Parameters
    ----------
    address, size : int
        Multiples of the page size.
    device : int
        One of the devices.
    read_only : bool
        The memory is mapped for reading only.

    Raises
    ------
    Refused
        If this memory cannot be locked.
    UnsupportedDevice
        If the device is at fault.
    """
    flags = _PORTABLE | _DEVICEMAP | (_READ_ONLY if read_only else 0)
    with _current(device) as driver:
        result = driver.cuMemHostRegister(address, size, flags)
    if int(result[0]) in _REFUSALS:
        raise Refused(f"the driver says {result[0].name}")
    call(result, f"page-locking {size} bytes")


def steps(address: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut memory at addresses that are multiples of `STEP`: how it is locked, and therefore copied.

    One copy must not reach from what was locked by one call into what was by another.

    Parameters
    ----------
    address, size : int
        Of the memory.

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
        piece = min(size - at, STEP - (address + at) % STEP)
        yield at, piece
        at += piece


def unlock(address: int, device: int) -> None:
    """Unlock what was locked from this address on.

    Fails silently: what can be wrong here (a device that has crashed, a process that ends) was reported by
    what noticed it first, and the memory is given back in any case.
    """
    with contextlib.suppress(Exception), _current(device) as driver:
        driver.cuMemHostUnregister(address)


def device_address(address: int, device: int) -> int | None:
    """Where kernels find what was locked from this address on; None if they cannot read it."""
    with _current(device) as driver:
        code, found = driver.cuMemHostGetDevicePointer(address, 0)
    return None if int(code) else int(found)
