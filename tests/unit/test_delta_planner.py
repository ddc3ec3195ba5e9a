"""Models that are planned for changes: samples, classes, and the same ones in every release."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from tpde.codec import delta_planner
from tpde.codec.delta import CHUNK_WORDS, ChangeModel
from tpde.codec.delta_planner import Planner, plan, sample_step
from tpde.codec.native import Bytes
from tpde.errors import NativeError


def test_plans_of_words_that_cannot_be_have_no_memory() -> None:
    with pytest.raises(MemoryError):
        Planner(3, 0)


@pytest.mark.parametrize(
    ("chunks", "word_bytes", "fast", "step"),
    [
        (0, 2, False, 1),
        (1, 2, False, 1),
        (128, 2, False, 1),
        (129, 2, False, 2),
        (257, 2, False, 3),
        (64, 2, True, 1),
        (65, 2, True, 2),
        (32, 8, False, 1),
        (33, 8, False, 2),
    ],
)
def test_a_sample_is_16_mib_of_each_state_or_8(chunks: int, word_bytes: int, fast: bool, step: int) -> None:
    assert sample_step(chunks, word_bytes, fast=fast) == step


def test_a_fast_model_has_one_class_and_the_other_as_many_as_pay() -> None:
    draw = np.random.default_rng(0)
    exponent = draw.integers(100, 110, 50_000).astype(np.uint16)
    old = exponent << 7
    new = np.where((exponent == 100) & (draw.random(old.size) < 0.5), old ^ 1, old)
    states = old.view(np.uint8), new.view(np.uint8)
    assert plan([states], 2, 1, fast=True)[2] == 1
    assert 1 < plan([states], 2, 1)[2] <= 16


def _draw(seed: int, n: int) -> np.ndarray:
    """Give numbers that no library's generator changes (SplitMix64)."""
    z = (np.arange(n, dtype=np.uint64) + np.uint64(1 + (seed << 32))) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


def _states(word_bytes: int, seed: int, n: int = 20_000) -> tuple[Bytes, Bytes]:
    """Words of falling exponents; the smaller one is, the more of them change, and the further."""
    kind = np.dtype(f"<u{word_bytes}")
    z, other, bits = _draw(seed, n), _draw(seed + 100, n), 8 * word_bytes
    low = (z & (~z + np.uint64(1))).astype(np.float64)
    exponent = 110 - np.minimum(np.log2(low), 12).astype(np.uint64)
    old = (z >> np.uint64(64 - bits + 8) | exponent << np.uint64(bits - 9)) if bits > 8 else exponent
    step = np.uint64(1) + (other >> np.uint64(40)) % (np.uint64(113) - exponent)
    changes = other % np.uint64(64) < np.uint64(111) - exponent
    signs = np.where(other % np.uint64(97) == 0, np.uint64(1 << (bits - 1)), np.uint64(0))
    up = np.where(other >> np.uint64(20) & np.uint64(1), step, ~step + np.uint64(1))
    new = np.where(changes, (old + up) ^ signs, old)
    return old.astype(kind).view(np.uint8), new.astype(kind).view(np.uint8)


@pytest.mark.parametrize(
    ("word_bytes", "rotate", "found"),
    [
        (1, 0, "00c25dddfe4a"),
        (1, 1, "e2b3cc41d9b9"),
        (2, 0, "533d6d906366"),
        (2, 1, "06b0c18c36c2"),
        (4, 0, "1bbe9ed34ef9"),
        (4, 1, "23944c4908af"),
        (8, 0, "f1c1e9a17a05"),
        (8, 1, "1806bc918937"),
    ],
)
def test_the_same_changes_have_the_same_models_in_every_release(
    word_bytes: int, rotate: int, found: str
) -> None:
    hashed = hashlib.sha256()
    for seed in range(3):
        for n in (300, 20_000):
            old, new = _states(word_bytes, seed, n)
            for scale in (1, 1000):
                for fast in (False, True):
                    planner = Planner(word_bytes, rotate, fast=fast)
                    planner.survey(old, new)
                    planner.choose(scale)
                    planner.count(old, new)
                    hashed.update(planner.model(scale))
    assert hashed.hexdigest()[:12] == found


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("rotate", [0, 1])
def test_threads_choose_the_same_model(rotate: int, fast: bool) -> None:
    states = [_states(2, seed, 3000 + seed) for seed in range(130)]
    parts = [(old.view(np.uint8), new.view(np.uint8)) for old, new in states]
    one = delta_planner.choose(parts, 2, rotate, step=3, fast=fast)
    planner = Planner(2, rotate, fast=fast)
    for part in parts * (not fast):
        planner.survey(*part)
    planner.choose(3)
    for part in parts:
        planner.count(*part)
    assert planner.model(3) == one
    assert len(one) > 100
    for threads in (2, 3, 64):
        assert delta_planner.choose(parts, 2, rotate, step=3, fast=fast, threads=threads) == one


def test_plans_have_at_most_2_to_the_30_words() -> None:
    words = np.zeros(2 * CHUNK_WORDS, np.uint8)
    for name in ("survey", "count"):
        all_of_them = Planner(2, 1)
        getattr(all_of_them, name)(words, words)
        for _ in range(14):
            twice = all_of_them.fork()
            twice.add(all_of_them)
            twice.add(all_of_them)
            all_of_them = twice
        fork = all_of_them.fork()
        getattr(fork, name)(words[:2], words[:2])
        with pytest.raises(NativeError, match="too many words"):
            all_of_them.add(fork)


def test_no_more_classes_are_chosen_than_a_model_may_have() -> None:
    """Of forty exponents each changes by a step of its own, in a tensor where any table pays."""
    exponent = np.arange(40_000, dtype=np.uint64) % np.uint64(40)
    old = (exponent + np.uint64(60)) << np.uint64(7)
    new = np.where(
        _draw(9, old.size) % (exponent + np.uint64(2)) == 0,
        old + (np.uint64(1) << exponent % np.uint64(7)),
        old,
    )
    planner = Planner(2, 1)
    states = old.astype("<u2").view(np.uint8), new.astype("<u2").view(np.uint8)
    planner.survey(*states)
    planner.choose(1 << 30)
    planner.count(*states)
    assert ChangeModel(planner.model(1 << 30)).classes == 16


def test_what_a_table_costs_is_nothing_for_the_most_changes() -> None:
    planner = Planner(2, 1)
    old, new = _states(2, 1)
    planner.survey(old, new)
    planner.choose(1 << 40)
    planner.count(old, new)
    assert planner.model(1 << 30) == planner.model(1 << 62) != planner.model(1)
