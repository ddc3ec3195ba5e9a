"""What a device must have, and what to say when it has not."""

from __future__ import annotations

import functools
import importlib
import threading
from typing import Any, NamedTuple

from tpde.errors import MissingDependency, UnsupportedDevice

MIN_CAPABILITY = (8, 0)  # cp.async and __reduce_add_sync: Ampere and later
INSTALL = "pip install 'tpde[cuda]'"

_importing = threading.Lock()


class DeviceFacts(NamedTuple):
    """The facts of a device that launches depend on."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int  # that one block may use


def cuda_core() -> Any:
    """`cuda.core`, imported by one thread at a time.

    Before all of it is there, its module takes the attributes of the one for a CUDA version (1.0 to 1.2),
    among them that it is imported: a thread that imports it then is given what there is so far.
    """
    with _importing:
        return importlib.import_module("cuda.core")


def bindings() -> tuple[Any, Any]:
    """`cuda.bindings.driver` and `cuda.bindings.nvrtc`.

    Raises
    ------
    MissingDependency
        If `cuda-core` or `cuda-bindings` is not installed.
    """
    try:
        cuda_core()  # PyTorch brings `cuda-bindings` alone
        from cuda.bindings import driver, nvrtc
    except ImportError as error:
        raise MissingDependency(
            f"decoding on a GPU needs `cuda-core` and `cuda-bindings`: {error}", hint=INSTALL
        ) from error
    return driver, nvrtc


def call(result: tuple[Any, ...], what: str) -> Any:
    """The value of a driver call, or what its failure means.

    Raises
    ------
    UnsupportedDevice
        With the driver's own words.
    """
    code, *values = result
    if int(code):
        raise UnsupportedDevice(f"{what} failed: {code.name} ({int(code)})")
    return values[0] if len(values) == 1 else tuple(values)


class CudaDriver:
    """The NVIDIA driver, and what it says of devices. It is asked once.

    Parameters
    ----------
    calls : module, optional
        How it is asked; by default `cuda.bindings.driver`, loaded when it is first needed.
    """

    def __init__(self, calls: Any = None) -> None:
        self._given = calls
        self._version: tuple[int, int] | None = None
        self._facts: dict[int, DeviceFacts] = {}

    @functools.cached_property
    def calls(self) -> Any:
        """Its functions, to be checked by `call`."""
        return bindings()[0] if self._given is None else self._given

    def version(self) -> tuple[int, int]:
        """The newest CUDA version that it knows.

        Raises
        ------
        UnsupportedDevice
            If there is no driver, or no device.
        """
        if self._version is None:
            self._version = _version(self.calls)
        return self._version

    def facts(self, device: int) -> DeviceFacts:
        """The facts of a device.

        Parameters
        ----------
        device : int
            Its number, as torch counts.

        Raises
        ------
        UnsupportedDevice
            If there is no such device, or its compute capability is below 8.0.
        """
        found = self._facts.get(device)
        if found is None:
            self.version()
            found = self._facts[device] = _facts(self.calls, device)
        return found


def _version(driver: Any) -> tuple[int, int]:
    try:
        code = driver.cuInit(0)[0]
    except RuntimeError as error:  # the driver's library is not there
        raise UnsupportedDevice(
            "no NVIDIA driver is installed", hint="install one, or use the CPU (`device='cpu'`)"
        ) from error
    if int(code):
        raise UnsupportedDevice(
            f"the NVIDIA driver cannot be used: {code.name} ({int(code)})",
            hint="check `nvidia-smi`, or use the CPU (`device='cpu'`)",
        )
    version = int(call(driver.cuDriverGetVersion(), "asking for the driver's version"))
    return version // 1000, version % 1000 // 10


def _facts(driver: Any, device: int) -> DeviceFacts:
    count = int(call(driver.cuDeviceGetCount(), "counting devices"))
    if not 0 <= device < count:
        raise UnsupportedDevice(
            f"no CUDA device {device}: {count} found", hint="choose one of `nvidia-smi -L`", found=count
        )
    handle = call(driver.cuDeviceGet(device), f"opening CUDA device {device}")
    kind = driver.CUdevice_attribute
    ask = {
        key: int(call(driver.cuDeviceGetAttribute(getattr(kind, f"CU_DEVICE_ATTRIBUTE_{key}"), handle), key))
        for key in (
            "COMPUTE_CAPABILITY_MAJOR",
            "COMPUTE_CAPABILITY_MINOR",
            "MULTIPROCESSOR_COUNT",
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
        )
    }
    name = call(driver.cuDeviceGetName(100, handle), "asking for a device's name").split(b"\0")[0].decode()
    capability = ask["COMPUTE_CAPABILITY_MAJOR"], ask["COMPUTE_CAPABILITY_MINOR"]
    if capability < MIN_CAPABILITY:
        raise UnsupportedDevice(
            f"CUDA device {device} ({name}) has compute capability {capability[0]}.{capability[1]}, tpde's "
            f"kernels need {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or later",
            hint="use the CPU (`device='cpu'`)",
            found=capability,
            needed=MIN_CAPABILITY,
        )
    return DeviceFacts(
        name,
        capability,
        ask["MULTIPROCESSOR_COUNT"],
        ask["MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"],
    )
