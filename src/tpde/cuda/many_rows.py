"""Products from windows with more rows of x than `product_ways` has ways for, where they beat decoding."""

from __future__ import annotations

from typing import NamedTuple

from tpde.codec.windows import Window
from tpde.cuda.capability import DeviceFacts
from tpde.cuda.product_ways import Product, matrix_defines, multiplies_in_groups

SOURCE = "window_many.cu"
MOST = 6 * 256  # rows of x; 2,048 take an H100 as long as decoding for them
_STAGES, _OTHER_WARPS = 4, 4  # pieces of x in shared memory, warps that do not multiply
_WARP_BYTES = 4096 + 5632 + 2048  # planes of escapes, a chunk, ended sums
_MOST_BLOCKS, _WORK_BYTES = 256, 40
_MOST_RUNS = 16  # of a tile's columns
_MOST_ROOM = 80 << 20  # bytes for x once more, and sums


class Tiles(NamedTuple):
    """What a block of `many_product` takes: `warps` stripes by `rows` rows of x; a column, microseconds."""

    rows: int
    warps: int
    column: float

    @property
    def flag_bytes(self) -> int:
        """Of flags of all blocks, or tiles, and warps."""
        return 4 * _MOST_BLOCKS * self.warps

    @property
    def sum_bytes(self) -> int:
        """Of a tile's sums."""
        return self.warps * self.rows * 64

    def number(self, window: Window, count: int) -> int:
        """How many there are."""
        return -(-window.stripes // self.warps) * -(-count // self.rows)


# Microseconds of a whole H100: of any launch; of tiles, a column (of 128 rows of an H200); of decoding, a
# word; of the matrix library's product, a word, at least, and for a row of x. Before tiles had runs, of 100
# that were timed 85 were met within a tenth, all within a fifth. Of 119 with 1 to 16 runs, 4 to 235 million
# words and 144 to 512 rows of x, 86 are met within a tenth, the others within 22 %, most of them small. Of 22
# choices of how many runs, 18 were the fastest, one was 3 % slower, and three keep to the room. Of 177 with
# 128 rows on an H200, 2 to 545 million words, 152 are met within a tenth, the others within 30 %, most of
# them small; of 32 choices of tiles and runs, all were the fastest.
_MANY = Tiles(256, 8, 0.0128)
_FEW = Tiles(128, 8, 0.0092), Tiles(128, 12, 0.0123)
FEW = 128  # rows of x, up to which tiles are some of these
_WHOLE = 132  # multiprocessors of it; a part of a GPU has as much less of all else
_LAUNCH, _DECODING = 4.0, 1.26e-6
_LIBRARY, _LIBRARY_ROW = 0.72e-6, 2.6e-9
_ARRANGING = 0.8e-6  # of `arrange`, a word of x
# From what part of a round on tiles stay whole; how much longer others take, and their sums, microseconds.
_LEAST_WHOLE, _CUT, _SUMS = 0.75, 0.1, 5.0
# Of blocks that have runs, to begin and to add up as many sums as `_MANY` has: if all have room at a time,
# and of each round else. How long a tile takes where hardly a multiprocessor is busy.
_RUNS, _RUNS_AGAIN, _IDLE = 8.0, 13.0, 0.8


class Shares(NamedTuple):
    """How work is shared out: how many blocks have runs of the columns of such a tile (windows.md 9.3)."""

    tiles: Tiles
    runs: int


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
    if not multiplies_in_groups(have, window) or count > MOST:
        return False
    if room_of(have, window, count) > _most_room(window):
        return False
    part, columns = _WHOLE / have.multiprocessors, 256 * window.stripe_chunks
    words = window.rows * window.columns * part
    library = _LAUNCH + words * max(_LIBRARY, count * _LIBRARY_ROW)
    rounds = _rounds(have, window, count, shares_of(have, window, count))
    return _LAUNCH + columns * count * part * _ARRANGING + rounds < 1 + words * _DECODING + library


def shares_of(have: DeviceFacts, window: Window, count: int) -> Shares:
    """Tiles and runs that are the fastest.

    Runs are more than one only where multiprocessors would have no tile.
    """
    kinds = _FEW if count <= FEW else (_MANY,)
    made = [Shares(tiles, runs) for tiles in kinds for runs in _runs_of(have, window, count, tiles)]
    return min(made, key=lambda it: _rounds(have, window, count, it))


def _runs_of(have: DeviceFacts, window: Window, count: int, tiles: Tiles) -> list[int]:
    """How many runs there may be."""
    if tiles.number(window, count) >= have.multiprocessors:
        return [1]
    most = min(_MOST_RUNS, window.stripe_chunks)
    fit = (
        it for it in range(2, most + 1) if _room(have, window, count, Shares(tiles, it)) <= _most_room(window)
    )
    return [1, *fit]


def _rounds(have: DeviceFacts, window: Window, count: int, shares: Shares) -> float:
    """What all tiles take; if each has one run, the last may be cut (`work_of` of the kernel)."""
    tiles, runs = shares
    there = runs * tiles.number(window, count)
    busy = min(1, there / have.multiprocessors)
    tile = -(-window.stripe_chunks // runs) * 256 * tiles.column * (_IDLE + (1 - _IDLE) * busy)
    if runs > 1:
        rounds = -(-there // have.multiprocessors)
        return rounds * (tile + (_RUNS if rounds == 1 else _RUNS_AGAIN) * tiles.sum_bytes / _MANY.sum_bytes)
    blocks = _blocks(have, window, count, shares)
    rounds, left = divmod(there, blocks)
    over = left / blocks
    if over >= _LEAST_WHOLE:
        return (rounds + 1) * tile
    return (rounds + (1 + _CUT) * over) * tile + (_SUMS if over else 0)


def many_way(have: DeviceFacts, window: Window, count: int) -> Product:
    """How `many_product` is launched."""
    tiles = shares_of(have, window, count).tiles
    shared = _STAGES * tiles.rows * 128 + tiles.warps * _WARP_BYTES + 8 * 2 * _STAGES + _WORK_BYTES
    defines = matrix_defines(window) | {"NB": tiles.rows, "WIDE": tiles.warps}
    room, warps = room_of(have, window, count), tiles.warps + _OTHER_WARPS
    return Product(count, SOURCE, "many_product", defines, shared, warps, room=room)


def room_of(have: DeviceFacts, window: Window, count: int) -> int:
    """Bytes that x takes as it is arranged, with flags after it, and sums of tiles that blocks share."""
    return _room(have, window, count, shares_of(have, window, count))


def _room(have: DeviceFacts, window: Window, count: int, shares: Shares) -> int:
    tiles, runs = shares
    blocks = _blocks(have, window, count, shares)
    share = runs > 1 or 0 < tiles.number(window, count) % blocks < _LEAST_WHOLE * blocks
    x = window.stripe_chunks * 512 * tiles.rows * -(-count // tiles.rows)
    return x + tiles.flag_bytes + share * blocks * tiles.sum_bytes


def _most_room(window: Window) -> int:
    """As much as decoding takes, at most."""
    return min(2 * window.rows * window.columns, _MOST_ROOM)


def blocks_of(have: DeviceFacts, window: Window, count: int) -> int:
    """How many blocks of `many_product` there are: one for each multiprocessor, or for each tile or run."""
    return _blocks(have, window, count, shares_of(have, window, count))


def _blocks(have: DeviceFacts, window: Window, count: int, shares: Shares) -> int:
    there = shares.tiles.number(window, count)
    return shares.runs * there if shares.runs > 1 else min(have.multiprocessors, there, _MOST_BLOCKS)
