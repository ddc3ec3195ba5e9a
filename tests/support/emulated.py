"""Launches of kernels on the CPU (emulated.h): their logic and bounds, where there is no GPU."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import tpde.cuda
from support.backends import MadeBackend, MadeKernel
from tpde.cuda.capability import DeviceFacts
from tpde.cuda.compile import source_text

# An index beyond an array's end ends the process.
_BOUNDS = ("-fsanitize=bounds", "-fsanitize-undefined-trap-on-error")
# Jumps are between stacks, which a check of them would take for a mistake.
_JUMPS = ("-U_FORTIFY_SOURCE",)
_LIBRARY = ("-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-fno-strict-aliasing", "-x", "c++")
_FLAGS = (*_BOUNDS, *_JUMPS, *_LIBRARY)
# What the kernels are told of the CPU: three multiprocessors without `wgmma`.
CPU = DeviceFacts("CPU", (8, 0), 3, 163 << 10)
_folder = tempfile.TemporaryDirectory(prefix="tpde-kernels-")
_compiling = threading.Lock()


@functools.cache
def declared(source: str, name: str) -> int:
    """How many parameters a kernel has; a macro may give its name."""
    text = source_text(source)
    found = re.search(rf'extern "C" __global__ void[^{{;]*?\b(?:{name}|NAME)\(([^)]*)\)', text)
    assert found, f"no kernel {name} in {source}"
    matrix = re.search(r"^#define MATRIX (.*)$", text, re.MULTILINE)
    return (found[1].replace("MATRIX", matrix[1]) if matrix else found[1]).count(",") + 1


def compiled(source: str, defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    """A kernel file as a library; several threads may ask for one."""
    with _compiling:
        return _compiled(source, defines)


@functools.cache
def _compiled(source: str, defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    out = Path(_folder.name) / f"{source}.{'.'.join(f'{k}{v}' for k, v in defines)}.so"
    macros = [f"-D{name}={value}" for name, value in defines]
    shim, text = Path(__file__).with_name("emulated.h"), Path(tpde.cuda.__file__).parent / "kernels" / source
    subprocess.run([compiler, *_FLAGS, *macros, "-include", shim, text, "-o", out], check=True)
    return ctypes.CDLL(str(out))


def kernel_on_cpu(
    source: str, name: str, defines: Mapping[str, int], device: int, *, own: bool = False
) -> MadeKernel:
    """A kernel, run on the CPU by whoever launches it."""
    library, needed = compiled(source, tuple(sorted(defines.items()))), declared(source, name)
    function = ctypes.cast(getattr(library, name), ctypes.c_void_p)

    def make(
        grid: int, block: int, shared: int, *, cluster: int = 1, early: bool = False
    ) -> Callable[..., None]:
        def run(stream: int, *arguments: Any) -> None:
            assert stream == 0
            assert len(arguments) == needed, f"{name} has {needed} parameters"
            ctypes.c_uint.in_dll(library, "shared_bytes").value = shared
            values = (ctypes.c_uint64 * len(arguments))(*map(int, arguments))
            library.run(function, values, len(arguments), grid, block, cluster)

        return run

    return MadeKernel(make)


@pytest.fixture
def windows_on_cpu(launch_on: Callable[[Any], Any]) -> None:
    """Kernels of windows run on the CPU."""
    launch_on(MadeBackend(kernel_on_cpu, CPU))


def cpu_backend() -> MadeBackend:
    """A back end that runs kernels on the CPU, whose tensors it takes for a GPU's."""
    return MadeBackend(kernel_on_cpu, CPU, "cpu")


@pytest.fixture
def on_cpu(launch_on: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of deltas and of packing run on the CPU, whose tensors count as a GPU's."""
    from tpde.cuda import delta_kernels

    launch_on(cpu_backend())
    monkeypatch.setattr(delta_kernels, "THREADS", 64)


@pytest.fixture(params=["core", "kernels"])
def where(request: pytest.FixtureRequest) -> None:
    """By the core, and by kernels."""
    if request.param == "kernels":
        request.getfixturevalue("on_cpu")
