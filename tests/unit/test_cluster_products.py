"""Products by clusters of blocks, run on the CPU: the bits of `product`, and no block that waits for ever."""

from __future__ import annotations

import numpy as np
import pytest
from support.emulated_products import made

from tpde.codec import windows
from tpde.cuda.capability import DeviceFacts
from tpde.cuda.product_ways import Product, ways_of

HOPPER = DeviceFacts("H100", (9, 0), 132, 227 << 10)


def clusters_ways(window: windows.Window, rows: int, name: str) -> list[Product]:
    """The ways of a kernel that take so many rows of x."""
    return [it for it in ways_of(HOPPER, window, rows) if it.name == name and it.rows == rows]


@pytest.mark.parametrize(("rows", "columns"), [(257, 2304), (200, 4050), (40, 8500), (64, 6144)])
def test_eight_rows_by_blocks_alone(rows: int, columns: int) -> None:
    """Others are compared with 16 rows of x at a time: eight have the same bits, with x copied or not."""
    it = made(rows, columns, escapes=columns == 2304)
    ways = [way for way in ways_of(HOPPER, it.window, 5) if way.name == "product"]
    assert {way.defines["SHARED"] for way in ways} == {0, 1}
    for how in ways:
        assert np.array_equal(it.by(how, 2, 13), it.needed(13)), how.label


@pytest.mark.parametrize("cluster", [8, 4])
@pytest.mark.parametrize(
    ("rows", "columns", "count", "clusters"),
    [
        (1, 2048, 1, 1),  # a part of one chunk, one row
        (257, 2304, 37, 2),  # the first part has two chunks, the others one
        (200, 4050, 64, 1),  # a chunk that is not full; four turns, of which a group takes two
        (1500, 2300, 60, 1),  # 24 turns: rooms and barriers of sums are taken several times
        (260, 4170, 61, 1),  # a last chunk of two pairs of tiles
        (260, 2230, 61, 1),  # and of three, before whole ones
        (64, 6144, 64, 1),
    ],
)
def test_wide(cluster: int, rows: int, columns: int, count: int, clusters: int) -> None:
    """Of x that was arranged, with zeros beyond its rows and columns."""
    it = made(rows, columns, escapes=columns in (2230, 2304))
    (how,) = (way for way in clusters_ways(it.window, 64, "wide_product") if way.cluster == cluster)
    assert how.room == it.window.stripe_chunks * 512 * 64
    assert np.array_equal(it.by(how, clusters, count), it.needed(count))


@pytest.mark.parametrize("most", [16, 32, 64])
@pytest.mark.parametrize(
    ("rows", "columns", "clusters"),
    [
        (257, 2304, 2),
        (200, 4050, 1),
        (40, 8500, 1),
        (450, 2100, 1),
        (300, 8500, 1),  # groups that have no stripe in the last turn, while x passes
        (180, 4300, 1),  # of 64 rows of x, such groups pass x in the same round as others
        (690, 2100, 3),  # of 44 stripes, clusters of 12 warps have 16, 16 and 12, of 8 warps 16, 16 and 12
        (70, 2100, 2),  # less than a turn: one group's stripes for each cluster
    ],
    ids=str,
)
def test_groups(most: int, rows: int, columns: int, clusters: int) -> None:
    """With x that stays in shared memory or passes through it; sums of several turns; all ways of a shape."""
    it = made(rows, columns, escapes=columns == 2304)
    ways = clusters_ways(it.window, most, "group_product")
    assert ways
    for how in ways:
        assert np.array_equal(it.by(how, clusters, most - 3), it.needed(most - 3)), how.label


@pytest.mark.parametrize("cluster", [8, 4])
def test_room_of_wide_products(cluster: int) -> None:
    """What the kernel lays out in shared memory, and no more."""
    ways = clusters_ways(windows.sections(64, 4096), 64, "wide_product")
    (found,) = (it for it in ways if it.cluster == cluster)
    assert found.warps == 16
    pieces, sums, chunks = 4 * 128 * 64, 2 * 256 * 64, 12 * (2048 + 5632)
    assert found.shared == pieces + sums + chunks + 8 * (2 + 2 * 3 + 8)
