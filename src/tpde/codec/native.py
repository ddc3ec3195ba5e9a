"""The C core as a library: csrc/tpde.h through ctypes, its structures and errors, and its instruction sets.

ctypes releases the GIL for the length of a call. Buffers are anything with the buffer protocol; whoever calls
a function of the core checks their sizes before a pointer crosses over.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from tpde.errors import Corrupt, NativeError, Truncated, UnsupportedVersion
from tpde.io.buffers import Buffer

ABI = 7
NO_CHUNK = (1 << 64) - 1
MOST_PARAMETERS = 32  # of a kernel

_E_MEMORY, _E_TABLE, _E_INDEX, _E_CHUNK, _E_CHECKSUM, E_SPACE, _E_MODEL = 2, 3, 4, 5, 6, 7, 8
_E_WINDOW, _E_TRUNCATED, _E_VERSION = 9, 10, 11

Bytes = npt.NDArray[np.uint8]


class Error(ctypes.Structure):
    """`tpde_error`: details of a failure."""

    _fields_ = [
        ("code", ctypes.c_int32),
        ("plane", ctypes.c_int32),
        ("chunk", ctypes.c_uint64),
        ("found", ctypes.c_uint64),
        ("needed", ctypes.c_uint64),
        ("what", ctypes.c_char * 96),
    ]


class CoreLayout(ctypes.Structure):
    """`tpde_layout`: the fixed facts of a packed tensor that its chunks depend on."""

    _fields_ = [
        ("words", ctypes.c_uint64),
        ("segment_words", ctypes.c_uint64),
        ("chunk_words", ctypes.c_uint32),
        ("word_bytes", ctypes.c_uint8),
        ("rotate", ctypes.c_uint8),
        ("unit_log2", ctypes.c_uint8),
        ("tables", ctypes.c_uint8),
        ("first_table", ctypes.c_uint8 * 8),
        ("table_count", ctypes.c_uint8 * 8),
    ]


class CoreWindow(ctypes.Structure):
    """`tpde_window`: what a blob in the window layout holds, and where."""

    _fields_ = [
        ("rows", ctypes.c_uint64),
        ("columns", ctypes.c_uint64),
        ("entries", ctypes.c_uint64),
        ("stripes", ctypes.c_uint64),
        ("stripe_chunks", ctypes.c_uint64),
        ("stripe_bytes", ctypes.c_uint64),
        ("records_at", ctypes.c_uint64),
        ("offsets_at", ctypes.c_uint64),
        ("entries_at", ctypes.c_uint64),
        ("bodies_at", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("table", ctypes.c_uint8 * 16),
    ]


class CoreLaunch(ctypes.Structure):
    """`tpde_launch`: a kernel with a grid of its own."""

    _fields_ = [
        ("driver", ctypes.c_uint64),
        ("kernel", ctypes.c_uint64),
        ("grid", ctypes.c_uint32),
        ("block", ctypes.c_uint32),
        ("shared", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32),
        ("early", ctypes.c_uint32),
    ]


_u8p, _u32p = ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint32)
_u64, _u32, _int, _ptr = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int, ctypes.c_void_p
_layout, _error = ctypes.POINTER(CoreLayout), ctypes.POINTER(Error)
_window = ctypes.POINTER(CoreWindow)

_SIGNATURES: dict[str, tuple[type[object] | None, list[type[object]]]] = {
    "tpde_abi": (_int, []),
    "tpde_simd": (ctypes.c_char_p, []),
    "tpde_simd_available": (ctypes.c_char_p, []),
    "tpde_simd_select": (_int, [ctypes.c_char_p]),
    "tpde_chunk_count": (_u64, [_layout]),
    "tpde_encode_bound": (_u64, [_layout, _u64, _u64]),
    "tpde_plan": (
        _int,
        [_layout, _ptr, _u64, _int, _u8p, _u32p, ctypes.POINTER(_u64), _error],
    ),
    "tpde_codec_open": (_int, [_layout, _u8p, _u32, _int, ctypes.POINTER(_ptr), _error]),
    "tpde_codec_close": (None, [_ptr]),
    "tpde_codec_table": (
        _int,
        [_ptr, _int, *[ctypes.POINTER(_int)] * 3, ctypes.POINTER(_u32p)],
    ),
    "tpde_index_check": (_int, [_layout, _u8p, _u64, _u64, _u32, _error]),
    "tpde_decode": (
        _int,
        [_ptr, _u8p, _u64, _u64, _u8p, _u64, _u64, _u64, _ptr, _u64, _int, _error],
    ),
    "tpde_encode": (
        _int,
        [
            *(_ptr, _ptr, _u64, _u64, _u64, _u8p, _u64, ctypes.POINTER(_u64), _u8p),
            *(_u32p, _u32p, _int, _error),
        ],
    ),
    "tpde_split": (_int, [_layout, _ptr, _u64, _u8p, _u64]),
    "tpde_merge": (_int, [_layout, _u8p, _u64, _u64, _ptr]),
    "tpde_checksum": (_u32, [_ptr, _u64]),
    "tpde_populate": (_int, [_ptr, _u64]),
    "tpde_launch_start": (_int, [_ptr, _u64, ctypes.c_char_p, _u64]),
    "tpde_fingerprint": (None, [_ptr, _u64, _u64, ctypes.POINTER(_u64)]),
    "tpde_delta_plan_new": (_ptr, [_int, _int, _int]),
    "tpde_delta_plan_free": (None, [_ptr]),
    "tpde_delta_plan_fork": (_ptr, [_ptr]),
    "tpde_delta_plan_add": (_int, [_ptr, _ptr, _error]),
    "tpde_delta_plan_survey": (_int, [_ptr, _ptr, _ptr, _u64, _error]),
    "tpde_delta_plan_classes": (_int, [_ptr, _u64, _error]),
    "tpde_delta_plan_count": (_int, [_ptr, _ptr, _ptr, _u64, _error]),
    "tpde_delta_plan_model": (_int, [_ptr, _u64, _u8p, _u32p, _error]),
    "tpde_delta_model_open": (_int, [_u8p, _u32, _int, ctypes.POINTER(_ptr), _error]),
    "tpde_delta_model_close": (None, [_ptr]),
    "tpde_delta_model_table": (
        _int,
        [_ptr, _int, ctypes.POINTER(_int), _u32p, *[ctypes.POINTER(_u32p)] * 2],
    ),
    "tpde_delta_chunks": (_u64, [_u64]),
    "tpde_delta_encode": (
        _int,
        [
            *(_ptr, _ptr, _ptr, _u64, _u8p, _u64, ctypes.POINTER(_u64), _ptr, _ptr),
            *(_u64, ctypes.POINTER(_u64), _int, _error),
        ],
    ),
    "tpde_delta_list": (
        _int,
        [_ptr, _u8p, _u64, _ptr, _ptr, _ptr, _u64, _ptr, _ptr, ctypes.POINTER(_u64), _int, _error],
    ),
    "tpde_delta_apply": (_int, [_ptr, _u8p, _u64, _ptr, _ptr, _ptr, _u64, _int, _int, _error]),
    "tpde_window_sections": (_int, [_u64, _u64, _u64, _window]),
    "tpde_window_plan": (_int, [_ptr, _u64, _u64, _u8p, _ptr, _int, _error]),
    "tpde_window_choose": (_int, [_u64, _u64, _ptr, _window, _ptr, _error]),
    "tpde_window_encode": (_int, [_ptr, _u8p, _ptr, _u8p, _u64, _int, _error]),
    "tpde_window_open": (_int, [_u8p, _u64, _window, _error]),
    "tpde_window_check": (_int, [_u8p, _u64, _window, _int, _error]),
    "tpde_window_decode": (_int, [_u8p, _u64, _u64, _u64, _ptr, _u64, _int, _error]),
    "tpde_window_cut_plan": (
        _int,
        [_u8p, _u64, _u64, _u64, _u64, _u64, _u8p, _ptr, _int, _error],
    ),
    "tpde_window_cut": (_int, [_u8p, _u64, _u64, _u64, _u8p, _ptr, _u8p, _u64, _int, _error]),
}


def library_path() -> Path:
    """Where the core lies: beside the package, under the platform's name for a shared library."""
    name = "libtpde.dylib" if sys.platform == "darwin" else "libtpde.so"
    return Path(__file__).resolve().parent.parent / name


