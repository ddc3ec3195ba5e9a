"""Devices as launches need them: what is known of each, and kernels that are ready on it."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from tpde.codec.native import MOST_PARAMETERS, CoreLaunch, core
from tpde.cuda.capability import CudaDriver, DeviceFacts, call, cuda_core
from tpde.cuda.compile import Compiler, Cubins, Nvrtc
from tpde.cuda.nvcomp import Nvcomp
from tpde.errors import UnsupportedDevice

_LAUNCHES_SINCE = 12000  # of CUDA 12.0, as its versions are counted: kernels of libraries are launched


class KernelLaunch(Protocol):
    """A kernel with a grid of its own, launched again and again.

    What does not change is made once: a model's forward pass has hundreds of launches, each of which the
    framework's own work waits for.
    """

    def __call__(self, stream: int, *arguments: int) -> None:
        """Launch it once: see `bind`."""

    def bind(self, stream: int, *arguments: int) -> Callable[[], None]:
        """What launches with these arguments, each time that it is called.

        Parameters
        ----------
        stream : int
            Handle of the stream, 0 for the legacy default one.
        *arguments : int
            Addresses and unsigned integers, of up to 64 bits each, as many as the kernel declares: at most
            `tpde.codec.native.MOST_PARAMETERS`.
        """


class Kernel(Protocol):
    """A kernel that is loaded on a device."""

    def launch(
        self, grid: int, block: int, shared: int, *, cluster: int = 1, early: bool = False
    ) -> KernelLaunch:
        """Give it a grid.

        Parameters
        ----------
        grid, block : int
            Blocks, and threads of each.
        shared : int
            Bytes of dynamic shared memory.
        cluster : int
            Blocks that can read each other's shared memory; `grid` is a multiple of it. Of compute capability
            9.0 or more, if it is more than 1.
        early : bool
            Start while the kernel before it in the stream ends, if that one allows it: it waits by itself
            (`griddepcontrol.wait`). Of compute capability 9.0 or more.
        """

    def clusters_at_once(self, cluster: int, block: int, shared: int) -> int:
        """How many clusters of blocks the device runs at a time: a part of it may be left over."""


class Backend(Protocol):
    """What runs kernels.

    Attributes
    ----------
    kind : str
        Type of its devices, as torch names it: tensors of others are the processor's.
    """

    kind: str

    @property
    def nvcomp(self) -> Nvcomp:
        """What decodes zstd frames on its devices, if it can."""

    def __hash__(self) -> int:
        """Launches are kept by what runs them."""

    def driver_version(self) -> tuple[int, int]:
        """The newest CUDA version that the driver knows.

        Raises
        ------
        UnsupportedDevice
            If there is no driver, or no device.
        """

    def compiler_version(self) -> tuple[int, int]:
        """The CUDA version of what compiles kernels.

        Raises
        ------
        MissingDependency
            If it is not installed.
        UnsupportedDevice
            If the driver is of an older major version, or there is none.
        """

    def facts(self, device: int) -> DeviceFacts:
        """The facts of a device, by its number as torch counts.

        Raises
        ------
        UnsupportedDevice
            If there is no such device, or it cannot run our kernels.
        """

    def kernel(
        self, source: str, name: str, defines: Mapping[str, int], device: int, *, own: bool = False
    ) -> Kernel:
        """A kernel, ready to launch on a device; compiled and loaded once a process.

        Parameters
        ----------
        source : str
            A file of `tpde/cuda/kernels`.
        name : str
            The function in it (`extern "C"`).
        defines : mapping of str to int
            Macros.
        device : int
            The device's number.
        own : bool
            It takes instructions that only devices of this compute capability have.

        Raises
        ------
        MissingDependency
            If cuda-core, cuda-bindings or NVRTC is missing.
        UnsupportedDevice
            If driver or device are too old.
        CompileError
            If the compiler refuses the kernel.
        """


class _Thread(threading.local):
    """Whether a thread is known to have a context."""

    entered = False


_thread = _Thread()
# Of so many integers: eight bytes for each.
_packings = [struct.Struct(f"<{count}Q").pack for count in range(MOST_PARAMETERS + 1)]


class _CudaLaunch:
    """A launch by the core: through `cuda.core` one of 14 integers takes 8.5 us, so 5.8 (an H100's host)."""

    def __init__(self, how: CoreLaunch, kernel: _CudaKernel) -> None:
        self._how, self._at, self._kernel = how, ctypes.addressof(how), kernel
        self._start = core().tpde_launch_start

    def __call__(self, stream: int, *arguments: int) -> None:
        self._launch(stream, _packings[len(arguments)](*arguments))

    def bind(self, stream: int, *arguments: int) -> Callable[[], None]:
        return functools.partial(self._launch, stream, _packings[len(arguments)](*arguments))

    def _launch(self, stream: int, values: bytes) -> None:
        if not _thread.entered:
            self._kernel.enter()
        code = self._start(self._at, stream, values, len(values))
        if code:
            self._kernel.refuse(code)


class _CudaKernel:
    """A kernel that `cuda.core` has loaded.

    Parameters
    ----------
    made : Kernel
        Of `cuda.core`.
    name : str
        Its name.
    driver : module
        Of `cuda.bindings`.
    device : int
        Where it is.
    """

    def __init__(self, made: Any, name: str, driver: Any, device: int) -> None:
        self._made, self._name, self._driver, self._device = made, name, driver, device

    def launch(
        self, grid: int, block: int, shared: int, *, cluster: int = 1, early: bool = False
    ) -> KernelLaunch:
        handle = int(self._made.handle)
        return _CudaLaunch(CoreLaunch(self._start, handle, grid, block, shared, cluster, early), self)

    @functools.cached_property
    def _start(self) -> int:
        """Address of what launches."""
        flags = self._driver.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_LEGACY_STREAM
        found = self._driver.cuGetProcAddress(b"cuLaunchKernelEx", _LAUNCHES_SINCE, flags)
        return int(call(found, "finding cuLaunchKernelEx")[0])

    def clusters_at_once(self, cluster: int, block: int, shared: int) -> int:
        config = cuda_core().LaunchConfig(grid=1, cluster=cluster, block=block, shmem_size=shared)
        self.enter()
        before = call(self._driver.cuCtxGetCurrent(), "asking for the current context")
        cuda_core().Device(self._device).set_current()  # others may have no room, or run no such kernels
        try:
            occupancy, stream = self._made.occupancy, cuda_core().LEGACY_DEFAULT_STREAM
            return int(occupancy.max_active_clusters(config, stream=stream))
        finally:
            call(self._driver.cuCtxSetCurrent(before), "restoring the current context")

    def enter(self) -> None:
        """Have a context in this thread: PyTorch's for backward passes have none before they launch."""
        if not int(call(self._driver.cuCtxGetCurrent(), "asking for the current context")):
            cuda_core().Device(self._device).set_current()
        _thread.entered = True

    def refuse(self, code: int) -> None:
        """Raise what the driver says of a launch, as PyTorch does: no other way would work from then on."""
        names = {int(it): it.name for it in self._driver.CUresult}
        said = names.get(code, "an error without a name here")
        raise RuntimeError(
            f"launching kernel {self._name} failed: {said} ({code}); an earlier kernel may be to "
            "blame, which `CUDA_LAUNCH_BLOCKING=1` shows"
        )


class CudaBackend:
    """CUDA devices, through their driver and NVRTC.

    Parameters
    ----------
    driver : CudaDriver, optional
        By default the one that is installed.
    compiler : Compiler, optional
        By default NVRTC.
    nvcomp : Nvcomp, optional
        By default the one that is installed, if any is.
    """

    kind = "cuda"

    def __init__(
        self,
        driver: CudaDriver | None = None,
        compiler: Compiler | None = None,
        nvcomp: Nvcomp | None = None,
    ) -> None:
        self.nvcomp = nvcomp or Nvcomp()
        self._driver, self._cubins = driver or CudaDriver(), Cubins(compiler or Nvrtc())
        self._lock, self._kernels = threading.Lock(), dict[Any, Kernel]()

    def driver_version(self) -> tuple[int, int]:
        """What the driver says."""
        return self._driver.version()

    def compiler_version(self) -> tuple[int, int]:
        """NVRTC's, which the driver supports."""
        can, made_for = self.driver_version(), self._cubins.compiler.version()
        if can[0] < made_for[0]:
            raise UnsupportedDevice(
                f"the driver supports CUDA {can[0]}.{can[1]}, the installed NVRTC is of CUDA {made_for[0]}."
                f"{made_for[1]}",
                hint=(
                    f"update the driver, or install `cuda-bindings<{made_for[0]}` and the NVRTC of CUDA "
                    f"{can[0]}"
                ),
                found=can,
                needed=made_for,
            )
        return made_for

    def facts(self, device: int) -> DeviceFacts:
        """What the driver says of a device."""
        return self._driver.facts(device)

    def kernel(
        self, source: str, name: str, defines: Mapping[str, int], device: int, *, own: bool = False
    ) -> Kernel:
        """Compile a kernel, if it is not on the disk, and load it."""
        key = source, name, tuple(sorted(defines.items())), device, own
        if key not in self._kernels:
            code = self._compiled(source, defines, device, own)  # without the lock: different ones at a time
            with self._lock:
                if key not in self._kernels:
                    self._kernels[key] = self._load(code, source, name, device)
        return self._kernels[key]

    def _compiled(self, source: str, defines: Mapping[str, int], device: int, own: bool) -> bytes:
        self.compiler_version()
        major, minor = self.facts(device).capability
        return self._cubins.get(source, defines, f"sm_{major}{minor}{'a' * own}")

    def _load(self, code: bytes, source: str, name: str, device: int) -> Kernel:
        driver = self._driver.calls
        current = call(driver.cuCtxGetCurrent(), "asking for the current context")
        cuda_core().Device(device).set_current()
        try:
            made = cuda_core().ObjectCode.from_cubin(code, name=source).get_kernel(name)
            # A block may use more than 48 KiB only if it is asked for.
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            handle = driver.CUkernel(int(made.handle))
            room = self.facts(device).shared_bytes - int(made.attributes.shared_size_bytes)
            call(driver.cuKernelSetAttribute(limit, room, handle, device), f"preparing kernel {name}")
        finally:
            call(driver.cuCtxSetCurrent(current), "restoring the current context")
        return _CudaKernel(made, name, driver, device)


_current: Backend = CudaBackend()


def current() -> Backend:
    """What runs kernels in this process: whoever launches is made in too many places to be handed it."""
    return _current


@contextmanager
def launching_on(backend: Backend) -> Iterator[None]:
    """Let another back end run kernels within this context, in all threads: one that emulates them."""
    global _current  # noqa: PLW0603
    before, _current = _current, backend
    try:
        yield
    finally:
        _current = before
