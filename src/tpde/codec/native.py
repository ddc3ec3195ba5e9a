"""The C core through ctypes: csrc/tpde.h, function for function.

ctypes releases the GIL for the length of a call. Buffers are anything with the buffer protocol; sizes
are checked here before a pointer crosses over.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tpde.errors import Corrupt, NativeError, Truncated, UnsupportedVersion
from tpde.format.constants import RECORD_BYTES

ABI = 6
MAX_TABLE_SECTION = 20480
NO_CHUNK = (1 << 64) - 1

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


_u8p, _u32p = ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint32)
_u64, _u32, _int, _ptr = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int, ctypes.c_void_p
_layout, _error = ctypes.POINTER(CoreLayout), ctypes.POINTER(Error)
_window = ctypes.POINTER(CoreWindow)

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
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
            *[_ptr, _ptr, _ptr, _u64, _u8p, _u64, ctypes.POINTER(_u64), _ptr, _ptr],
            *[_u64, ctypes.POINTER(_u64), _int, _error],
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


def address(buffer: Bytes) -> int:
    """Where a contiguous buffer lies."""
    if not buffer.flags.c_contiguous:
        raise ValueError("the core takes contiguous buffers only")
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


def as_bytes(buffer: Any) -> Bytes:
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


def chunk_count(layout: CoreLayout) -> int:
    """Number of chunks of a layout (format.md 4.1)."""
    return int(core().tpde_chunk_count(layout))


def checksum(words: Any) -> int:
    """Checksum of a chunk's decoded bytes (format.md 4.5)."""
    data = as_bytes(words)
    return int(core().tpde_checksum(address(data), data.size))


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


def split(layout: CoreLayout, words: Any) -> Bytes:
    """Split words into byte planes (format.md 2.3).

    Returns
    -------
    ndarray of uint8, shape (word_bytes, n)
    """
    data = as_bytes(words)
    n = data.size // layout.word_bytes
    planes = np.empty((layout.word_bytes, n), np.uint8)
    core().tpde_split(layout, address(data), n, address(planes), n)
    return planes


def merge(layout: CoreLayout, planes: Bytes, out: Bytes) -> None:
    """Put planes of shape (word_bytes, n) together again, into the n words of `out`."""
    n = planes.shape[1]
    if planes.shape[0] != layout.word_bytes or out.size != n * layout.word_bytes:
        raise ValueError("planes and words differ in size")
    core().tpde_merge(layout, address(planes), n, n, address(out))


def plan(layout: CoreLayout, sample: Any, max_variants: int = 4) -> tuple[bytes, int]:
    """Choose planes and tables for a tensor from a sample of its chunks.

    Parameters
    ----------
    layout : CoreLayout
        Receives the tables' numbers.
    sample : bytes-like
        Whole chunks, the last possibly shorter.
    max_variants : int
        The most tables that one plane may have, 1 to 4.

    Returns
    -------
    section : bytes
        The table section (format.md 3).
    estimate : int
        Expected bytes of the tensor's tables, index and chunks.
    """
    data = as_bytes(sample)
    section = np.empty(MAX_TABLE_SECTION, np.uint8)
    size, estimate, error = _u32(), _u64(), Error()
    code = core().tpde_plan(
        layout,
        address(data),
        data.size // layout.word_bytes,
        max_variants,
        address(section),
        ctypes.byref(size),
        ctypes.byref(estimate),
        ctypes.byref(error),
    )
    check(code, error)
    return section[: size.value].tobytes(), int(estimate.value)


def index_check(
    layout: CoreLayout, index: Any, first_offset: int, blob_bytes: int, max_chunk_bytes: int
) -> None:
    """Check an index map of all chunks of a layout (format.md 4.3).

    Raises
    ------
    Corrupt
        Naming the first chunk whose record cannot be.
    """
    data = as_bytes(index)
    if data.size != RECORD_BYTES * chunk_count(layout):
        raise ValueError("the index map's size does not fit the layout")
    error = Error()
    code = core().tpde_index_check(
        layout, address(data), first_offset, blob_bytes, max_chunk_bytes, ctypes.byref(error)
    )
    check(code, error)


class Encoded(NamedTuple):
    """What `Codec.encode` made: chunks, their records, and the largest sizes among them."""

    data: Bytes
    records: Bytes
    max_chunk: int
    max_stream: int


