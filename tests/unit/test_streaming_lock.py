"""Page-locking, with a driver that is made up: contexts, flags, and what a refusal is."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import pytest

from tpde.errors import InvalidInput, UnsupportedDevice
from tpde.host.locking import forced_mode, not_locked
from tpde.host.page_lock import STEP, CudaPageLock, PageLock, Refused, steps


class Code(enum.IntEnum):
    """Results of the driver."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_OPERATING_SYSTEM = 304
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712
    CUDA_ERROR_LAUNCH_FAILED = 719
    CUDA_ERROR_NOT_PERMITTED = 800
    CUDA_ERROR_NOT_SUPPORTED = 801


class Driver:
    """Two devices.

    Attributes
    ----------
    stack : list of str
        The contexts of this thread, the current one last.
    retained : list of str
        Primary contexts that were opened.
    calls : list of tuple
        What was done to memory, each with the context in which.
    fails : dict
        By the names of functions, what they say.
    """

    def __init__(self) -> None:
        self.ready = False
        self.stack, self.retained = ["somebody's"], list[str]()
        self.calls: list[tuple[Any, ...]] = []
        self.fails: dict[str, Code] = {}

    def _said(self, name: str, *values: Any) -> tuple[Any, ...]:
        code = self.fails.get(name, Code.CUDA_SUCCESS)
        return (code, *values)

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        assert flags == 0
        self.ready = True
        return self._said("cuInit")

    def cuDeviceGet(self, number: int) -> tuple[Any, ...]:
        assert self.ready
        return self._said("cuDeviceGet", f"device {number}")

    def cuDevicePrimaryCtxRetain(self, device: str) -> tuple[Any, ...]:
        self.retained.append(device)
        return self._said("cuDevicePrimaryCtxRetain", f"context of {device}")

    def cuCtxPushCurrent(self, context: str) -> tuple[Any, ...]:
        said = self._said("cuCtxPushCurrent")
        if not said[0]:
            self.stack.append(context)
        return said

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return Code.CUDA_SUCCESS, self.stack.pop()

    def cuCtxSetCurrent(self, context: str) -> tuple[Any, ...]:
        said = self._said("cuCtxSetCurrent")
        if not said[0]:
            self.stack[-1] = context
        return said

    def cuMemHostRegister(self, address: int, size: int, flags: int) -> tuple[Any, ...]:
        self.calls.append(("register", self.stack[-1], address, size, flags))
        return self._said("cuMemHostRegister")

    def cuMemHostUnregister(self, address: int) -> tuple[Any, ...]:
        self.calls.append(("unregister", self.stack[-1], address))
        return self._said("cuMemHostUnregister")

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[Any, ...]:
        assert flags == 0
        self.calls.append(("pointer", self.stack[-1], address))
        return self._said("cuMemHostGetDevicePointer", address + (1 << 40))


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def page_lock(driver: Driver) -> PageLock:
    """Of the second device."""
    return CudaPageLock(1, driver=driver)


