"""Experts in windows, and their products by kernels that run on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.contents import rng
from support.window_encoding import guards, room
from support.windows import MATRICES
from tpde.codec import window_plan, windows
from tpde.cuda.window_experts import DeviceExperts
from tpde.cuda.window_products import DeviceWindow


class Held:
    """Experts of some contents in turn, and their blobs at multiples of 128 bytes."""

    def __init__(
        self, experts: int, parts: int, rows: int, columns: int, contents: list[str], turned: bool = False
    ) -> None:
        self.words = [
            np.ascontiguousarray(MATRICES[contents[i % len(contents)]](rows, columns))
            for i in range(experts * parts)
        ]
        draw = rng("experts", experts, rows, columns)
        for it in self.words:  # matrices of like contents differ
            it[:] = it[draw.permutation(rows)]
        self.blobs = []
        for it in self.words:
            blob = window_plan.encode(it)
            self.blobs.append(room(blob.size, 128, 0))
            self.blobs[-1][:] = blob
        found = [windows.validate(it) for it in self.blobs]
        places = [it.ctypes.data for it in self.blobs]
        self.experts, self.parts, self.rows, self.columns = experts, parts, rows, columns
        self.device = DeviceExperts(list(zip(found, places, strict=True)), experts, turned, 0)
        self.device.table_at = self.device.table.ctypes.data
        self.alone = [DeviceWindow(*it, 0) for it in zip(found, places, strict=True)]

    def product(
        self,
        x: np.ndarray,
        ids: Any,
        per: int = 1,
        bias: np.ndarray | None = None,
        tokens: int = 1,
        skew: int = 2,
    ) -> np.ndarray:
        """The kernels', of a call of so many tokens; y begins at a multiple of `skew`."""
        taken, numbers = padded(x), np.asarray(ids)
        wide = numbers.dtype == np.int64
        y = room(2 * numbers.size * self.parts * self.rows, skew, 0x5A)
        meanwhile = room(self.device.room(tokens, numbers.size), 128, 0xA5)
        self.device.product(
            *(taken.ctypes.data, taken.shape[1], per, numbers.ctypes.data, numbers.size, y.ctypes.data),
            *(0 if bias is None else bias.ctypes.data, 0),
            wide=wide,
            tokens=tokens,
            room=meanwhile.ctypes.data,
        )
        assert (guards(y) == 0x5A).all()
        assert (guards(meanwhile) == 0xA5).all()
        return y.view(np.uint16).reshape(numbers.size, -1)

    def by_one(self, x: np.ndarray, ids: Any, per: int = 1, bias: np.ndarray | None = None) -> np.ndarray:
        """Each row alone, by the product of a matrix."""
        taken = padded(x)
        y = np.zeros((len(ids), self.parts * self.rows), np.uint16)
        for i, expert in enumerate(ids):
            for part in range(self.parts if 0 <= expert < self.experts else 0):
                at = taken[i // per].ctypes.data
                to = y[i, part * self.rows :]
                added = 0 if bias is None else bias[expert, part * self.rows :].ctypes.data
                matrix = self.alone[expert * self.parts + part]
                matrix.product(at, taken.shape[1], 1, to.ctypes.data, self.rows, added, 0)
        return y


def padded(x: np.ndarray) -> np.ndarray:
    """Give rows whose lengths are multiples of 8 words, at multiples of 16 bytes."""
    count, columns = x.shape
    step = -(-columns // 8) * 8
    made = room(2 * count * step, 16, 0).view(np.uint16).reshape(count, step)
    made[:, :columns] = x
    return made


def of_batch(count: int, columns: int) -> np.ndarray:
    """Give rows of x."""
    return (
        rng("x", count, columns).standard_normal((count, columns)).astype(np.float32).view(np.uint32) >> 16
    ).astype(np.uint16)
