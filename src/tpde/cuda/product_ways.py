"""How products from windows may be launched, the fastest way first by what an H200 or an H100 took."""

from __future__ import annotations

from typing import NamedTuple

from tpde.codec.windows import FLAG_ZERO, Window
from tpde.cuda.capability import DeviceFacts
from tpde.cuda.tuning import TunedKernels

SOURCE, GROUP_SOURCE, WIDE_SOURCE = "window.cu", "window_group.cu", "window_wide.cu"
MOST_ROWS = 64  # of x in one call, with the same bits in any: for more, see `many_rows`
# What tables of the fastest ways are of.
KERNELS = TunedKernels((SOURCE, GROUP_SOURCE, WIDE_SOURCE), MOST_ROWS)
_FEW_ROWS = 16  # of x in one launch of `product`
WARPS = 8  # of a block
PARTS = 8  # sums of a row, windows.md 9.2
CHUNK_BYTES = 5632
WARP_BYTES = 4096 + CHUNK_BYTES  # of shared memory: a plane of escapes, and a chunk
_TURNS = 2  # of partial sums, which are written while those before are read
# Rows of x of more bytes are first not copied to shared memory, but read from the cache: measured on an H200,
# where one row of 4,096 columns gained 0.3 to 7 % by the copy, and one of 14,336 lost 3 %.
_SHARED_X = 16 << 10
# Of `group_product`: warps that multiply, by how many rows x has, the fastest first on an H200; for x that
# does not stay in shared memory, how many stripes a warp takes beside each other, how many chunks of x are
# there at a time, and how many turns' partial sums; and the compute capability that it is made for.
_GROUPS = {16: (12, 8), 32: (12, 8), 64: (8,)}
# But with one chunk a part, and fewer stripes than that, 32 rows take eight warps first. By 12 and by 8 warps
# 2048 x 2048 words took an H200 5.7 and 5.5 us (by hand), 3072 x 2048 7.0 and 6.7, 5120 x 2048 8.65 and 8.71;
# with more chunks 2048 x 8192 11.5 and 14.1, 4096 x 4096 11.1 and 11.8.
_FEW_STRIPES = 256
_STREAMS = {16: ((1, 4, 2),), 32: ((1, 4, 2),), 64: ((2, 2, 2),)}
_WGMMA = (9, 0)
_WIDTHS = (16, 32, 64)  # rows of x that clusters multiply at a time
_OTHER_WARPS = 4  # of a block of `group_product`, beside those that multiply
# Of `wide_product`: rows of x, pieces of them in shared memory, for how many turns' sums there is room, and
# warps of a block that multiply; blocks of a cluster. Where four blocks have two parts each, half as many
# sums pass between them. On an H200, by eight and by four blocks, before lanes copied words, us: 64 rows
# with 28672 x 4096 words 66.0 and 59.0 (`group_product`: 61.8), with 6144 x 4096 18.5 and 21.0 (19.0), with
# 4096 x 14336 35.3 and 36.7 (47.4).
_WIDE_ROWS, _PIECES, _ROOMS, _WIDE_WARPS = 64, 4, 2, 12
_CLUSTERS = 8, 4
_LARGE, _FEW_CHUNKS = 384, 3  # stripes, more than that; chunks of a part, at most
TOGETHER = 4  # stripes that a group of warps takes at a time
_PLANE = 2048  # bytes of a warp's escapes of half a chunk
# `product` is first where its blocks are busy in a share of their turns: for so many rows of x, at most, and
# with one chunk a part as for one row. That takes an H100 73.1 us with 5120 x 25600 words, where the share is
# 0.61, by groups 63.4; with 6144 x 4096 (0.73) 14.0 and 14.7. Two rows take 15.1 and 14.7 us there, with
# 10240 x 5120 (0.81) 27.7 and 29.1; eight rows with 28672 x 4096 (0.97) 58.5 and 58.3; on an H200 47.1, and
# 16 rows by groups 43.6.
_BUSY = {1: 0.7, 4: 0.8, 8: 0.98}
_OF_MATRIX = ("ZERO", "TAIL")  # macros