CALLS: dict[str, Callable[[PageLock], Any]] = {
    "cuMemHostRegister": lambda of: of.lock(4096, 8192, read_only=False),
    "cuMemHostUnregister": lambda of: of.unlock(4096),
    "cuMemHostGetDevicePointer": lambda of: of.device_address(4096),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_made_in_the_devices_context_and_leave_the_callers(
    name: str, driver: Driver, page_lock: PageLock
) -> None:
    CALLS[name](page_lock)
    assert driver.calls[0][1] == "context of device 1"
    assert driver.stack == ["somebody's"]
    assert driver.retained == ["device 1"]
    CALLS[name](page_lock)
    CudaPageLock(0, driver=driver).lock(4096, 4096, read_only=False)
    assert driver.retained == ["device 1", "device 0"], "each is opened once"


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("code", [Code.CUDA_ERROR_NOT_SUPPORTED, Code.CUDA_ERROR_LAUNCH_FAILED])
def test_a_call_that_fails_leaves_the_callers_context(
    name: str, code: Code, driver: Driver, page_lock: PageLock
) -> None:
    driver.fails[name] = code
    if name == "cuMemHostRegister":
        with pytest.raises((Refused, UnsupportedDevice)):
            CALLS[name](page_lock)
    else:
        assert CALLS[name](page_lock) is None
    assert len(driver.calls) == 1
    assert driver.stack == ["somebody's"]


@pytest.mark.parametrize("read_only", [False, True])
def test_memory_is_locked_for_all_devices_and_mapped(read_only: bool, driver: Driver) -> None:
    real = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

    CudaPageLock(0, driver=driver).lock(4096, 8192, read_only=read_only)
    flags = real.CU_MEMHOSTREGISTER_PORTABLE | real.CU_MEMHOSTREGISTER_DEVICEMAP
    if read_only:
        flags |= real.CU_MEMHOSTREGISTER_READ_ONLY
    assert driver.calls == [("register", "context of device 0", 4096, 8192, flags)]


def test_memory_is_unlocked_and_found_by_its_address(driver: Driver, page_lock: PageLock) -> None:
    assert page_lock.device_address(12288) == 12288 + (1 << 40)
    page_lock.unlock(12288)
    assert [it[::2] for it in driver.calls] == [("pointer", 12288), ("unregister", 12288)]


REFUSALS = [
    Code.CUDA_ERROR_INVALID_VALUE,
    Code.CUDA_ERROR_OUT_OF_MEMORY,
    Code.CUDA_ERROR_OPERATING_SYSTEM,
    Code.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
    Code.CUDA_ERROR_NOT_PERMITTED,
    Code.CUDA_ERROR_NOT_SUPPORTED,
]


@pytest.mark.parametrize("code", [it for it in Code if it])
def test_what_is_refused_may_work_elsewhere_and_all_else_is_the_devices_fault(
    code: Code, driver: Driver, page_lock: PageLock
) -> None:
    driver.fails["cuMemHostRegister"] = code
    if code in REFUSALS:
        with pytest.raises(Refused, match=f"the driver says {code.name}"):
            page_lock.lock(4096, 4096, read_only=True)
    else:
        with pytest.raises(UnsupportedDevice, match=f"page-locking 4096 bytes failed: {code.name}"):
            page_lock.lock(4096, 4096, read_only=True)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("cuInit", "starting the CUDA driver failed"),
        ("cuDeviceGet", "looking for CUDA device 1 failed"),
        ("cuDevicePrimaryCtxRetain", "opening CUDA device 1 failed"),
        ("cuCtxPushCurrent", "using CUDA device 1 failed"),
    ],
)
def test_a_device_that_cannot_be_used(name: str, says: str, driver: Driver, page_lock: PageLock) -> None:
    driver.fails[name] = Code.CUDA_ERROR_NOT_INITIALIZED
    for call in (CALLS["cuMemHostRegister"], CALLS["cuMemHostGetDevicePointer"]):
        with pytest.raises(UnsupportedDevice, match=says):
            call(page_lock)
    page_lock.unlock(4096)  # silently: whoever noticed first has told
    assert not driver.calls
    assert driver.stack == ["somebody's"]


def test_a_thread_is_bound_to_a_device(driver: Driver, page_lock: PageLock) -> None:
    page_lock.bind()
    assert driver.stack == ["context of device 1"]
    driver.fails["cuCtxSetCurrent"] = Code.CUDA_ERROR_NOT_INITIALIZED
    with pytest.raises(UnsupportedDevice, match="using CUDA device 1 failed"):
        page_lock.bind()


def test_steps_end_at_multiples_of_64_mib() -> None:
    assert STEP == CudaPageLock(0).step == 64 << 20
    assert list(steps(STEP - 1, 2)) == [(0, 1), (1, 1)]
    assert list(steps(STEP, STEP)) == [(0, STEP)]
    assert list(steps(5, 0)) == []
    assert list(steps(5, 12, 8)) == [(0, 3), (3, 8), (11, 1)]


@pytest.mark.parametrize(
    ("argument", "environment", "mode"),
    [
        (None, None, None),
        (None, "", None),
        ("", "arena", "arena"),
        (None, "pageable", "pageable"),
        ("mapped", None, "mapped"),
        ("mapped", "arena", "mapped"),
        ("mapped", "nonsense", "mapped"),
    ],
)
def test_a_mode_is_the_callers_or_else_the_environments(
    argument: str | None, environment: str | None, mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TPDE_HOST_MEMORY", raising=False)
    if environment is not None:
        monkeypatch.setenv("TPDE_HOST_MEMORY", environment)
    assert forced_mode(argument) == mode


def test_an_unknown_mode_is_named() -> None:
    with pytest.raises(InvalidInput, match="`fast` is unknown") as caught:
        forced_mode("fast")
    assert (caught.value.found, caught.value.where) == ("fast", "TPDE_HOST_MEMORY")
    assert caught.value.needed == ("mapped", "arena", "pageable")


def test_memory_that_was_to_be_locked_is_not_left_pageable() -> None:
    with pytest.warns(RuntimeWarning, match=r"memory \(77 bytes\) cannot be page-locked \(why\)"):
        not_locked(Refused("why"), 77, None, "memory")
    with pytest.raises(UnsupportedDevice, match=r"memory \(77 bytes\) cannot be page-locked: why"):
        not_locked(Refused("why"), 77, "arena", "memory")