@functools.cache
def core() -> ctypes.CDLL:
    """The library, loaded when it is first asked for."""
    path = library_path()
    try:
        core = ctypes.CDLL(os.fspath(path))
    except OSError as error:
        raise NativeError(
            f"the native core `{path.name}` could not be loaded from `{path.parent}`: {error}",
            hint="install tpde from a wheel, or from source with a C compiler",
        ) from error
    if core.tpde_abi() != ABI:  # before names are looked up that another version may not have
        raise NativeError(
            f"the native core at `{path}` has ABI {core.tpde_abi()}, this package needs {ABI}",
            hint="reinstall tpde",
            found=core.tpde_abi(),
            needed=ABI,
        )
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(core, name)
        function.restype, function.argtypes = result, arguments
    return core


def address(buffer: Bytes | npt.NDArray[np.uint32]) -> int:
    """Where a contiguous buffer lies."""
    flags = buffer.flags
    if not flags.c_contiguous:
        raise ValueError("the core takes contiguous buffers only")
    if flags.writeable and buffer.size:  # half the time
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer.data))
    return int(buffer.ctypes.data)


def check(code: int, error: Error) -> None:
    """Raise what a failed call means."""
    if not code:
        return
    what = error.what.decode()
    if error.plane >= 0:
        what += f" (plane {error.plane})"
    what += f": found {error.found}, needed {error.needed}"
    if code in (_E_INDEX, _E_CHUNK, _E_CHECKSUM, _E_WINDOW):
        chunk = None if error.chunk == NO_CHUNK else int(error.chunk)
        raise Corrupt(what, chunk=chunk, found=error.found, needed=error.needed)
    if code == _E_TABLE:
        where = "" if error.chunk == NO_CHUNK else f"table {error.chunk}: "
        raise Corrupt(where + what, found=error.found, needed=error.needed)
    if code == _E_MODEL:
        raise Corrupt(f"a model of changes: {what}", found=error.found, needed=error.needed)
    if code == _E_TRUNCATED:
        raise Truncated(what, found=error.found, needed=error.needed)
    if code == _E_VERSION:
        raise UnsupportedVersion(what, found=error.found, needed=error.needed)
    if code == _E_MEMORY:
        raise MemoryError(f"the native core ran out of memory: {what}")
    raise NativeError(f"the native core refused a call: {what}")


