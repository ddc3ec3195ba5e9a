"""What compares batches with single rows notices each way in which a product may depend on the batch."""

from __future__ import annotations

from typing import Any

import pytest
from support.batches import CONTENTS, POOL, Matrix, Trial, draw_matrix, draw_shape, failures, torch

SHAPES = [(1, 1), (17, 5), (5, 70), (40, 300)]


class Right:
    """Rows one by one, on the CPU."""

    def __init__(self, matrix: Matrix) -> None:
        self._plain = matrix.plain.float()

    def ways(self, count: int) -> list[str]:
        return ["a", "b"]

    def product(self, x: Any, y: Any, bias: Any, how: Any) -> None:
        for row, to in zip(x, y, strict=True):
            self.row(row[: self._plain.shape[1]].float(), to, bias)

    def row(self, row: Any, to: Any, bias: Any) -> None:
        found = (self._plain * row).sum(1)
        to.copy_((found if bias is None else found + bias).bfloat16().view(torch.int16))


class OtherInBatches(Right):
    def product(self, x: Any, y: Any, bias: Any, how: Any) -> None:
        super().product(x, y, bias, how)
        if len(x) > 8:
            y[3, 0] ^= 1


class OneWayIsWrong(Right):
    def product(self, x: Any, y: Any, bias: Any, how: Any) -> None:
        super().product(x, y, bias, how)
        if how == "b":
            y[0, 0] ^= 1


class WritesNothing(Right):
    def row(self, row: Any, to: Any, bias: Any) -> None:
        pass


class WritesBehind(Right):
    def product(self, x: Any, y: Any, bias: Any, how: Any) -> None:
        super().product(x, y, bias, how)
        if len(y) > 1 and y.stride(0) > y.shape[1]:
            y.as_strided((1, 1), (1, 1), y.storage_offset() + y.shape[1]).fill_(0)


class ReadsBehind(Right):
    def product(self, x: Any, y: Any, bias: Any, how: Any) -> None:
        wide = x.as_strided(x.shape, x.stride(), x.storage_offset() + (x.stride(0) > x.shape[1]))
        super().product(wide[:-1] if len(x) > 1 else x, y[:-1] if len(x) > 1 else y, bias, how)
        if len(x) > 1:
            super().product(x[-1:], y[-1:], bias, how)


def run(kind: Any, every: bool = True, seeds: range = range(12)) -> tuple[int, list[str]]:
    matrices = (draw_matrix(seed, "cpu", SHAPES[seed % len(SHAPES)]) for seed in seeds)
    return failures((Trial(it, kind(it), 8, 64) for it in matrices), every)


@pytest.mark.parametrize("every", [False, True])
def test_what_is_right_passes(every: bool) -> None:
    assert run(Right, every) == (96, [])


@pytest.mark.parametrize("kind", [OtherInBatches, OneWayIsWrong, WritesNothing, WritesBehind, ReadsBehind])
def test_what_is_wrong_is_noticed(kind: Any) -> None:
    count, wrong = run(kind)
    assert count == 96
    assert len(wrong) > 20
    assert "seed" in wrong[0]
    assert "the first in row" in wrong[0]


def test_a_way_that_is_not_the_default_is_tried_if_every_is() -> None:
    assert run(OneWayIsWrong, every=False)[1] == []


def test_the_matrices_of_a_seed_are_the_same() -> None:
    first, again = (draw_matrix(3, "cpu", (40, 300)) for _ in range(2))
    assert torch.equal(first.plain.view(torch.int16), again.plain.view(torch.int16))
    assert {draw_matrix(seed, "cpu", (2, 9)).content for seed in range(60)} == set(CONTENTS)


def test_shapes_are_of_every_kind() -> None:
    import random

    draw = random.Random(0)
    shapes = [draw_shape(draw) for _ in range(200)]
    assert any(columns < 64 for _, columns in shapes)
    assert any(columns > 14336 and columns % 2 for _, columns in shapes)
    assert any(columns % 256 == 0 and 2048 < columns <= 8192 for _, columns in shapes)
    assert any(rows > 2000 and rows % 16 for rows, _ in shapes)
    assert any(rows > 2000 and columns > 8192 for rows, columns in shapes)
    assert max(rows * columns for rows, columns in shapes) < 1 << 28
    assert POOL >= 64
