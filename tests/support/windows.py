"""bf16 matrices whose words are hard for windows."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from support.contents import CONTENTS, fill, rng
from tpde.codec.windows import Words
from tpde.format.container import TensorSpec


def _bf16(values: np.ndarray) -> Words:
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


def weights(rows: int, columns: int) -> Words:
    """Give weights as they are: normal, the scale of rows spread by 0.3."""
    draw = rng("weights", rows, columns)
    scale = 0.02 * np.exp(0.3 * draw.standard_normal((rows, 1), np.float32))
    return _bf16(draw.standard_normal((rows, columns), np.float32) * scale)


def pruned(rows: int, columns: int) -> Words:
    """Give weights of which half are zero, of either sign."""
    words, draw = weights(rows, columns), rng("pruned", rows, columns)
    return np.where(draw.random((rows, columns)) < 0.5, words & 0x8000, words).astype(np.uint16)


def every_word(rows: int, columns: int) -> Words:
    """Give all words one after the other."""
    return (np.arange(rows * columns) * 40503 % 65536).astype(np.uint16).reshape(rows, columns)


def escapes(rows: int, columns: int) -> Words:
    """Give rows of which few words have a window in common: exponents 16 apart."""
    draw = rng("escapes", rows, columns)
    exponents = draw.integers(0, 16, (rows, columns)) * 16 + draw.integers(0, 2, (rows, columns)) * 9
    return (exponents << 7 | draw.integers(0, 128, exponents.shape) * 0x101 & 0x807F).astype(np.uint16)


def edges(rows: int, columns: int) -> Words:
    """Give rows at the ends of the exponents: zeros and denormals, or infinities and NaNs."""
    draw = rng("edges", rows, columns)
    low = draw.integers(0, 9, (rows, columns)) << 7
    kind = np.arange(rows)[:, None] % 4
    words = np.select([kind == 0, kind == 1, kind == 2], [low, 0x7F80 - low, low + 0x80], 0x7F80)
    rest = draw.integers(0, 2, words.shape) << 15 | draw.integers(0, 128, words.shape)
    return (words | rest).astype(np.uint16)


def _of(content: str) -> Callable[[int, int], Words]:
    def make(rows: int, columns: int) -> Words:
        data = fill(content, TensorSpec("BF16", (rows * columns,)))
        return np.frombuffer(data, "<u2").reshape(rows, columns)

    return make


MATRICES: dict[str, Callable[[int, int], Words]] = {
    **{f.__name__: f for f in (weights, pruned, every_word, escapes, edges)},
    **{name: _of(name) for name in CONTENTS if name not in ("normal", "pruned")},
}