def as_bytes(buffer: Buffer) -> Bytes:
    """View a contiguous buffer as bytes, without a copy.

    Parameters
    ----------
    buffer : bytes-like or ndarray
        Any contiguous buffer.

    Returns
    -------
    ndarray of uint8, one-dimensional
    """
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise ValueError("the core takes contiguous buffers only")
        if buffer.ndim == 1 and buffer.dtype == np.uint8:
            return cast(Bytes, buffer)
        return buffer.reshape(-1).view(np.uint8)
    return np.frombuffer(buffer, dtype=np.uint8)


def simd() -> str:
    """Name of the instruction-set path in use."""
    return str(core().tpde_simd().decode())


def simd_available() -> list[str]:
    """Names of the paths that this build has and this machine can run, best first."""
    return str(core().tpde_simd_available().decode()).split()


def simd_select(name: str) -> None:
    """Select a path, for tests and measurements.

    Raises
    ------
    ValueError
        If this machine or this build lacks it.
    """
    if core().tpde_simd_select(name.encode()):
        raise ValueError(f"no path `{name}` here; available: {', '.join(simd_available())}")


def populate(address: int, size: int) -> int:
    """Bring mapped pages into memory and into the process's page tables.

    Not for the pages' bytes to be read here: a file that becomes shorter takes them away again.

    Parameters
    ----------
    address, size : int
        Of the pages.

    Returns
    -------
    int
        0, or an `errno`: `EFAULT` where a file has become shorter, or cannot be read.
    """
    return int(core().tpde_populate(address, size))
