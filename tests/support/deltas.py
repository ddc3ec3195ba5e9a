"""Pairs of states of a tensor, for every dtype: what changes, and by how much."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from support.contents import fill, rng, spec_of
from tpde.codec import delta, delta_planner
from tpde.codec.native import Bytes
from tpde.format.constants import DTYPES

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def _some(dtype: str, words: Bytes, share: float) -> Bytes:
    """Give other words at some places: near ones mostly, and any at all."""
    draw = rng("some", dtype, words.size, share)
    out, places = words.copy(), draw.random(words.size) < share
    n = int(places.sum())
    step = draw.geometric(0.7, n).astype(words.dtype)
    near = np.where(draw.random(n) < 0.5, words[places] + step, words[places] - step)
    far = np.frombuffer(draw.bytes(n * words.itemsize), words.dtype)
    out[places] = np.where(draw.random(n) < 0.9, near, far)
    return out


def _flipped(dtype: str, words: Bytes, share: float) -> Bytes:
    """Flip signs: of zeros, infinities and NaNs too."""
    places = rng("flipped", dtype, words.size).random(words.size) < share
    return np.where(places, words ^ words.dtype.type(1 << (8 * words.itemsize - 1)), words)


CHANGES: dict[str, Callable[[str, Bytes], Bytes]] = {
    "none": lambda dtype, words: words.copy(),
    "few": lambda dtype, words: _some(dtype, words, 0.005),
    "some": lambda dtype, words: _some(dtype, words, 0.1),
    "most": lambda dtype, words: _some(dtype, words, 0.8),
    "all": lambda dtype, words: ~words,
    "signs": lambda dtype, words: _flipped(dtype, words, 0.3),
}


def pair(dtype: str, content: str, change: str, words: int) -> tuple[Bytes, Bytes]:
    """Give the bytes of a tensor's two states."""
    kind = UNSIGNED[DTYPES[dtype].word_bytes]
    old = np.frombuffer(fill(content, spec_of(dtype, words)), kind)
    return old.view(np.uint8).copy(), CHANGES[change](dtype, old).view(np.uint8)


def model_of(dtype: str, old: Bytes, new: Bytes, *, fast: bool = False) -> delta.ChangeModel:
    """Choose a model for a tensor, and open it."""
    facts = DTYPES[dtype]
    return delta.ChangeModel(
        delta_planner.plan([(old, new)], facts.word_bytes, facts.rotate, fast=fast), encode=True
    )