class Table(NamedTuple):
    """A table as expanded for decoding: see `tpde_codec_table` in tpde.h."""

    kind: int
    raw_bits: int
    entries: npt.NDArray[np.uint32]


class Codec:
    """A layout with its tables expanded; decodes, and encodes if opened for it.

    Parameters
    ----------
    layout : CoreLayout
        Copied by the core.
    section : bytes-like
        The table section (format.md 3).
    encode : bool
        Expand the tables for encoding too: up to 512 KiB more for each.

    Raises
    ------
    Corrupt
        If a table is damaged.
    """

    def __init__(self, layout: CoreLayout, section: Any, *, encode: bool = False) -> None:
        self._handle = _ptr()
        data, error = as_bytes(section), Error()
        code = core().tpde_codec_open(
            layout,
            address(data) if data.size else None,
            data.size,
            int(encode),
            ctypes.byref(self._handle),
            ctypes.byref(error),
        )
        check(code, error)
        self.layout = layout

    def close(self) -> None:
        """Free the tables. The codec cannot be used afterwards."""
        if self._handle:
            core().tpde_codec_close(self._handle)
            self._handle = _ptr()

    def __del__(self) -> None:
        # `sys` is None once the interpreter has cleared this module.
        if getattr(self, "_handle", None) and sys is not None and not sys.is_finalizing():
            self.close()

    def decode(
        self,
        index: Bytes,
        first: int,
        data: Bytes,
        data_offset: int,
        end_offset: int,
        out: Bytes,
        threads: int = 1,
    ) -> None:
        """Decode as many chunks as `index` has records, from chunk `first` on, into `out`.

        Parameters
        ----------
        index : ndarray of uint8
            The records of these chunks.
        first : int
            Number of the first chunk.
        data : ndarray of uint8
            The blob's bytes from `data_offset` on, at least those of these chunks.
        data_offset, end_offset : int
            Where `data` starts in the blob, and where the last of these chunks ends.
        out : ndarray of uint8
            Exactly the chunks' words.
        threads : int
            How many threads to use.

        Raises
        ------
        Corrupt
            Naming the chunk that is damaged.
        """
        if not out.flags.writeable:
            raise ValueError("the output is read-only")
        error = Error()
        code = core().tpde_decode(
            self._handle,
            address(index),
            first,
            index.size // RECORD_BYTES,
            address(data),
            data_offset,
            data.size,
            end_offset,
            address(out),
            out.size,
            threads,
            ctypes.byref(error),
        )
        check(code, error)

    def tables(self) -> list[Table]:
        """Copies of the expanded tables, for decoders elsewhere."""
        tables = []
        for number in range(self.layout.tables):
            kind, raw_bits, index_bits, entries = _int(), _int(), _int(), _u32p()
            places = (ctypes.byref(it) for it in (kind, raw_bits, index_bits, entries))
            if core().tpde_codec_table(self._handle, number, *places):
                raise NativeError(f"the native core refused table {number} of {self.layout.tables}")
            copy = np.ctypeslib.as_array(entries, (1 << index_bits.value,)).copy()
            tables.append(Table(kind.value, raw_bits.value, copy))
        return tables

    def bound(self, words: int, chunks: int) -> int:
        """Most bytes that encoding these many words in these many chunks can take."""
        return int(core().tpde_encode_bound(self.layout, words, chunks))

    def encode(
        self, words: Bytes, first: int, count: int, offset: int, out: Bytes, threads: int = 1
    ) -> Encoded:
        """Encode chunks `first` to `first + count - 1`.

        Parameters
        ----------
        words : ndarray of uint8
            Exactly these chunks' words.
        first, count : int
            Which chunks they are.
        offset : int
            Where the first of them goes in the blob; a multiple of the unit.
        out : ndarray of uint8
            At least `bound` bytes; the data returned is a view of it.
        threads : int
            How many threads to use; the bytes do not depend on it.
        """
        index = np.empty(RECORD_BYTES * count, np.uint8)
        used, max_chunk, max_stream, error = _u64(), _u32(), _u32(), Error()
        code = core().tpde_encode(
            self._handle,
            address(words),
            first,
            count,
            offset,
            address(out),
            out.size,
            ctypes.byref(used),
            address(index),
            ctypes.byref(max_chunk),
            ctypes.byref(max_stream),
            threads,
            ctypes.byref(error),
        )
        check(code, error)
        return Encoded(out[: used.value], index, max_chunk.value, max_stream.value)
