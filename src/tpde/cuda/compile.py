"""Compiling kernels with NVRTC at first use, and keeping them on disk.

A cache entry is a file named by the hash of all that it depends on: source, options, architecture and
NVRTC's version. It starts with the hash of what follows, so that a damaged entry is a miss. Entries are
written under another name and renamed: several processes may do so at once.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import re
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tpde.cuda.capability import INSTALL, bindings, call, driver_version, facts
from tpde.errors import CompileError, InvalidDestination, MissingDependency, UnsupportedDevice
from tpde.io.sinks import FileSink

_lock = threading.Lock()


@functools.cache
def source_text(source: str) -> str:
    """The text of a kernel file, with the texts of those that it includes by `#include "NAME"`."""
    text = (Path(__file__).parent / "kernels" / source).read_text(encoding="utf-8")
    return re.sub(r'^#include "([\w.]+)"$', lambda found: source_text(found[1]), text, flags=re.MULTILINE)


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """The version of the NVRTC at hand.

    Raises
    ------
    MissingDependency
        If its library is not found.
    """
    _, nvrtc = bindings()
    try:
        code, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:  # DynamicLibNotFoundError among them
        raise MissingDependency(
            f"kernels are compiled by NVRTC, whose library was not found ({error})",
            hint=f"{INSTALL}, or install `nvidia-cuda-nvrtc` of the driver's major version",
        ) from error
    if int(code):
        raise MissingDependency(f"NVRTC does not work: {code.name}", hint=f"reinstall it: {INSTALL}")
    return int(major), int(minor)


def cubin(source: str, defines: Mapping[str, int], arch: str) -> tuple[bytes, str]:
    """Compile a kernel file; needs neither a GPU nor a driver.

    Parameters
    ----------
    source : str
        A file of `tpde/cuda/kernels`.
    defines : mapping of str to int
        Macros.
    arch : str
        `sm_90`, for example; `sm_90a` for what only such devices run.

    Returns
    -------
    code : bytes
        The cubin.
    log : str
        What the assembler says of registers, spills and shared memory.

    Raises
    ------
    CompileError
        With the compiler's log.
    """
    nvrtc_version()
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    options = ProgramOptions(
        name=source,
        arch=arch,
        std="c++17",
        define_macro=[(name, str(value)) for name, value in sorted(defines.items())] or None,
        ptxas_options="-v",
    )
    try:
        program = Program(source_text(source), "c++", options)
        made = program.compile("cubin", logs=log)
    except Exception as error:  # cuda.core raises classes of its own, of bindings and of the linker
        raise CompileError(
            f"NVRTC {'.'.join(map(str, nvrtc_version()))} refused {source} for {arch}: {error}"
        ) from error
    return bytes(made.code), log.getvalue()


def cache_directory() -> Path:
    """Where compiled kernels are kept: `TPDE_CACHE_DIR`, or `tpde` in the user's cache directory."""
    chosen = os.environ.get("TPDE_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpde"


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)


def cached_cubin(source: str, defines: Mapping[str, int], arch: str) -> bytes:
    """A kernel file, compiled, from the disk if it is there."""
    facts_of_it = repr((source_text(source), sorted(defines.items()), arch, nvrtc_version()))
    path = cache_directory() / "kernels" / f"{hashlib.sha256(facts_of_it.encode()).hexdigest()}.cubin"
    try:
        entry = path.read_bytes()
    except OSError:
        entry = b""
    if len(entry) > 32 and hashlib.sha256(entry[32:]).digest() == entry[:32]:
        return entry[32:]
    code, _ = cubin(source, defines, arch)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        sink = FileSink(path, force=True)
        try:
            sink.write(0, [hashlib.sha256(code).digest(), code])
            sink.commit()
        finally:
            sink.abort()  # nothing, once it is committed
    except (OSError, InvalidDestination) as error:
        _warn_once(
            f"compiled kernels cannot be kept in `{path.parent}` ({error}); every process compiles them "
            "again: set TPDE_CACHE_DIR to a directory that can be written"
        )
    return code