class Product(NamedTuple):
    """How a product is launched.

    Attributes
    ----------
    rows : int
        Of x, at most.
    source, name : str
        Of the kernel.
    defines : dict of str to int
        Macros.
    shared : int
        Bytes of shared memory.
    warps : int
        Of a block.
    cluster : int
        Blocks of a cluster.
    blocks : int
        Of a multiprocessor.
    room : int
        Bytes on the device where another kernel, `arrange`, first writes x as this one takes it; 0 where it
        takes x as it is.
    """

    rows: int
    source: str
    name: str
    defines: dict[str, int]
    shared: int
    warps: int = WARPS
    cluster: int = 1
    blocks: int = 1
    room: int = 0

    @property
    def grouped(self) -> bool:
        """Whether clusters of blocks share the columns."""
        return self.cluster > 1

    @property
    def own(self) -> bool:
        """Whether it takes instructions of Hopper GPUs alone: of clusters, and of x that was arranged."""
        return self.grouped or self.room > 0

    @property
    def width(self) -> int:
        """Rows of x that a warp multiplies at a time, be they there or not."""
        return self.defines["NB"]

    @property
    def label(self) -> str:
        """What tables name it by: the kernel and its macros, but those that are the matrix's."""
        own = [f"{key}={value}" for key, value in self.defines.items() if key not in _OF_MATRIX]
        return " ".join([self.name, *own])


def ways_of(have: DeviceFacts, window: Window, count: int) -> list[Product]:
    """How a product may be launched on a device, the fastest first. Results do not depend on it.

    Parameters
    ----------
    have : DeviceFacts
        Of the device.
    window : Window
        The matrix.
    count : int
        Rows of x. Some ways take fewer at a time.

    Raises
    ------
    ValueError
        If it is not 1 to `MOST_ROWS`.
    """
    if not 1 <= count <= MOST_ROWS:
        raise ValueError(f"{count} rows of x, 1 to {MOST_ROWS} are taken at a time")
    made: list[Product] = []
    if multiplies_in_groups(have, window):
        first = next(number for number, rows in enumerate(_WIDTHS) if rows >= count)
        for rows in reversed(_WIDTHS[max(first - 1, 0) : first + 1]):  # half as many at a time, too
            made += _of_width(window, rows, have.shared_bytes)
    alone = _narrow(window, min(count, _FEW_ROWS), have.shared_bytes)
    return alone + made if _is_better_alone(have, window, count) else made + alone


def multiplies_in_groups(have: DeviceFacts, window: Window) -> bool:
    """Whether groups of warps multiply, by `wgmma`: each block of a cluster has a part of the columns."""
    return have.capability == _WGMMA and window.stripe_chunks >= PARTS


def _is_better_alone(have: DeviceFacts, window: Window, count: int) -> bool:
    """Whether blocks by themselves are faster than clusters of them."""
    least = next((share for rows, share in _BUSY.items() if count <= rows), None)
    if least is None:
        return False
    return _share_of_turns(have, window) >= (_BUSY[1] if window.stripe_chunks <= PARTS else least)


