"""What is asked of a driver, and what is said of one that is missing, too old or broken; no GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tpde.cuda import capability
from tpde.cuda.capability import CudaDriver
from tpde.errors import MissingDependency, UnsupportedDevice

ATTRIBUTES = {
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 9,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 0,
    "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": 132,
    "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 227 << 10,
}


class Code(int):
    """A result of the driver."""

    name = "CUDA_ERROR_NO_DEVICE"


class Driver:
    """Two devices, and a driver of CUDA 12.8."""

    CUdevice_attribute = SimpleNamespace(**{name: name for name in ATTRIBUTES})

    def __init__(self) -> None:
        self.attributes, self.started, self.fails, self.missing = dict(ATTRIBUTES), 0, "", False

    def _done(self, what: str, *values: Any) -> tuple[Any, ...]:
        return (Code(100) if what == self.fails else Code(0), *values)

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        if self.missing:
            raise RuntimeError("libcuda.so.1 not found")
        self.started += 1
        return self._done("init")

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return self._done("version", 12080)

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return self._done("count", 2)

    def cuDeviceGet(self, number: int) -> tuple[Any, ...]:
        return self._done("get", number)

    def cuDeviceGetAttribute(self, attribute: str, handle: int) -> tuple[Any, ...]:
        assert handle in (0, 1)
        return self._done(attribute, self.attributes[attribute])

    def cuDeviceGetName(self, size: int, handle: int) -> tuple[Any, ...]:
        return self._done("name", f"Card {handle}".encode().ljust(size, b"\0"))


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_facts_of_a_device(driver: Driver) -> None:
    there = CudaDriver(driver)
    assert there.version() == (12, 8)
    assert there.facts(1) == capability.DeviceFacts("Card 1", (9, 0), 132, 227 << 10)
    assert there.facts(0).name == "Card 0"
    assert there.facts(1) is there.facts(1)
    assert driver.started == 1


@pytest.mark.parametrize("number", [-1, 2, 3])
def test_devices_that_are_not_there(number: int, driver: Driver) -> None:
    with pytest.raises(UnsupportedDevice, match=f"no CUDA device {number}: 2 found") as caught:
        CudaDriver(driver).facts(number)
    assert caught.value.hint
    assert caught.value.found == 2


@pytest.mark.parametrize(
    ("version", "good"), [((7, 5), False), ((8, 0), True), ((8, 6), True), ((10, 0), True)]
)
def test_capabilities(version: tuple[int, int], good: bool, driver: Driver) -> None:
    major, minor = list(ATTRIBUTES)[:2]
    driver.attributes |= {major: version[0], minor: version[1]}
    if good:
        assert CudaDriver(driver).facts(0).capability == version
        return
    with pytest.raises(UnsupportedDevice, match=r"compute capability 7.5, tpde's kernels need 8.0") as caught:
        CudaDriver(driver).facts(0)
    assert (caught.value.found, caught.value.needed) == ((7, 5), (8, 0))


@pytest.mark.parametrize("what", ["version", "count", "get", "name", *ATTRIBUTES])
def test_every_answer_of_the_driver_is_checked(what: str, driver: Driver) -> None:
    driver.fails = what
    with pytest.raises(UnsupportedDevice, match=r"failed: CUDA_ERROR_NO_DEVICE \(100\)"):
        CudaDriver(driver).facts(0)


def test_a_driver_that_does_not_start(driver: Driver) -> None:
    driver.fails = "init"
    with pytest.raises(UnsupportedDevice, match=r"cannot be used: CUDA_ERROR_NO_DEVICE \(100\)") as caught:
        CudaDriver(driver).version()
    assert "nvidia-smi" in str(caught.value.hint)
    driver.missing = True
    with pytest.raises(UnsupportedDevice, match="no NVIDIA driver is installed") as caught:
        CudaDriver(driver).version()
    assert "device='cpu'" in str(caught.value.hint)


def test_values_of_a_call() -> None:
    assert capability.call((Code(0), 5), "asking") == 5
    assert capability.call((Code(0), 5, 6), "asking") == (5, 6)
    assert capability.call((Code(0),), "asking") == ()
    with pytest.raises(UnsupportedDevice, match="asking failed"):
        capability.call((Code(1), 5), "asking")


def test_bindings_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(MissingDependency, match="needs `cuda-core` and `cuda-bindings`") as caught:
        capability.bindings()
    assert caught.value.hint == capability.INSTALL


# As `cuda.core` is made: it is another module by its attributes while it is imported.
LIBRARY = """
import importlib

globals().update(importlib.import_module(".cu", __package__).__dict__)
from race import asks, has

asks.set()
has.wait(0.5)  # another thread is given this module by now, unless it waits

class Device:
    pass
"""
RACE = """
import threading

from race import asks, has

from tpde.cuda.capability import cuda_core

def other():
    asks.wait(60)
    print(hasattr(cuda_core(), "Device"))
    has.set()

thread = threading.Thread(target=other, daemon=True)
thread.start()
cuda_core()
thread.join(60)
"""


def test_threads_import_the_library_one_after_the_other(tmp_path: Path) -> None:
    """One that asked for it while another imported it was given what there was of it so far."""
    (tmp_path / "cuda" / "core" / "cu").mkdir(parents=True)
    (tmp_path / "cuda" / "__init__.py").touch()
    (tmp_path / "cuda" / "core" / "cu" / "__init__.py").touch()
    (tmp_path / "cuda" / "core" / "__init__.py").write_text(LIBRARY)
    (tmp_path / "race.py").write_text("import threading\nasks, has = threading.Event(), threading.Event()\n")
    made = subprocess.run(
        [sys.executable, "-c", RACE],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert made.stdout == "True\n"
