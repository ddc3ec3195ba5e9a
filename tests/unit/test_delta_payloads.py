"""How a tensor is stored in a delta: as whatever takes the fewest bytes, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.contents import fill, rng, spec_of
from support.deltas import CHANGES, model_of, pair

from tpde.codec.delta import Sparse
from tpde.errors import Corrupt
from tpde.format.constants import DTYPES
from tpde.format.container import TensorSpec
from tpde.format.delta_head import DENSE, FULL, PLAIN, SPARSE
from tpde.io.sources import BytesSource
from tpde.store import delta_writer as store_diff
from tpde.store.payloads import (
    TensorPayload,
    add_differences,
    difference_spec,
    differences,
    read_blob,
    store_change,
    store_whole,
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_differences_come_back(dtype: str) -> None:
    for content in ("normal", "specials", "random"):
        for change in CHANGES:
            old, new = pair(dtype, content, change, 500)
            spec = spec_of(dtype, 500)
            stored = differences(old, new, spec)
            words = old.copy()
            add_differences(words, stored, spec)
            assert (words == new).all(), (content, change)
            assert difference_spec(spec).nbytes == stored.size == spec.nbytes


def test_differences_are_those_of_the_document() -> None:
    old = np.array([0x0000, 0x8000, 0x3F80, 0xBF80, 0x8001], np.uint16).view(np.uint8)
    new = np.array([0x8000, 0x0000, 0x3F81, 0xBF81, 0x0001], np.uint16).view(np.uint8)
    # -0 is one below +0, and magnitudes of negative words count downwards.
    found = differences(old, new, spec_of("BF16", 5)).view(np.uint16)
    assert found.tolist() == [1, 2, 2, 1, 6]


def _stored(dtype: str, old: np.ndarray, new: np.ndarray) -> TensorPayload:
    a, b = old.view(np.uint8), new.view(np.uint8)
    return store_change(spec_of(dtype, old.size), model_of(dtype, a, b), a, b, 1)


def test_the_smallest_is_taken() -> None:
    n, draw = 40_000, rng("choice")
    weights = np.frombuffer(fill("normal", spec_of("BF16", n)), np.uint16)
    few = np.where(draw.random(n) < 0.01, weights + 1, weights).astype(np.uint16)
    assert _stored("BF16", weights, few).codec == SPARSE
    other = np.frombuffer(fill("normal", spec_of("BF16", n + 1)), np.uint16)[:n]
    assert _stored("BF16", weights, other[::-1].copy()).codec == FULL
    assert (
        _stored("BF16", weights, np.zeros(n, np.uint16)).codec == FULL
    )  # a constant takes no more than its shape
    ids = np.arange(n, dtype=np.int64) * 1_000_003
    assert _stored("I64", ids, ids + np.arange(n) % 7).codec == DENSE
    noise = np.frombuffer(draw.bytes(2 * n), np.uint16)
    assert _stored("U16", ids.astype(np.uint16), noise).codec == PLAIN


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_takes_more_than_the_target_alone(dtype: str) -> None:
    for content in ("normal", "random", "zeros"):
        for change in CHANGES:
            old, new = pair(dtype, content, change, 3000)
            spec = spec_of(dtype, 3000)
            stored = store_change(spec, model_of(dtype, old, new), old, new, 1)
            assert stored.data.size <= store_whole(spec, new, 1).data.size, (content, change)


def test_a_blob_of_another_tensor_is_refused() -> None:
    spec = spec_of("BF16", 5000)
    stored = store_whole(spec, np.frombuffer(fill("normal", spec), np.uint8), 1)
    assert stored.codec == FULL
    place = BytesSource(stored.data), 0, stored.data.size
    words = np.frombuffer(fill("normal", spec), np.uint8)
    assert (read_blob(spec, *place, (0, 10_000), 1) == words).all()
    assert (read_blob(spec, *place, (4000, 9002), 1) == words[4000:9002]).all()
    with pytest.raises(Corrupt, match="BF16"):
        read_blob(spec_of("F16", 5000), *place, (0, 10_000), 1)


class Given:
    """A model whose chunks take as many bytes as it is told."""

    def __init__(self, size: int | None, chunks: int = 1) -> None:
        self.sparse = None
        if size is not None:
            records = np.zeros(chunks, np.uint32)
            self.sparse = Sparse(np.zeros(size, np.uint8), records, records)

    def encode(self, old: object, new: object, threads: int) -> Sparse | None:
        return self.sparse


def _codec_of(dtype: str, new: np.ndarray, size: int | None, chunks: int = 1) -> str:
    """Give the codec for random words that become others, where sparse changes take so many bytes."""
    old = np.frombuffer(rng("old").bytes(new.nbytes), np.uint8)
    return store_change(spec_of(dtype, new.size), Given(size, chunks), old, new.view(np.uint8), 1).codec  # type: ignore[arg-type]


def test_a_base_must_save_two_percent_with_the_records_of_the_chunks() -> None:
    noise = np.frombuffer(rng("noise").bytes(20_000), np.uint16)  # neither it nor the differences shrink
    for chunks in (1, 50):
        most = int(20_000 * 0.98) - 2 * chunks
        assert _codec_of("BF16", noise, most - 1, chunks) == SPARSE
        assert _codec_of("BF16", noise, most, chunks) == PLAIN
    assert _codec_of("BF16", noise, None) == PLAIN


def test_few_changes_of_weights_are_taken_as_they_are() -> None:
    """Below a sixteenth of floats that are not all the same, the other codecs are not tried."""
    same = np.full(8000, 3, np.uint16)
    nearly = np.append(same[1:], np.uint16(4))
    for dtype, new, size, tried in (
        ("BF16", nearly, 999, False),
        ("BF16", nearly, 1000, True),
        ("I16", nearly, 999, True),
        ("BF16", same, 999, True),
    ):
        assert _codec_of(dtype, new, size) == (FULL if tried else SPARSE), (dtype, size)


def test_a_tensor_of_no_bytes_is_stored_plain() -> None:
    stored = store_whole(spec_of("BF16", 0), np.empty(0, np.uint8), 1)
    assert (stored.codec, stored.data.size, stored.sparse) == (PLAIN, 0, None)


class Numbered:
    """A state of tensors whose chunks of bytes hold their numbers, counted through all of them."""

    def __init__(self, *chunks: int) -> None:
        at, self.specs, self.asked = 0, {}, list[str]()
        self.tensors = {}
        for i, count in enumerate(chunks):
            numbers = np.arange(at, at + count, dtype=np.uint8)
            self.tensors[f"{i}"] = np.repeat(numbers, 65536)[: count * 65536 - 5]
            self.specs["", f"{i}"] = TensorSpec("U8", (count * 65536 - 5,))
            at += count

    def read_parts(
        self, key: tuple[str, str], ranges: list[tuple[int, int]], threads: int
    ) -> list[np.ndarray]:
        self.asked.append(key[1])
        return [self.tensors[key[1]][begin:end] for begin, end in ranges]


@pytest.mark.parametrize(("step", "chunks"), [(1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 6]), (5, [0, 5])])
def test_models_are_made_of_chunks_that_are_evenly_spread_over_all_tensors(
    step: int, chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(
        store_diff, "sample_step", lambda total, word, *, fast: told.append((total, word)) or step
    )
    state: Any = Numbered(2, 3, 2)
    pairs = [store_diff._Pair(key, key) for key in state.specs]
    comparer = store_diff.HostComparer(state, state, 1)
    parts, found = store_diff._sample(
        comparer, state, [*pairs, store_diff._Pair(("", "new"), None)], (1, 0), False
    )
    assert (told, found) == ([(7, 1)], step)
    assert [(int(old[0]), int(new[-1])) for old, new in parts] == [(it, it) for it in chunks]
    assert set(state.asked) == {"0" if it < 2 else "1" if it < 5 else "2" for it in chunks}
    assert store_diff._sample(comparer, state, pairs, (2, 1), False)[0] == []
