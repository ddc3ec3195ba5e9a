"""Products from windows with more rows of x than `product_ways` has ways for, where they beat decoding."""

from __future__ import annotations

from tpde.codec.windows import Window
from tpde.cuda.capability import DeviceFacts
from tpde.cuda.product_ways import MOST_ROWS, WARPS, Product, matrix_defines, most_rows_of

SOURCE = "window_many.cu"
MOST = 6 * 256  # rows of x; 2,048 take an H100 as long as decoding for them
_TILE, _STAGES, _OTHER_WARPS = 256, 4, 4  # rows of x, pieces of x there, warps that do not multiply
_WARP_BYTES = 4096 + 5632 + 2048  # planes of escapes, a chunk, ended sums
_FLAG_BYTES, _MOST_BLOCKS, _SUM_BYTES, _WORK_BYTES = 8192, 256, WARPS * _TILE * 64, 40
_MOST_RUNS = 16  # of a tile's columns
_MOST_ROOM = 80 << 20  # bytes for x once more, and sums
# Microseconds of a whole H100: of any launch; of a tile of `many_product`, a column; of decoding, a word; of
# the matrix library's product, a word, at least, and for a row of x. Before tiles had runs, of 100 that were
# timed 85 were met within a tenth, all within a fifth. Of 119 with 1 to 16 runs, 4 to 235 million words and
# 144 to 512 rows of x, 86 are met within a tenth, the others within 22 %, most of them small. Of 22 choices
# of how many runs, 18 were the fastest, one was 3 % slower, and three keep to the room.
_LAUNCH, _COLUMN, _DECODING = 4.0, 0.0128, 1.26e-6
_LIBRARY, _LIBRARY_ROW = 0.72e-6, 2.6e-9
_ARRANGING = 0.8e-6  # of `arrange`, a word of x
# From what part of a round on tiles stay whole; how much longer others take, and their sums, microseconds.
_LEAST_WHOLE, _CUT, _SUMS = 0.75, 0.1, 5.0
# Of blocks that have runs, to begin and to add up sums: if all have room at a time, and of each round else.
# How long a tile takes where hardly a multiprocessor is busy.
_RUNS, _RUNS_AGAIN, _IDLE = 8.0, 13.0, 0.8


def beats_decoding(have: DeviceFacts, window: Window, count: int) -> bool:
    """Whether `many_way` is faster than decoding the matrix and multiplying.

    Parameters
    ----------
    have : DeviceFacts
        Of the device.
    window : Window
        The matrix.
    count : int
        Rows of x, more than `MOST_ROWS`.
    """
    if most_rows_of(have, window) < MOST_ROWS or count > MOST:
        return False
    if room_of(have, window, count) > _most_room(window):
        return False
    words, columns = window.rows * window.columns, 256 * window.stripe_chunks
    library = _LAUNCH + words * max(_LIBRARY, count * _LIBRARY_ROW)
    rounds = _rounds(have, window, count, runs_of(have, window, count))
    return _LAUNCH + columns * count * _ARRANGING + rounds < 1 + words * _DECODING + library


def runs_of(have: DeviceFacts, window: Window, count: int) -> int:
    """How many blocks of `many_product` have runs of a tile's columns (windows.md 9.3), as is fastest.

    They are more than one only where multiprocessors would have no tile.
    """
    if _tiles(window, count) >= have.multiprocessors:
        return 1
    most = min(_MOST_RUNS, window.stripe_chunks)
    fit = (it for it in range(2, most + 1) if _room(have, window, count, it) <= _most_room(window))
    return min((1, *fit), key=lambda runs: _rounds(have, window, count, runs))


def _rounds(have: DeviceFacts, window: Window, count: int, runs: int) -> float:
    """What all tiles take, in so many runs; if that is one, the last may be cut (`work_of` of the kernel)."""
    there = runs * _tiles(window, count)
    busy = min(1, there / have.multiprocessors)
    tile = -(-window.stripe_chunks // runs) * 256 * _COLUMN * (_IDLE + (1 - _IDLE) * busy)
    if runs > 1:
        rounds = -(-there // have.multiprocessors)
        return rounds * (tile + (_RUNS if rounds == 1 else _RUNS_AGAIN))
    blocks = _blocks(have, window, count, 1)
    rounds, left = divmod(there, blocks)
    over = left / blocks
    if over >= _LEAST_WHOLE:
        return (rounds + 1) * tile
    return (rounds + (1 + _CUT) * over) * tile + (_SUMS if over else 0)


def many_way(have: DeviceFacts, window: Window, count: int) -> Product:
    """How `many_product` is launched."""
    shared = _STAGES * _TILE * 128 + WARPS * _WARP_BYTES + 8 * 2 * _STAGES + _WORK_BYTES
    defines = matrix_defines(window) | {"NB": _TILE}
    room, warps = room_of(have, window, count), WARPS + _OTHER_WARPS
    return Product(count, SOURCE, "many_product", defines, shared, warps, room=room)


def room_of(have: DeviceFacts, window: Window, count: int) -> int:
    """Bytes that x takes as it is arranged, with flags after it, and sums of tiles that blocks share."""
    return _room(have, window, count, runs_of(have, window, count))


def _room(have: DeviceFacts, window: Window, count: int, runs: int) -> int:
    blocks = _blocks(have, window, count, runs)
    share = runs > 1 or 0 < _tiles(window, count) % blocks < _LEAST_WHOLE * blocks
    x = window.stripe_chunks * 512 * _TILE * -(-count // _TILE)
    return x + _FLAG_BYTES + share * blocks * _SUM_BYTES


def _most_room(window: Window) -> int:
    """As much as decoding takes, at most."""
    return min(2 * window.rows * window.columns, _MOST_ROOM)


def blocks_of(have: DeviceFacts, window: Window, count: int) -> int:
    """How many blocks of `many_product` there are: one for each multiprocessor, or for each tile or run."""
    return _blocks(have, window, count, runs_of(have, window, count))


def _blocks(have: DeviceFacts, window: Window, count: int, runs: int) -> int:
    tiles = _tiles(window, count)
    return runs * tiles if runs > 1 else min(have.multiprocessors, tiles, _MOST_BLOCKS)


def _tiles(window: Window, count: int) -> int:
    return -(-window.stripes // WARPS) * -(-count // _TILE)
