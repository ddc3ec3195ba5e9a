"""Products by clusters of blocks, run on the CPU: the bits of `product`, and no block that waits for ever."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.emulated import kernel_on_cpu

from tpde.codec import window_plan, windows
from tpde.cuda.capability import DeviceFacts
from tpde.cuda.product_ways import SOURCE, WARP_BYTES, WARPS, Product, matrix_defines, ways_of

AT = 128
HOPPER = DeviceFacts("H100", (9, 0), 132, 227 << 10)


def clusters_ways(window: windows.Window, rows: int, name: str) -> list[Product]:
    """The ways of a kernel that take so many rows of x."""
    return [it for it in ways_of(HOPPER, window, rows) if it.name == name and it.rows == rows]


def bf16(values: Any) -> Any:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def aligned(words: Any) -> Any:
    """The same at a multiple of 128 bytes."""
    raw = np.empty(words.nbytes + AT, np.uint8)
    made = raw[-raw.ctypes.data % AT :][: words.nbytes].view(words.dtype).reshape(words.shape)
    made[:] = words
    return made


class Made:
    """A matrix, rows of x, and what `product` gives."""

    def __init__(self, rows: int, columns: int, count: int, escapes: bool) -> None:
        draw = np.random.default_rng(rows + columns)
        values = draw.standard_normal((rows, columns))
        values = np.exp(10 * values) if escapes else 0.02 * values
        self.blob = aligned(window_plan.encode(bf16(values)))
        self.window = windows.validate(self.blob)
        x = np.zeros((count, -(-columns // 8) * 8), np.uint16)
        x[:, :columns] = bf16(draw.standard_normal((count, columns)))
        self.x, self.bias = aligned(x), bf16(draw.standard_normal(rows))
        defines = matrix_defines(self.window) | {"NB": 8, "SHARED": 0, "BLOCKS": 2}
        how = Product(8, SOURCE, "product", defines, WARPS * (WARP_BYTES + 2 * 16 * 8 * 4))
        self.needed = self.by(how, 1)

    def by(self, how: Product, grid: int) -> Any:
        """The product, before a row that stays as it is."""
        window, at, x = self.window, self.blob.ctypes.data, self.x
        y = np.full((len(x) + 1, window.rows + 1), 0x7777, np.uint16)
        places = window.records_at, window.offsets_at, window.entries_at, window.bodies_at
        matrix = [
            *(at + it for it in places),
            *np.frombuffer(window.table, "<u8"),
            window.rows,
            window.columns,
        ]
        kernel = kernel_on_cpu(how.source, how.name, how.defines, 0)
        launch = kernel.launch(grid * how.cluster, 32 * how.warps, how.shared, cluster=how.cluster)
        room = aligned(np.full(how.room, 0xA5, np.uint8))
        for first in range(0, len(x), how.rows):
            rows, out = x[first : first + how.rows], y[first:]
            there = [rows.ctypes.data, x.shape[1], len(rows)]
            if how.room:
                arrange = kernel_on_cpu(how.source, "arrange", how.defines, 0).launch(2, 256, 0)
                arrange(0, *there, window.columns, room.ctypes.data)
                there = [room.ctypes.data, len(rows)]
            launch(0, *matrix, *there, out.ctypes.data, y.shape[1], self.bias.ctypes.data)
        return y


@pytest.mark.parametrize(("most", "cluster"), [(64, 8), (64, 4), (128, 8), (128, 4)])
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
def test_wide(most: int, cluster: int, rows: int, columns: int, count: int, clusters: int) -> None:
    """Of x that was arranged, with zeros beyond its rows and columns."""
    made = Made(rows, columns, count * most // 64, escapes=columns in (2230, 2304))
    (how,) = (it for it in clusters_ways(made.window, most, "wide_product") if it.cluster == cluster)
    assert how.room == made.window.stripe_chunks * 512 * most
    assert np.array_equal(made.by(how, clusters), made.needed)


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
    made = Made(rows, columns, most - 3, escapes=columns == 2304)
    ways = clusters_ways(made.window, most, "group_product")
    assert ways
    for how in ways:
        assert np.array_equal(made.by(how, clusters), made.needed), how.label


@pytest.mark.parametrize(("most", "cluster", "warps"), [(64, 8, 12), (64, 4, 12), (128, 8, 12), (128, 4, 8)])
def test_room_of_wide_products(most: int, cluster: int, warps: int) -> None:
    """What the kernel lays out in shared memory, and no more."""
    ways = clusters_ways(windows.sections(64, 4096), most, "wide_product")
    (found,) = (it for it in ways if it.cluster == cluster)
    assert found.warps == warps + 4
    pieces, sums, chunks = 4 * 128 * most, 2 * 256 * most, warps * (2048 + 5632)
    assert found.shared == pieces + sums + chunks + 8 * (2 + 2 * warps // 4 + 2 * warps + 8)
