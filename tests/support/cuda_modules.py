"""CUDA's modules and its driver, as far as kernels are compiled, loaded and launched: without CUDA."""

from __future__ import annotations

import ctypes
import sys
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tpde.cuda.backend import CudaBackend
from tpde.cuda.capability import DeviceFacts
from tpde.cuda.compile import Cubins


class Code(int):
    """A result of NVRTC or the driver."""

    name = "SOME_ERROR"


class Attribute(ctypes.Structure):
    """`CUlaunchAttribute` of the CUDA driver's API."""

    _fields_ = [("id", ctypes.c_int), ("gap", ctypes.c_char * 4), ("value", ctypes.c_uint32 * 16)]


class Config(ctypes.Structure):
    """`CUlaunchConfig`, likewise."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


DRIVER = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)


class Machine:
    """Modules of CUDA that note what they are asked for.

    Attributes
    ----------
    compiled : list
        What was compiled.
    asked : list
        What was asked of the driver and of cuda.core, in order.
    version, driver_version : tuple of int
        Of NVRTC, and of the driver.
    text : str
        Of all kernel files, behind their names.
    cubins, backend : Cubins, CudaBackend
        That work with them.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.compiled: list[Any] = []
        self.text = "text"
        self.asked: list[Any] = []
        self.version, self.driver_version, self.current = (13, 1), (13, 0), 5
        self.during: Any = None  # called while a kernel is compiled
        self.broken = False  # kernels cannot be loaded
        self.refused = 0  # what the driver says of launches
        self._driver = DRIVER(self._launch)
        core, package = ModuleType("cuda.core"), ModuleType("cuda")
        core.Device = lambda number: SimpleNamespace(set_current=lambda: self._switch(number))  # type: ignore[attr-defined]
        core.ObjectCode = SimpleNamespace(from_cubin=self._load)  # type: ignore[attr-defined]
        core.LEGACY_DEFAULT_STREAM = "legacy"  # type: ignore[attr-defined]
        core.LaunchConfig = lambda **named: named  # type: ignore[attr-defined]
        package.core = core  # type: ignore[attr-defined]
        patch.setitem(sys.modules, "cuda", package)
        patch.setitem(sys.modules, "cuda.core", core)
        self.calls = SimpleNamespace(
            CUfunction_attribute=SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="room"),
            CUkernel=lambda handle: f"kernel {handle}",
            cuCtxGetCurrent=lambda: (Code(0), self.current),
            cuCtxSetCurrent=self._restore,
            cuKernelSetAttribute=self._attribute,
            cuGetProcAddress=self._address,
            CUdriverProcAddress_flags=SimpleNamespace(CU_GET_PROC_ADDRESS_LEGACY_STREAM="legacy"),
            CUresult=IntEnum("CUresult", {"CUDA_SUCCESS": 0, "CUDA_ERROR_ILLEGAL_ADDRESS": 700}),
        )
        driver = SimpleNamespace(
            calls=self.calls,
            version=lambda: self.driver_version,
            facts=lambda device: DeviceFacts("card", (8, 6), 84, 99 << 10),
        )
        compiler = SimpleNamespace(
            text=lambda source: f"{source} {self.text}", version=lambda: self.version, cubin=self._compile
        )
        self.cubins = Cubins(compiler)
        self.backend = CudaBackend(driver, compiler)  # type: ignore[arg-type]

    def _compile(self, source: str, defines: Any, arch: str) -> tuple[bytes, str]:
        self.compiled.append((source, dict(defines), arch))
        if self.during is not None:
            self.during()
        return f"{source} {sorted(defines.items())} {arch}".encode() * 3, ""

    def _switch(self, number: int) -> None:
        self.current = number

    def _restore(self, context: int) -> tuple[Any, ...]:
        self.current = context
        return (Code(0),)

    def _load(self, code: bytes, name: str) -> Any:
        self.asked.append(("load", code, name, self.current))
        if self.broken:
            raise RuntimeError("no kernel image is available")
        self.loaded = SimpleNamespace(
            handle=7,
            attributes=SimpleNamespace(shared_size_bytes=144),
            occupancy=SimpleNamespace(max_active_clusters=self._clusters),
        )
        return SimpleNamespace(get_kernel=lambda name: self.asked.append(name) or self.loaded)

    def _address(self, *given: Any) -> tuple[Any, ...]:
        assert given == (b"cuLaunchKernelEx", 12000, "legacy")
        return Code(0), ctypes.cast(self._driver, ctypes.c_void_p).value, Code(0)

    def _launch(self, how: int, kernel: int, parameters: int, extra: int | None) -> int:
        """As the driver would: of each of two parameters it takes four bytes."""
        it = Config.from_address(how)
        attributes = [
            (found.id, [*found.value][: 3 if found.id == 4 else 1])
            for found in (Attribute * it.count).from_address(it.attributes or 0)
        ]
        values = [
            ctypes.c_uint32.from_address(at).value for at in (ctypes.c_uint64 * 2).from_address(parameters)
        ]
        assert (extra, kernel) == (None, 7)
        self.asked.append(((*it.grid,), (*it.block,), it.shared, it.stream, attributes, values))
        return self.refused

    def _clusters(self, config: Any, stream: Any) -> int:
        self.asked.append(("occupancy", config, stream, self.current))
        return 15

    def _attribute(self, *given: Any) -> tuple[Any, ...]:
        self.asked.append(given)
        return (Code(0),)
