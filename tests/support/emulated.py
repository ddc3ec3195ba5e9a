"""Launches of kernels on the CPU (emulated.h): their logic and bounds, where there is no GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tpde.cuda import compile as nvrtc
from tpde.cuda.capability import DeviceFacts
from tpde.frameworks import has_words
from tpde.store import device_copies

# An index beyond an array's end ends the process.
_BOUNDS = ("-fsanitize=bounds", "-fsanitize-undefined-trap-on-error")
_FLAGS = (*_BOUNDS, "-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-fno-strict-aliasing", "-x", "c++")
_folder = tempfile.TemporaryDirectory(prefix="tpde-kernels-")


@functools.cache
def compiled(source: str, defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    """A kernel file as a library."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    out = Path(_folder.name) / f"{source}.{'.'.join(f'{k}{v}' for k, v in defines)}.so"
    macros = [f"-D{name}={value}" for name, value in defines]
    shim, text = Path(__file__).with_name("emulated.h"), Path(nvrtc.__file__).parent / "kernels" / source
    subprocess.run([compiler, *_FLAGS, *macros, "-include", shim, text, "-o", out], check=True)
    return ctypes.CDLL(str(out))


def _kernel(source: str, name: str, defines: Mapping[str, int], device: int) -> Any:
    library = compiled(source, tuple(sorted(defines.items())))
    return library, ctypes.cast(getattr(library, name), ctypes.c_void_p)


def _launch(made: Any, grid: int, block: int, shared: int, stream: int, *arguments: Any) -> None:
    library, function = made
    assert stream == 0
    ctypes.c_uint.in_dll(library, "shared_bytes").value = shared
    values = (ctypes.c_uint64 * len(arguments))(*map(int, arguments))
    library.run(function, values, len(arguments), grid, block)


class Launch:
    """What stands for `tpde.cuda.compile.Launch`."""

    def __init__(self, made: Any, grid: int, block: int, shared: int, **_: Any) -> None:
        self._how = made, grid, block, shared

    def __call__(self, stream: int, *arguments: Any) -> None:
        """Launch it once."""
        _launch(*self._how, stream, *arguments)


@pytest.fixture
def windows_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels of windows run on the CPU, as on a device of three multiprocessors without `wgmma`."""
    from tpde.cuda import window_experts, window_products

    have = DeviceFacts("CPU", (8, 0), 3, 163 << 10)
    monkeypatch.setattr(
        nvrtc,
        "kernel",
        lambda source, name, defines, device, own=False: _kernel(source, name, defines, device),
    )
    monkeypatch.setattr(nvrtc, "KernelLaunch", Launch)
    for module in (window_products, window_experts):
        monkeypatch.setattr(module, "facts", lambda device: have)
    made = window_products._launch_of, window_experts._decoding, window_experts._product
    for it in made:  # what other tests have made
        it.cache_clear()
    yield
    for it in made:
        it.cache_clear()


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of deltas run on the CPU, where contiguous tensors count as resident."""
    from tpde.cuda import delta_kernels

    def is_resident(tensor: Any) -> bool:
        plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        return plain and has_words(tensor)

    monkeypatch.setattr(nvrtc, "kernel", _kernel)
    monkeypatch.setattr(nvrtc, "launch", _launch)
    monkeypatch.setattr(delta_kernels, "THREADS", 64)
    monkeypatch.setattr(device_copies, "current", lambda where: contextlib.nullcontext())
    monkeypatch.setattr(device_copies, "stream_of", lambda where: 0)
    for module in ("store.device_deltas", "store.live_deltas", "store.live_update", "weights.delta_sources"):
        monkeypatch.setattr(f"tpde.{module}.is_resident", is_resident)
