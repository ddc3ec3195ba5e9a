"""Weights that are larger than any buffer: decoded and used a few rows at a time.

Only weights that cannot fit whole are: matrix libraries choose other kernels for other shapes, and the last
bits of results change.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import NamedTuple

from torch import Tensor

from tpde.errors import OutOfMemory
from tpde.format.blob_header import align
from tpde.weights.packed_tensor import PackedTensor
from tpde.weights.source import Decoder

START = 512  # rows start at multiples of it in a buffer, as whole weights do


class Tile(NamedTuple):
    """Rows `begin` to `end - 1` of a matrix."""

    begin: int
    end: int


def _spare(word_bytes: int, chunk_words: int) -> int:
    """Room beside a tile's rows for the rest of the chunks in which it starts and ends."""
    chunk = chunk_words * word_bytes
    return align(chunk, START) + chunk


def least_tile_bytes(columns: int, word_bytes: int, chunk_words: int) -> int:
    """The least `tile_bytes` that `row_tiles` takes: room for a row wherever its chunks start."""
    row, chunk = columns * word_bytes, chunk_words * word_bytes
    step = chunk_words // gcd(columns, chunk_words)
    return min(step * row, row + _spare(word_bytes, chunk_words)) if chunk else row


def whole_tile_bytes(nbytes: int, word_bytes: int, chunk_words: int) -> int:
    """A `tile_bytes` with which a matrix of so many bytes is one tile."""
    return align(nbytes, START) + _spare(word_bytes, chunk_words)


def row_tiles(
    rows: int, columns: int, word_bytes: int, chunk_words: int, tile_bytes: int, *, even: bool = True
) -> list[Tile]:
    """Cut a matrix into tiles of about equal numbers of rows, as few as the room allows.

    Tiles start and end where chunks do, if so many rows fit: then no chunk is decoded twice. Otherwise the
    chunks in which a tile starts and ends are decoded with it.

    Parameters
    ----------
    rows, columns : int
        Of the matrix.
    word_bytes, chunk_words : int
        Bytes of a word, and words of a chunk.
    tile_bytes : int
        Room for the chunks that hold a tile's rows, the first row at a multiple of 512 bytes.
    even : bool
        The matrix is one tensor, whose chunks are all of that size. If it is made up of several, chunks start
        anywhere.

    Returns
    -------
    list of Tile
        One after the other, from row 0 to the last one.

    Raises
    ------
    OutOfMemory
        If there is not room for a single row.

    Examples
    --------
    >>> row_tiles(10, 4096, 2, 8192, 64 << 10)
    [Tile(begin=0, end=6), Tile(begin=6, end=10)]
    """
    row = columns * word_bytes
    if not rows or not row:
        return [Tile(0, rows)]
    step = chunk_words // gcd(columns, chunk_words)
    most = tile_bytes // (step * row) * step if even else 0
    if not most:
        step, most = 1, (tile_bytes - _spare(word_bytes, chunk_words)) // row
    if most < 1:
        raise OutOfMemory(
            f"a row of {columns} columns is decoded to a buffer of {row + _spare(word_bytes, chunk_words)} "
            f"bytes at least, there are {tile_bytes}",
            hint="allow more memory",
        )
    count = -(-rows // most)
    each = align(-(-rows // count), step)
    return [Tile(begin, min(begin + each, rows)) for begin in range(0, rows, each)]


class _Prepared(NamedTuple):
    """A tile, where its first row goes in the buffer, and what decodes its chunks."""

    tile: Tile
    start: int
    decoders: list[Decoder]


class RowTiles:
    """Decodes a matrix tile by tile into one buffer.

    Parameters
    ----------
    packed : PackedTensor
        The matrix. Its `tile_bytes` are those of the buffer.

    Raises
    ------
    OutOfMemory
        If the buffer has not room for a single row.
    """

    def __init__(self, packed: PackedTensor) -> None:
        rows, self._columns = packed.shape
        self._dtype, room = packed.dtype, packed.tile_bytes
        row, headers = self._columns * self._dtype.itemsize, [source.header for source in packed.sources]
        header, chunk_words = headers[0], max(header.chunk_words for header in headers)
        self._prepared = []
        even = len(headers) == 1 and header.segment_words >= header.words
        for tile in row_tiles(rows, self._columns, header.word_bytes, chunk_words, room, even=even):
            span = packed.span(tile.begin * row, tile.end * row)
            start = align(span.begin - span.chunks()[0].offset, START)
            self._prepared.append(_Prepared(tile, start, span.decoders(start)))

    def __call__(self, buffer: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Tiles in their order: first row, row after the last, and the rows; each overwrites the last."""
        for (begin, end), start, decoders in self._prepared:
            for decode in decoders:
                decode(buffer)
            size = (end - begin) * self._columns * self._dtype.itemsize
            yield begin, end, buffer[start : start + size].view(self._dtype).view(end - begin, self._columns)
