"""Prefix codes (format.md 3 to 5), by the C core: choosing tables, expanding them, coding chunks by them."""

from __future__ import annotations

import ctypes
import sys
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tpde.codec.core_chunks import EncodedChunks
from tpde.codec.native import Bytes, CoreLayout, Error, address, as_bytes, check, core
from tpde.errors import NativeError
from tpde.format.constants import RECORD_BYTES
from tpde.io.buffers import Buffer

MAX_TABLE_SECTION = 20480


def plan(layout: CoreLayout, sample: Buffer, max_variants: int = 4) -> tuple[bytes, int]:
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
    size, estimate, error = ctypes.c_uint32(), ctypes.c_uint64(), Error()
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


class PrefixTable(NamedTuple):
    """A table as expanded for decoding: see `tpde_codec_table` in tpde.h."""

    kind: int
    raw_bits: int
    entries: npt.NDArray[np.uint32]


class PrefixCodec:
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

    def __init__(self, layout: CoreLayout, section: Buffer, *, encode: bool = False) -> None:
        self._handle = ctypes.c_void_p()
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
            self._handle = ctypes.c_void_p()

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

    def tables(self) -> list[PrefixTable]:
        """Copies of the expanded tables, for decoders elsewhere."""
        tables = []
        for number in range(self.layout.tables):
            kind, raw_bits, index_bits = (ctypes.c_int() for _ in range(3))
            entries = ctypes.POINTER(ctypes.c_uint32)()
            places = (ctypes.byref(it) for it in (kind, raw_bits, index_bits, entries))
            if core().tpde_codec_table(self._handle, number, *places):
                raise NativeError(f"the native core refused table {number} of {self.layout.tables}")
            copy = np.ctypeslib.as_array(entries, (1 << index_bits.value,)).copy()
            tables.append(PrefixTable(kind.value, raw_bits.value, copy))
        return tables

    def bound(self, words: int, chunks: int) -> int:
        """Most bytes that encoding these many words in these many chunks can take."""
        return int(core().tpde_encode_bound(self.layout, words, chunks))

    def encode(
        self, words: Bytes, first: int, count: int, offset: int, out: Bytes, threads: int = 1
    ) -> EncodedChunks:
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
        used, max_chunk, max_stream, error = ctypes.c_uint64(), ctypes.c_uint32(), ctypes.c_uint32(), Error()
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
        return EncodedChunks(out[: used.value], index, max_chunk.value, max_stream.value)
