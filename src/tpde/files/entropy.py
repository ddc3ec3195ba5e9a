"""The entropy of symbols in samples of tensors (docs/format.md 2.3)."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from tpde.codec import core_chunks, native
from tpde.codec.registry import PREFIX
from tpde.codec.selection import base_header, core_layout
from tpde.files.sampling import Look
from tpde.format.container import TensorSpec

Counts = npt.NDArray[np.int64]


def entropies_of(batch: list[Look], counts: dict[str, Counts]) -> list[float | None]:
    """The entropy of each tensor's sample; what is counted is added to the counts of its dtype."""
    found: list[float | None] = [None] * len(batch)
    places: dict[str, list[int]] = {}
    for i, it in enumerate(batch):
        if it.spec.dtype not in counts:
            counts[it.spec.dtype] = np.zeros(256, np.int64)
        if it.words.nbytes:
            places.setdefault(it.spec.dtype, []).append(i)
    for dtype, members in places.items():
        rows = _symbol_counts(dtype, [batch[i].words for i in members])
        counts[dtype] += rows.sum(axis=0)
        for i, value in zip(members, _entropy(rows), strict=True):
            found[i] = value
    return found


def _symbol_counts(dtype: str, samples: list[memoryview]) -> Counts:
    """Count the symbols in the symbol planes of samples: 256 numbers for each."""
    layout = _layout(dtype)
    symbols = core_chunks.split(layout, np.frombuffer(b"".join(samples), np.uint8))[-1]
    whose = np.repeat(np.arange(len(samples)), [words.nbytes // layout.word_bytes for words in samples])
    return np.bincount(256 * whose + symbols, minlength=256 * len(samples)).reshape(-1, 256)


@functools.cache
def _layout(dtype: str) -> native.CoreLayout:
    return core_layout(base_header(TensorSpec(dtype, (8,)), PREFIX.number))


def _entropy(counts: Counts) -> list[float]:
    """Entropy in bits of a symbol, of each row of counts; none is all zeros."""
    flat = counts.ravel()  # in which NumPy finds what is not zero in half the time
    there = np.flatnonzero(flat)
    rows, times = there // counts.shape[1], flat[there]
    p = times / np.bincount(rows, times)[rows]
    bits: list[float] = (0.0 - np.bincount(rows, p * np.log2(p))).tolist()  # 0.0 -: never -0.0
    return bits
