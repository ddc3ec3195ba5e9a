"""Random batches of rows, each of which must give what it gives alone, bit for bit.

Everything is drawn from a seed and compared on the device; the host waits once, for how many words differ.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

POOL = 96  # rows of x for each matrix, of which batches are made
ALONE, BATCH = 0x1234, 0x4321  # what y holds before: who writes nothing gives neither the one nor the other
LEFT, LEFT_WORDS = 64, 9  # words before and behind y; most between its rows


class Products(Protocol):
    """Products with one matrix."""

    def ways(self, count: int) -> Sequence[Any]:
        """How one with so many rows of x may be made."""

    def product(self, x: Any, y: Any, bias: Any, how: Any) -> None:
        """Write `y = x W^T + bias`; with `how` None as it is by default. x has zeros to a multiple of 8."""


class Matrix(NamedTuple):
    """A matrix, and how it was drawn."""

    seed: int
    content: str
    plain: Any


class Case(NamedTuple):
    """How a batch and its results lie: words before the first row, and from row to row."""

    number: int
    count: int
    bias: bool
    x_at: int
    x_stride: int
    y_at: int
    y_stride: int


def _spread(plain: Any, draw: Any) -> Any:
    return plain * torch.exp(0.3 * _normal((len(plain), 1), draw))


def _normal(shape: tuple[int, int], draw: Any) -> Any:
    return torch.randn(shape, device=draw.device, generator=draw)


def _words(shape: tuple[int, int], draw: Any) -> Any:
    words = torch.randint(-(1 << 15), 1 << 15, shape, device=draw.device, generator=draw)
    return words.to(torch.int16).view(torch.bfloat16)


def _special(made: Any, draw: Any, share: float) -> Any:
    """Some words of infinities and of NaNs, of all payloads."""
    given = _words(made.shape, draw).view(torch.int16) | 0x7F80
    given = torch.where(_normal(made.shape, draw) < 0, given & -128, given)  # of those, half are infinite
    where = torch.rand(made.shape, device=draw.device, generator=draw) < share
    return torch.where(where, given, made.view(torch.int16)).view(torch.bfloat16)


def _pruned(shape: tuple[int, int], draw: Any) -> Any:
    kept = torch.rand(shape, device=draw.device, generator=draw) < 0.5
    return (0.02 * _normal(shape, draw) * kept).bfloat16()


CONTENTS: dict[str, Callable[[tuple[int, int], Any], Any]] = {
    "normal": lambda shape, draw: _spread(0.02 * _normal(shape, draw), draw).bfloat16(),
    "heavy": lambda shape, draw: (0.02 * _normal(shape, draw) ** 5).bfloat16(),
    "pruned": _pruned,
    "special": lambda shape, draw: _special((0.02 * _normal(shape, draw)).bfloat16(), draw, 1e-3),
    "escapes": lambda shape, draw: torch.exp(8 * _normal(shape, draw)).bfloat16(),
    "words": _words,
}


def draw_shape(draw: random.Random) -> tuple[int, int]:
    """Rows and columns: odd ones, few chunks, as many as parts, more; at times many stripes."""
    low, high = draw.choice(((1, 300), (300, 2048), (1793, 8192), (8193, 14336), (14337, 29000)))
    columns = draw.randint(low, high)
    step = draw.choice((1, 1, 8, 256))
    columns = max(columns // step, 1) * step
    tall = not draw.randrange(6)  # several turns of a grid, of long rows too, for which x does not stay
    return draw.randint(2000, 5000) if tall else draw.randint(1, 400), columns


def draw_matrix(seed: int, device: str, shape: tuple[int, int] | None = None) -> Matrix:
    """The matrix of a seed."""
    host, draw = random.Random(seed), torch.Generator(device).manual_seed(seed)
    content = host.choice(list(CONTENTS))
    return Matrix(seed, content, CONTENTS[content](shape or draw_shape(host), draw))


def _pool(columns: int, draw: Any) -> Any:
    """Rows of x: usual ones, heavy tails, tiny and huge ones, zeros, such with infinities and NaNs."""
    made = _normal((POOL, columns), draw)
    made[::6] **= 5
    made[1::12] *= 1e-38
    made[7::12] *= 1e30
    made[5] = -0.0
    pool = made.bfloat16()
    pool[4::16] = _special(pool[4::16].contiguous(), draw, 3 / columns)
    return torch.nn.functional.pad(pool, (0, -columns % 8))


class Trial:
    """Cases with one matrix.

    Parameters
    ----------
    matrix : Matrix
        The matrix.
    products : Products
        What multiplies with it.
    cases, most : int
        How many cases, of how many rows of x at most.
    """

    def __init__(self, matrix: Matrix, products: Products, cases: int, most: int) -> None:
        self.matrix, self._products = matrix, products
        self._rows, self._columns = matrix.plain.shape
        device, host = matrix.plain.device, random.Random(f"cases {matrix.seed}")
        draw = torch.Generator(device).manual_seed(matrix.seed + (1 << 32))
        self._pool = _pool(self._columns, draw)
        self._bias = _normal((1, self._rows), draw).bfloat16()[0]
        self._alone = torch.stack([self._each(None), self._each(self._bias)])
        self.cases = [self._case(number, host, most) for number in range(cases)]
        taken = [[host.randrange(POOL) for _ in range(most)] for _ in range(cases)]
        self._taken = torch.tensor(taken).to(device)

    def _case(self, number: int, host: random.Random, most: int) -> Case:
        count = host.choice((host.randint(1, most), host.randint(1, min(most, 16))))
        x_at, x_gap = 8 * host.randrange(8), 8 * host.randrange(8)
        y_at, y_gap = host.randrange(LEFT), host.randrange(LEFT_WORDS)
        stride = self._pool.shape[1] + x_gap
        return Case(number, count, host.random() < 0.5, x_at, stride, y_at, self._rows + y_gap)

    def _each(self, bias: Any) -> Any:
        """What every row of the pool gives alone."""
        y = torch.full((POOL, self._rows), ALONE, dtype=torch.int16, device=self._pool.device)
        for row, to in zip(self._pool, y, strict=True):
            self._products.product(row[None], to[None], bias, None)
        return y

    def ways(self, case: Case, every: bool) -> list[Any]:
        """How a case is multiplied: as it is by default, or in every way that there is."""
        return list(self._products.ways(case.count)) if every else [None]

    def run(self, case: Case, how: Any) -> tuple[Any, Any]:
        """What a case gives, and what it must: words of y, and of what lies around it."""
        x = self._batch(case)
        size = 2 * LEFT + case.count * case.y_stride
        made = torch.full((2, size), BATCH, dtype=torch.int16, device=x.device)
        found, needed = (
            it.as_strided((case.count, self._rows), (case.y_stride, 1), at) for it, at in self._at(made, case)
        )
        needed.copy_(self._alone[int(case.bias)][self._taken[case.number, : case.count]])
        self._products.product(x, found, self._bias if case.bias else None, how)
        return made[0], made[1]

    @staticmethod
    def _at(made: Any, case: Case) -> Iterator[tuple[Any, int]]:
        for it in made:
            yield it, it.storage_offset() + case.y_at

    def _batch(self, case: Case) -> Any:
        """Rows of x; NaNs lie around them."""
        words = self._pool.shape[1]
        room = torch.full(
            (case.x_at + case.count * case.x_stride,),
            torch.nan,
            dtype=torch.bfloat16,
            device=self._pool.device,
        )
        x = room.as_strided((case.count, words), (case.x_stride, 1), case.x_at)
        return x.copy_(self._pool[self._taken[case.number, : case.count]])

    def explain(self, case: Case, how: Any) -> str:
        """Where a case differs, as it is now."""
        found, needed = (it.cpu() for it in self.run(case, how))
        what = f"seed {self.matrix.seed}, {self.matrix.content} {self._rows} x {self._columns}, {case}, {how}"
        wrong = (found != needed).nonzero()
        if not len(wrong):
            return f"{what}: right when it is run again"
        at = int(wrong[0])
        row, word = divmod(at - case.y_at, case.y_stride)
        words = f"found {int(found[at]) & 0xFFFF:#06x}, alone {int(needed[at]) & 0xFFFF:#06x}"
        return f"{what}: {len(wrong)} words differ, the first in row {row}, word {word}: {words}"


def failures(trials: Iterator[Trial], every: bool) -> tuple[int, list[str]]:
    """Run all cases; how many there were, and what is to say of those that fail.

    Parameters
    ----------
    trials : iterator of Trial
        Each is done with before the next is made.
    every : bool
        Multiply in every way that there is.
    """
    count, said = 0, []
    for trial in trials:
        made = [(case, how) for case in trial.cases for how in trial.ways(case, every)]
        wrong = [torch.count_nonzero(found != needed) for found, needed in (trial.run(*it) for it in made)]
        count += len(trial.cases)
        for at in torch.stack(wrong).nonzero().flatten().tolist():  # the one wait for the device
            said.append(trial.explain(*made[at]))
    return count, said