def _share_of_turns(have: DeviceFacts, window: Window) -> float:
    """In what share of their turns all blocks of `product` are busy; 1 if there is but one turn."""
    at_once = 2 * have.multiprocessors * (WARPS // min(window.stripe_chunks, PARTS))
    turns = -(-window.stripes // at_once)
    return window.stripes / (turns * at_once) if turns > 1 else 1.0


def blocks_at_once(shared: int, shared_bytes: int) -> int:
    """How many blocks with so much shared memory a multiprocessor has room for, two at most.

    It has 1 KiB more than one block may have, and as much goes with each of them.
    """
    return 2 if 2 * (shared + 1024) <= shared_bytes + 1024 else 1


def _narrow(window: Window, count: int, shared_bytes: int) -> list[Product]:
    """A block by itself takes all parts, and reads x from the cache, or copies all of it."""
    tiles = -(-count // 8)
    x_bytes = 2 * (-(-window.columns // 8) * 8) + 64  # lanes that read rows beside each other meet no bank
    least, copied = WARPS * (WARP_BYTES + _TURNS * tiles * 16 * 8 * 4), count * x_bytes
    # 16 rows take 160 registers. Without x, whose room depends on `count`: ways keep their labels.
    blocks = blocks_at_once(least, shared_bytes) if tiles == 1 else 1

    def made(shared: bool) -> Product:
        defines = matrix_defines(window) | {"NB": 8 * tiles, "SHARED": int(shared), "BLOCKS": blocks}
        rows = count if shared else 8 * tiles
        return Product(rows, SOURCE, "product", defines, least + shared * copied, blocks=blocks)

    fits = (True, False) if copied <= _SHARED_X else (False, True)
    return [made(shared) for shared in fits if least + shared * copied <= shared_bytes]


def _of_width(window: Window, rows: int, shared_bytes: int) -> list[Product]:
    """By clusters, with so many rows of x at a time."""
    groups = _GROUPS[rows]
    if rows == 32 and window.stripe_chunks <= PARTS and window.stripes < _FEW_STRIPES:
        groups = groups[::-1]
    made = [it for warps in groups for it in _grouped(window, rows, warps, shared_bytes)]
    wide = [_wide(window, it) for it in _clusters(window)] if rows == _WIDE_ROWS else []
    return [it for it in wide if it.shared <= shared_bytes] + made


def _grouped(window: Window, rows: int, warps: int, shared_bytes: int) -> list[Product]:
    """The blocks of a cluster share x, and the groups of warps of a block.

    With room for two turns' partial sums no warp waits for those of the turn before. Where 64 rows of x do
    not stay in shared memory, copying them takes longer than multiplying: warps that take two stripes copy x
    once for both. On an H200 that took 259 us instead of 300 with 57344 x 8192 words; where x stays, one
    stripe is faster by 3 to 10 %.
    """
    own = -(-window.stripe_chunks // PARTS)  # chunks of a part, at most
    streams = [_stages(window, rows, warps, *it, True) for it in _STREAMS[rows] if it[1] < own]
    stays = [_stages(window, rows, warps, 1, own, inboxes, False) for inboxes in (2, 1)]
    fit = [[it for it in ways if it.shared <= shared_bytes] for ways in (stays, streams)]
    return fit[0][:1] + fit[1]


def _stages(
    window: Window, rows: int, warps: int, each: int, stages: int, inboxes: int, streams: bool
) -> Product:
    """With room for so many chunks of x, and so many turns' partial sums."""
    barriers = 8 * (2 * inboxes + warps + 2 * stages)
    shared = stages * rows * 512 + inboxes * warps * rows * 64 + warps * WARP_BYTES + barriers
    room = {"EACH": each, "STAGES": stages, "STREAMS": int(streams), "INBOXES": inboxes}
    defines = matrix_defines(window) | {"NB": rows, "WIDE": warps} | room
    return Product(rows, GROUP_SOURCE, "group_product", defines, shared, warps + _OTHER_WARPS, PARTS)


def _clusters(window: Window) -> tuple[int, ...]:
    """How many blocks of `wide_product` may be a cluster, the fastest first."""
    few = window.stripe_chunks <= PARTS * _FEW_CHUNKS
    return _CLUSTERS[::-1] if few and window.stripes > _LARGE else _CLUSTERS


def _wide(window: Window, cluster: int) -> Product:
    """Groups of warps take turns, and x, which another kernel arranges, passes through shared memory."""
    rows, warps = _WIDE_ROWS, _WIDE_WARPS
    barriers = 8 * (_ROOMS + _ROOMS * warps // TOGETHER + 2 * _PIECES)
    shared = _PIECES * rows * 128 + _ROOMS * rows * 256 + warps * (_PLANE + CHUNK_BYTES) + barriers
    defines = matrix_defines(window) | {"NB": rows, "CLUSTER": cluster}
    room, warps = window.stripe_chunks * rows * 512, warps + _OTHER_WARPS
    return Product(rows, WIDE_SOURCE, "wide_product", defines, shared, warps, cluster, room=room)


def matrix_defines(window: Window) -> dict[str, int]:
    """Macros of all kernels of windows."""
    return {"ZERO": int(bool(window.flags & FLAG_ZERO)), "TAIL": int(window.columns % 256 != 0)}
