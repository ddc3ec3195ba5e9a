"""Products by `wide_product`, run on the CPU: the bits of `product`, and no block that waits for ever."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.emulated import kernel_on_cpu

from tpde.codec import window_plan, windows
from tpde.cuda.capability import DeviceFacts
from tpde.cuda.product_ways import (
    CHUNK_BYTES,
    SOURCE,
    WARP_BYTES,
    WARPS,
    Product,
    matrix_defines,
    ways_of,
)

CLUSTER, AT = 8, 128
HOPPER = DeviceFacts("H100", (9, 0), 132, 227 << 10)


def wide(window: windows.Window, rows: int) -> Product:
    """The way that takes so many rows of x."""
    ways = ways_of(HOPPER, window, rows)
    return next(it for it in ways if it.name == "wide_product" and it.rows == rows)


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
        cluster = CLUSTER if how.grouped else 1
        launch = kernel.launch(grid * cluster, 32 * how.warps, how.shared, cluster=cluster)
        for first in range(0, len(x), how.rows):
            rows, out = x[first : first + how.rows], y[first:]
            arguments = (rows.ctypes.data, x.shape[1], len(rows), out.ctypes.data, y.shape[1])
            launch(0, *matrix, *arguments, self.bias.ctypes.data)
        return y


@pytest.mark.parametrize("most", [64, 128])
@pytest.mark.parametrize(
    ("rows", "columns", "count", "clusters"),
    [
        (1, 2048, 1, 1),  # a part of one chunk, one row
        (257, 2304, 37, 2),  # the first part has two chunks, the others one
        (200, 4050, 64, 1),  # a chunk that is not full; four turns
    ],
)
def test_bits(most: int, rows: int, columns: int, count: int, clusters: int) -> None:
    made = Made(rows, columns, count * most // 64, escapes=columns == 2304)
    how = wide(made.window, most)
    assert how.defines["OWN"] == -(-made.window.stripe_chunks // 8)
    assert np.array_equal(made.by(how, clusters), made.needed)


@pytest.mark.parametrize("most", [64, 128])
@pytest.mark.parametrize(
    ("rows", "columns", "clusters"), [(64, 6144, 1), (260, 4170, 1), (200, 4352, 2)], ids=str
)
def test_bits_where_x_is_loaded_again(most: int, rows: int, columns: int, clusters: int) -> None:
    made = Made(rows, columns, most - 3, escapes=columns == 4352)
    how = wide(made.window, most)
    assert how.defines["OWN"] == 0
    assert np.array_equal(made.by(how, clusters), made.needed)


@pytest.mark.parametrize(("most", "decoders", "held"), [(64, 12, 1), (128, 8, 2)])
def test_room(most: int, decoders: int, held: int) -> None:
    """What the kernel lays out in shared memory, and no more: others that run beside it need some."""
    found, sets = wide(windows.sections(64, 4096), most), decoders // 4
    assert found.warps == most // 16 + decoders
    assert found.shared == (
        sets * 32768
        + 2 * most // 16 * 4096
        + decoders * (held * CHUNK_BYTES + 1024)
        + 8 * (4 + 8 * sets + held * decoders)
    )
