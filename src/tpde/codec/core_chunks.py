"""Chunks as every codec has them, by the C core: planes, checksums, index maps (format.md 2.3, 4)."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np

from tpde.codec.native import Bytes, CoreLayout, Error, address, as_bytes, check, core
from tpde.format.constants import RECORD_BYTES
from tpde.io.buffers import Buffer


class EncodedChunks(NamedTuple):
    """What encoding made: chunks, their records, and the largest sizes among them."""

    data: Bytes
    records: Bytes
    max_chunk: int
    max_stream: int


def chunk_count(layout: CoreLayout) -> int:
    """Number of chunks of a layout (format.md 4.1)."""
    return int(core().tpde_chunk_count(layout))


def checksum(words: Buffer) -> int:
    """Checksum of a chunk's decoded bytes (format.md 4.5)."""
    data = as_bytes(words)
    return int(core().tpde_checksum(address(data), data.size))


def split(layout: CoreLayout, words: Buffer) -> Bytes:
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


def index_check(
    layout: CoreLayout, index: Buffer, first_offset: int, blob_bytes: int, max_chunk_bytes: int
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
