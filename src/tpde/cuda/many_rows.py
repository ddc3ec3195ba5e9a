"""Products from windows with more rows of x than `product_ways` has ways for, where they beat decoding."""

from __future__ import annotations

from typing import Literal

from tpde.codec.windows import Window
from tpde.cuda.capability import DeviceFacts
from tpde.cuda.product_ways import MOST_ROWS, WARPS, Product, matrix_defines, most_rows_of

SOURCE = "window_many.cu"
MOST = 6 * 256  # rows of x; 2,048 take an H100 as long as decoding for them
_TILE, _STAGES, _OTHER_WARPS = 256, 4, 4  # rows of x, pieces of x there, warps that do not multiply
_WARP_BYTES = 4096 + 5632 + 2048  # planes of escapes, a chunk, ended sums
_FLAG_BYTES, _MOST_BLOCKS, _SUM_BYTES = 8192, 256, WARPS * _TILE * 64
_MOST_ROOM = 80 << 20  # bytes for x once more: as much as decoding takes, at most
# Microseconds of a whole H100: of any launch; of up to 128 rows in one of `product_ways`, a word; of a tile
# of `many_product`, a column; of decoding, a word; of the matrix library's product, a word, at least, and
# for a row of x. Of 100 that were timed, with 4 to 262 million words and 136 to 2,048 rows of x, 85 are met
# within a tenth, all within a fifth, and no choice was 4 % slower than another. Since tiles are
# cut, six were timed, of up to 1,024 rows, and met within a tenth.
_LAUNCH, _SOME, _COLUMN, _DECODING = 4.0, {32: 0.52e-6, 64: 0.57e-6, 128: 0.71e-6}, 0.0128, 1.26e-6
_LIBRARY, _LIBRARY_ROW = 0.72e-6, 2.6e-9
_ARRANGING = 0.8e-6  # of `arrange`, a word of x
# From what part of a round on tiles stay whole; how much longer others take, and their sums, microseconds.
_LEAST_WHOLE, _CUT, _SUMS = 0.75, 0.1, 5.0

How = Literal["parts", "many"]


def how_many(have: DeviceFacts, window: Window, count: int) -> How | None:
    """How more rows of x than `most_rows_of` says are multiplied.

    Parameters
    ----------
    have : DeviceFacts
        Of the device.
    window : Window
        The matrix.
    count : int
        Rows of x, more than `MOST_ROWS`.

    Returns
    -------
    {"parts", "many"} or None
        By two launches for up to `MOST_ROWS` each, by one of `many_way`; None if the matrix is to be decoded.
    """
    if most_rows_of(have, window) < MOST_ROWS or count > MOST:
        return None
    words = window.rows * window.columns
    library = _LAUNCH + words * max(_LIBRARY, count * _LIBRARY_ROW)
    took: dict[How | None, float] = {None: 1 + words * _DECODING + library}
    if count <= 2 * MOST_ROWS:
        took["parts"] = _some(words, MOST_ROWS) + _some(words, count - MOST_ROWS)
    if room_of(have, window, count) <= min(2 * words, _MOST_ROOM):
        columns = 256 * window.stripe_chunks
        took["many"] = (
            _LAUNCH + columns * count * _ARRANGING + _rounds(have, window, count, columns * _COLUMN)
        )
    return min(took, key=took.__getitem__)


def _rounds(have: DeviceFacts, window: Window, count: int, tile: float) -> float:
    """What all tiles take, if one takes so long: the last ones may be cut (`work_of` of the kernel)."""
    blocks = blocks_of(have, window, count)
    rounds, left = divmod(_tiles(window, count), blocks)
    over = left / blocks
    if over >= _LEAST_WHOLE:
        return (rounds + 1) * tile
    return (rounds + (1 + _CUT) * over) * tile + (_SUMS if over else 0)


def _some(words: int, count: int) -> float:
    """What a launch for some rows of x takes; its sums pass between blocks."""
    return 1.5 * _LAUNCH + words * next(each for rows, each in _SOME.items() if count <= rows)


def many_way(have: DeviceFacts, window: Window, count: int) -> Product:
    """How `many_product` is launched."""
    shared = _STAGES * _TILE * 128 + WARPS * _WARP_BYTES + 8 * 2 * _STAGES
    defines = matrix_defines(window) | {"NB": _TILE}
    room, warps = room_of(have, window, count), WARPS + _OTHER_WARPS
    return Product(count, SOURCE, "many_product", defines, shared, warps, room=room)


def room_of(have: DeviceFacts, window: Window, count: int) -> int:
    """Bytes that x takes as it is arranged, with flags after it, and sums of tiles that two blocks share."""
    blocks = blocks_of(have, window, count)
    cut = 0 < _tiles(window, count) % blocks < _LEAST_WHOLE * blocks
    return window.stripe_chunks * 512 * _TILE * -(-count // _TILE) + _FLAG_BYTES + cut * blocks * _SUM_BYTES


def blocks_of(have: DeviceFacts, window: Window, count: int) -> int:
    """How many blocks of `many_product` there are: one for each multiprocessor, or for each tile."""
    return min(have.multiprocessors, _tiles(window, count), _MOST_BLOCKS)


def _tiles(window: Window, count: int) -> int:
    return -(-window.stripes // WARPS) * -(-count // _TILE)
