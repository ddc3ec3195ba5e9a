"""Matrices in windows, rows of x, and products of both by kernels that run on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from support.emulated import kernel_on_cpu
from tpde.codec import window_plan, windows
from tpde.cuda.product_ways import SOURCE, WARP_BYTES, WARPS, Product, matrix_defines

AT = 128


def bf16(values: Any) -> Any:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def aligned(words: Any) -> Any:
    """The same at a multiple of 128 bytes."""
    raw = np.empty(words.nbytes + AT, np.uint8)
    made = raw[-raw.ctypes.data % AT :][: words.nbytes].view(words.dtype).reshape(words.shape)
    made[:] = words
    return made


class Made:
    """A matrix, and rows of x."""

    def __init__(self, rows: int, columns: int, count: int, escapes: bool) -> None:
        draw = np.random.default_rng(rows + columns)
        values = draw.standard_normal((rows, columns))
        values = np.exp(10 * values) if escapes else 0.02 * values
        self.blob = aligned(window_plan.encode(bf16(values)))
        self.window = windows.validate(self.blob)
        x = np.zeros((count, -(-columns // 8) * 8), np.uint16)
        x[:, :columns] = bf16(draw.standard_normal((count, columns)))
        self.x, self.bias = aligned(x), bf16(draw.standard_normal(rows))

    def by(self, how: Product, grid: int, count: int | None = None) -> Any:
        """The product with the first rows of x, or all, before a row that stays as it is."""
        window, at, x = self.window, self.blob.ctypes.data, self.x[:count]
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

    @functools.cached_property
    def _multiplied(self) -> Any:
        defines = matrix_defines(self.window) | {"NB": 16, "SHARED": 0, "BLOCKS": 1}
        return self.by(Product(16, SOURCE, "product", defines, WARPS * (WARP_BYTES + 2 * 16 * 16 * 4)), 1)

    def needed(self, count: int) -> Any:
        """What `product` gives: of the first rows of x the same as of all."""
        return np.concatenate((self._multiplied[:count], self._multiplied[-1:]))


def fp32(words: Any) -> Any:
    return (words.astype(np.uint32) << 16).view(np.float32)


def of_runs(made: Made, runs: int) -> Any:
    """What windows.md 9.3 says of a matrix."""
    return sums_of_runs(made.x[:, : made.window.columns], windows.decode(made.blob), made.bias, runs)


def sums_of_runs(x: Any, matrix: Any, bias: Any, runs: int = 1) -> Any:
    """What windows.md 9.3 says, with sums of 16 products as the emulated instruction has them."""
    columns = matrix.shape[1]
    sides = fp32(x).astype(np.float64), fp32(matrix).astype(np.float64)
    x, words = (np.pad(it, ((0, 0), (0, -columns % 32))) for it in sides)
    chunks, all_sums = -(-columns // 256), list[Any]()
    for run in range(runs):
        sums = np.zeros((len(x), len(words)), np.float32)
        first, end = (256 * (chunks * it // runs) for it in (run, run + 1))
        for tile in range(first, min(end, x.shape[1]), 32):
            for fragment in (0, 4):
                products = np.zeros(sums.shape)
                for k in range(16):
                    column = tile + fragment + 8 * (k // 2 % 4) + k % 2 + 2 * (k // 8)
                    products += np.outer(x[:, column], words[:, column])
                sums = (sums.astype(np.float64) + products).astype(np.float32)
        all_sums.append(sums)
    bits = (functools.reduce(np.add, all_sums) + fp32(bias)).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@functools.lru_cache(maxsize=8)
def made(rows: int, columns: int, escapes: bool) -> Made:
    """A matrix and 64 rows of x, for several tests."""
    return Made(rows, columns, 64, escapes)