@functools.cache
def _kernel(source: str, name: str, defines: tuple[tuple[str, int], ...], device: int, own: bool) -> Any:
    driver, _ = bindings()
    from cuda.core import Device, ObjectCode

    have = facts(device)
    can, made_for = driver_version(), nvrtc_version()
    if can[0] < made_for[0]:
        raise UnsupportedDevice(
            f"the driver supports CUDA {can[0]}.{can[1]}, the installed NVRTC is of CUDA {made_for[0]}."
            f"{made_for[1]}",
            hint=(
                f"update the driver, or install `cuda-bindings<{made_for[0]}` and the NVRTC of CUDA {can[0]}"
            ),
            found=can,
            needed=made_for,
        )
    arch = f"sm_{have.capability[0]}{have.capability[1]}{'a' * own}"
    code = cached_cubin(source, dict(defines), arch)
    current = call(driver.cuCtxGetCurrent(), "asking for the current context")
    Device(device).set_current()
    try:
        made = ObjectCode.from_cubin(code, name=source).get_kernel(name)
        # A block may use more than 48 KiB only if it is asked for.
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        handle = driver.CUkernel(int(made.handle))
        room = have.shared_bytes - int(made.attributes.shared_size_bytes)
        call(driver.cuKernelSetAttribute(limit, room, handle, device), f"preparing kernel {name}")
    finally:
        call(driver.cuCtxSetCurrent(current), "restoring the current context")
    return made


def kernel(source: str, name: str, defines: Mapping[str, int], device: int, *, own: bool = False) -> Any:
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
    with _lock:
        return _kernel(source, name, tuple(sorted(defines.items())), device, own)


@functools.lru_cache(maxsize=64)
def _stream(handle: int) -> Any:
    from cuda.core import LEGACY_DEFAULT_STREAM, Stream

    if not handle:
        return LEGACY_DEFAULT_STREAM
    return Stream.from_handle(handle)


class KernelLaunch:
    """A kernel with a grid of its own, launched again and again.

    What does not change is made once: a model's forward pass has dozens of launches, each of which the
    framework's own work waits for.

    Parameters
    ----------
    made : Kernel
        What `kernel` returned.
    grid, block : int
        Blocks, and threads of each.
    shared : int
        Bytes of dynamic shared memory.
    cluster : int
        Blocks that can read each other's shared memory; `grid` is a multiple of it. Of compute capability 9.0
        or more, if it is more than 1.
    early : bool
        Start while the kernel before it in the stream ends, if that one allows it: it waits by itself
        (`griddepcontrol.wait`). Of compute capability 9.0 or more.
    """

    def __init__(
        self, made: Any, grid: int, block: int, shared: int, *, cluster: int = 1, early: bool = False
    ) -> None:
        from cuda.core import LaunchConfig, launch

        self._kernel, self._launch = made, launch
        more: dict[str, Any] = {"programmatic_stream_serialization": True} if early else {}
        if cluster > 1:  # then the grid is counted in clusters
            more |= {"cluster": cluster}
        self._config = LaunchConfig(grid=grid // cluster, block=block, shmem_size=shared, **more)

    def __call__(self, stream: int, *arguments: Any) -> None:
        """Launch it once: see `bind`."""
        self._launch(_stream(stream), self._config, self._kernel, *arguments)

    def bind(self, stream: int, *arguments: Any) -> Callable[[], None]:
        """What launches with these arguments, each time that it is called.

        Parameters
        ----------
        stream : int
            Handle of the stream, 0 for the legacy default one.
        *arguments : numpy scalars
            Never Python integers, which would be taken for pointers: `np.uint64(address)`.
        """
        return functools.partial(self._launch, _stream(stream), self._config, self._kernel, *arguments)


def clusters_at_once(made: Any, cluster: int, block: int, shared: int) -> int:
    """How many clusters of blocks a device runs at a time: a part of its multiprocessors may be left over."""
    from cuda.core import LaunchConfig

    config = LaunchConfig(grid=1, cluster=cluster, block=block, shmem_size=shared)
    return int(made.occupancy.max_active_clusters(config, stream=_stream(0)))


def launch(made: Any, grid: int, block: int, shared: int, stream: int, *arguments: Any) -> None:
    """Launch a kernel once; see `KernelLaunch`."""
    KernelLaunch(made, grid, block, shared)(stream, *arguments)
