"""How a tensor is stored in a delta: as whatever takes the fewest bytes, and back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.contents import fill, rng, spec_of
from support.deltas import CHANGES, model_of, pair

from tpde.codec.delta import CHUNK_WORDS, Sparse
from tpde.codec.delta_planner import FAST_SAMPLE_BYTES
from tpde.errors import Corrupt
from tpde.files.progress import no_progress
from tpde.format.constants import DTYPES
from tpde.format.container import TensorSpec
from tpde.format.delta_head import DENSE, FULL, PLAIN, SPARSE
from tpde.io.sinks import BytesSink
from tpde.io.sources import BytesSource
from tpde.store.comparer import Wanted
from tpde.store.delta_writer import write_delta
from tpde.store.payloads import (
    TensorPayload,
    add_differences,
    difference_spec,
    differences,
    read_blob,
    store_change,
    store_whole,
)
from tpde.store.states import MemoryState


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


class Looked(Exception):
    """What is looked at to choose models is known."""


class Looking:
    """A comparer that tells of which chunks of which tensors it is asked for."""

    wanted: Sequence[Wanted] = ()

    def chunks(self, wanted: Sequence[Wanted]) -> Any:
        self.wanted = wanted
        raise Looked

    def compare(self, *_: Any) -> Any:
        raise AssertionError


@pytest.mark.parametrize("step", [1, 3, 5])
def test_models_are_made_of_chunks_that_are_evenly_spread_over_all_tensors(step: int) -> None:
    """Of a kind, and in both states."""
    total = step * FAST_SAMPLE_BYTES // CHUNK_WORDS  # of which every so manyth is looked at
    counts = {"a": 2, "b": 3, "c": 0, "d": total - 5}
    shared = {name: TensorSpec("U8", (max(count * CHUNK_WORDS - 5, 0),)) for name, count in counts.items()}
    shared["words"] = TensorSpec("I16", (5 * CHUNK_WORDS,))

    def read(name: str) -> Any:
        raise AssertionError(name)

    base, target = MemoryState(shared, read), MemoryState(shared | {"new": TensorSpec("U8", (9,))}, read)
    comparer, firsts = (
        Looking(),
        dict(zip(counts, itertools.accumulate(counts.values(), initial=0), strict=False)),
    )
    with pytest.raises(Looked):
        write_delta(
            *(base, target, BytesSink()),
            hint=None,
            fast=True,
            comparer=comparer,
            threads=1,
            progress=no_progress,
        )
    numbers = []
    for it in comparer.wanted:
        assert it.base == it.key
        for begin, end in it.ranges:
            assert end == min(begin + CHUNK_WORDS, shared[it.key[1]].nbytes)
            numbers.append(firsts[it.key[1]] + begin // CHUNK_WORDS)
    assert numbers == list(range(0, total, step))
