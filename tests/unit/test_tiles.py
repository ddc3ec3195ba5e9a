"""Row tiles, and the chunks that hold some bytes of a weight."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs torch")

import itertools

from tpde.errors import OutOfMemory
from tpde.format.blob_header import BlobHeader
from tpde.format.constants import CODEC_PREFIX
from tpde.format.container import TensorSpec
from tpde.nn.tiles import START, Tile, least_tile_bytes, row_tiles
from tpde.weights.span import covering

SHAPES = {
    "rows": st.integers(1, 5000),
    "columns": st.integers(1, 40_000),
    "word": st.sampled_from([1, 2, 4, 8]),
    "chunk": st.sampled_from([1024, 8192, 32768]),
    "room": st.integers(0, 1 << 20),
}


def place(tile: tuple[int, int], rows: int, row: int, chunk: int) -> tuple[int, int]:
    """Where a tile's first row goes, and where its last chunk ends, in the buffer."""
    begin, end = tile[0] * row, tile[1] * row
    start = -(-(begin % chunk) // START) * START
    return start, start + min(-(-end // chunk) * chunk, rows * row) - begin


@given(even=st.booleans(), **SHAPES)
def test_tiles_cover_the_matrix_and_fit(
    rows: int, columns: int, word: int, chunk: int, room: int, even: bool
) -> None:
    room += least_tile_bytes(columns, word, chunk) if even else columns * word + 3 * chunk * word
    tiles = row_tiles(rows, columns, word, chunk, room, even=even)
    assert [tile.begin for tile in tiles] == [0, *(tile.end for tile in tiles[:-1])]
    assert tiles[-1].end == rows
    assert all(tile.begin < tile.end for tile in tiles)
    sizes = [tile.end - tile.begin for tile in tiles]
    assert len(set(sizes[:-1])) <= 1
    assert sizes[-1] <= sizes[0]
    for tile in tiles:
        start, stop = place(tile, rows, columns * word, chunk * word)
        assert stop <= room
        assert start % START == 0


@given(**SHAPES)
def test_no_chunk_is_decoded_twice_where_there_is_room(
    rows: int, columns: int, word: int, chunk: int, room: int
) -> None:
    whole = chunk * columns  # words of so many rows that chunks and rows end together
    tiles = row_tiles(rows, columns, word, chunk, whole * word + room)
    assert all(tile.begin * columns % chunk == 0 for tile in tiles)


@given(**SHAPES)
def test_too_little_room(rows: int, columns: int, word: int, chunk: int, room: int) -> None:
    least = least_tile_bytes(columns, word, chunk)
    row_tiles(rows, columns, word, chunk, least)
    with pytest.raises(OutOfMemory, match="a row of"):
        row_tiles(rows, columns, word, chunk, room % least)


@pytest.mark.parametrize("shape", [(0, 64), (7, 0), (0, 0)])
def test_a_matrix_of_nothing_is_one_tile(shape: tuple[int, int]) -> None:
    assert row_tiles(*shape, 2, 8192, 0) == [Tile(0, shape[0])]


def test_known_tiles() -> None:
    assert row_tiles(10, 4096, 2, 8192, 64 << 10) == [(0, 6), (6, 10)]  # even ones of 8 at most
    assert row_tiles(7, 8192, 2, 8192, 1 << 20) == [(0, 7)]
    assert row_tiles(4, 100_003, 2, 8192, 300_000) == [(0, 1), (1, 2), (2, 3), (3, 4)]  # 8192 rows of chunks


@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20_000)), min_size=1, max_size=4),
    segments=st.booleans(),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_covering_chunks(shapes: list[tuple[int, int]], segments: bool, ends: tuple[float, float]) -> None:
    """Nothing is left out or there twice, and no chunk is there that is not needed."""
    parts, at = [], 0
    for count, words in shapes:
        spec = TensorSpec("BF16", (count, words))
        header = BlobHeader(spec, CODEC_PREFIX, words if segments else count * words, 8192)
        parts.append((SimpleNamespace(header=header, nbytes=spec.nbytes), at))
        at += spec.nbytes
    begin, end = sorted(int(share * at) // 2 * 2 for share in ends)
    found = covering(parts, begin, end)
    if begin == end:
        assert not found
        return
    for it, outer in ((found[0], begin), (found[-1], end - 2)):
        assert it.offset <= outer < it.stop
    first, last = found[0], found[-1]
    size = first.source.header.chunk_range(first.first, first.first)
    assert begin < first.offset + 2 * (size[1] - size[0])
    size = last.source.header.chunk_range(last.last, last.last)
    assert end > last.stop - 2 * (size[1] - size[0])
    assert all(one.stop == other.offset for one, other in itertools.pairwise(found))
    for it in found:
        low, high = it.source.header.chunk_range(it.first, it.last)
        assert it.stop - it.offset == 2 * (high - low)
