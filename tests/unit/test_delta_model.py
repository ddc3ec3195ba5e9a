"""Models of changes, and chunks of changes, that cannot be; and what is asked of sizes before the core is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.deltas import model_of, pair

from tpde.codec import delta, delta_planner, delta_reference
from tpde.codec.delta import CHUNK_WORDS, ChangeModel, Sparse, chunk_range
from tpde.codec.delta_planner import Planner, plan
from tpde.codec.delta_reference import Model as Slow
from tpde.codec.native import Bytes
from tpde.codec.reference import Table
from tpde.errors import Corrupt, NativeError

OLD, NEW = pair("BF16", "normal", "some", 400)
MODEL = model_of("BF16", OLD, NEW)


def _sparse(model: ChangeModel = MODEL, old: Bytes = OLD, new: Bytes = NEW) -> Sparse:
    made = model.encode(old, new)
    assert made is not None
    return made


# ---- models ----


@pytest.mark.parametrize("behind", [bytes(1), bytes(4), b"\1", bytes(300), MODEL.data])
def test_bytes_behind_the_tables_are_refused(behind: bytes) -> None:
    ChangeModel(MODEL.data)
    with pytest.raises(Corrupt, match="its tables end before it does") as caught:
        ChangeModel(MODEL.data + behind)
    assert (caught.value.found, caught.value.needed) == (len(MODEL.data), len(MODEL.data) + len(behind))


def _of_classes(count: int, kind: int = 3, escape: int = 1) -> bytes:
    values = {1024: 1} if escape else {1024: 1, 0: 1}
    table = Table.from_lengths(
        kind, 1, 0, {value & 0xFF if kind == 1 else value: 1 for value in values}, escape
    )
    return Slow(2, 1, 1, list(range(count)), [table] * count).serialize()


def test_sixteen_classes_are_the_most() -> None:
    assert ChangeModel(_of_classes(16)).classes == 16
    assert ChangeModel(_of_classes(1)).classes == 1
    with pytest.raises(Corrupt, match="number of classes is out of range"):
        ChangeModel(_of_classes(17))
    with pytest.raises(Corrupt, match="number of classes is out of range"):
        ChangeModel(_of_classes(0) + bytes(8))


@pytest.mark.parametrize(("kind", "escape"), [(1, 1), (2, 1), (3, 0)])
def test_tables_that_cannot_write_every_change_are_refused(kind: int, escape: int) -> None:
    for model in (_of_classes(1, kind, escape), _of_classes(3, kind, escape)):
        with pytest.raises(Corrupt, match="a table that cannot write every change"):
            ChangeModel(model)


@pytest.mark.parametrize(
    ("at", "value"), [(0, 3), (0, 0), (0, 16), (1, 2), (3, 2), (4, 1), (5, 0), (6, 1), (7, 1)]
)
def test_headers_of_models_that_cannot_be_are_refused(at: int, value: int) -> None:
    """Of three classes, which begin at 0, 1 and 2; the last byte is padding."""
    data = bytearray(_of_classes(3))
    assert data[:8].hex() == "0201030100010200"
    ChangeModel(bytes(data))
    data[at] = value
    with pytest.raises(Corrupt):
        ChangeModel(bytes(data))


def test_nothing_that_changes_has_a_model_too() -> None:
    for fast in (False, True):
        same = ChangeModel(plan([(OLD, OLD)], 2, 1, fast=fast), encode=True)
        assert _sparse(same, OLD, OLD).data.size == 0
        sparse, out = _sparse(same), OLD.copy()
        same.apply(sparse, out)
        assert np.array_equal(out, NEW)
    assert ChangeModel(plan([], 2, 1)).classes == 1


# ---- chunks ----


def test_a_chunk_without_changes_has_no_bytes() -> None:
    sparse = _sparse()
    none = sparse._replace(changes=np.zeros(1, np.uint32))
    with pytest.raises(Corrupt, match="do not end where its bytes and words do") as caught:
        MODEL.apply(none, OLD.copy())
    assert caught.value.chunk == 0
    out = OLD.copy()
    MODEL.apply(Sparse(np.empty(0, np.uint8), np.zeros(1, np.uint32), np.zeros(1, np.uint32)), out)
    assert np.array_equal(out, OLD)


def test_no_more_words_change_than_there_are() -> None:
    """As many do, and not one more."""
    new = OLD ^ 1
    model = model_of("BF16", OLD, new, fast=True)
    sparse, out = _sparse(model, OLD, new), OLD.copy()
    assert sparse.changes.tolist() == [400]
    model.apply(sparse, out)
    assert np.array_equal(out, new)
    with pytest.raises(Corrupt):
        model.apply(sparse._replace(changes=sparse.changes + 1), OLD.copy())


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_the_lowest_damaged_chunk_is_named(threads: int) -> None:
    words = 9 * CHUNK_WORDS + 5
    old = np.zeros(words, np.uint16).view(np.uint8)
    new = np.where(np.arange(words) % 1000 == 7, 1, 0).astype(np.uint16).view(np.uint8)
    model = model_of("BF16", old, new)
    sparse, out = _sparse(model, old, new), old.copy()
    model.apply(sparse, out, threads)
    assert np.array_equal(out, new)
    for damaged in itertools.combinations((0, 3, 4, 9), 2):
        changes = sparse.changes.copy()
        changes[list(damaged)] += 1
        for dry in (True, False):
            with pytest.raises(Corrupt) as caught:
                model.apply(sparse._replace(changes=changes), old.copy(), threads, dry=dry)
            assert caught.value.chunk == damaged[0]


def test_records_of_other_bytes_are_refused() -> None:
    sparse = _sparse()
    with pytest.raises(Corrupt, match="ends beyond its tensor's bytes") as caught:
        MODEL.apply(sparse._replace(sizes=sparse.sizes + 1), OLD.copy())
    assert caught.value.chunk == 0
    with pytest.raises(Corrupt, match="bytes that belong to no chunk"):
        MODEL.apply(sparse._replace(data=np.append(sparse.data, np.uint8(0))), OLD.copy())


def test_more_changes_than_words_are_not_listed() -> None:
    model = ChangeModel(plan([(OLD, NEW)], 2, 1, fast=True), encode=True)
    sparse = _sparse(model)
    with pytest.raises(Corrupt, match="changes of 400 words"):
        model.listed(sparse._replace(changes=sparse.changes + np.uint32(401)), OLD)


# ---- before the core ----


def test_states_of_two_sizes_are_refused() -> None:
    for old, new in ((OLD, NEW[:-2]), (OLD[:-2], NEW), (OLD[:-1], NEW[:-1])):
        with pytest.raises(ValueError, match="are no two states of a tensor"):
            MODEL.encode(old, new)
        planner = Planner(2, 1)
        for take in (planner.survey, planner.count):
            with pytest.raises(ValueError, match="are no two states of a chunk"):
                take(old, new)


def test_records_of_another_number_of_chunks_are_refused() -> None:
    sparse, two = _sparse(), np.zeros(2, np.uint32)
    for wrong, words in (
        (sparse._replace(changes=two), OLD),
        (sparse._replace(sizes=two), OLD),
        (sparse._replace(changes=two[:0]), OLD),
        (sparse._replace(sizes=two[:0]), OLD),
        (sparse, OLD[:-1]),
        (sparse, np.zeros(2 * CHUNK_WORDS + 2, np.uint8)),
        (sparse, OLD[:0]),
    ):
        with pytest.raises(ValueError, match="bytes, with records of"):
            MODEL.apply(wrong, words.copy())


def test_ranges_of_chunks() -> None:
    size = 4 * CHUNK_WORDS
    assert chunk_range(0, size, 4) == chunk_range(0, size + 4, 4) == (0, size)
    assert chunk_range(1, size + 4, 4) == (size, size + 4)
    assert chunk_range(0, 12, 4) == (0, 12)
    assert [delta.chunk_count(n) for n in (0, 1, CHUNK_WORDS, CHUNK_WORDS + 1)] == [0, 1, 1, 2]


# ---- checks ----


@given(
    st.sampled_from([(1, 0), (2, 1), (4, 1), (8, 1), (2, 0), (8, 0)]),
    st.integers(1, 300) | st.sampled_from([65_535, 65_536, 65_537, 70_003]),
    st.sampled_from([1.0, 0.3, 0.01, 0.0]),
    st.integers(0, 2**32 - 1),
    st.integers(1, 3),
)
def test_checks_are_those_of_the_document(
    kind: tuple[int, int], words: int, share: float, seed: int, threads: int
) -> None:
    draw = np.random.default_rng(seed)
    old = draw.integers(0, 256, (words, kind[0]), dtype=np.uint8)
    new, moved = old.copy(), draw.random(words) < share
    new[moved, 0] ^= draw.integers(1, 9, moved.sum(), dtype=np.uint8)
    old, new = old.reshape(-1), new.reshape(-1)
    model = ChangeModel(delta_planner.plan([(old, new)], *kind, fast=True), encode=True)
    sparse = model.encode(old, new)
    if sparse is None:
        return
    found, work = model.listed(sparse, old, threads), old.copy()
    words = work.view(found.targets.dtype)
    words[found.positions] = found.targets
    assert np.array_equal(work, new)
    assert found.check == sparse.check
    assert found.check == delta_reference.check_of(Slow.parse(model.data), old.tobytes(), new.tobytes())
    if moved.any():
        assert found.check != model.listed(sparse, new, threads).check
    else:
        assert found.check == 0


def test_checks_are_of_models_of_one_class() -> None:
    old = pair("BF16", "normal", "some", 200_000)[0].view("<u2")
    new = old + ((old >> 7 & 255) < 118).astype("<u2")  # small weights alone
    words, target = old.view(np.uint8), new.view(np.uint8)
    model = model_of("BF16", words, target)
    assert model.classes > 1
    with pytest.raises(NativeError, match="several classes"):
        model.listed(_sparse(model, words, target), words)
