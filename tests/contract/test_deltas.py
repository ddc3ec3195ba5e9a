"""The delta codec of the core: any two states of any tensor, as the slow codec of docs/delta.md has it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.contents import rng
from support.deltas import CHANGES, model_of, pair

from tpde.codec import delta, fingerprints, native
from tpde.codec import delta_reference as reference
from tpde.codec.native import Bytes
from tpde.errors import Corrupt, TpdeError
from tpde.format.constants import DTYPES

CONTENTS = ("normal", "specials", "zeros", "random")
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
modes = pytest.mark.parametrize("fast", [False, True], ids=["classes", "fast"])


def _chunks(sparse: delta.Sparse) -> list[tuple[bytes, int]]:
    ends = np.cumsum([0, *sparse.sizes], dtype=np.int64)
    return [
        (sparse.data[begin:end].tobytes(), int(changes))
        for (begin, end), changes in zip(itertools.pairwise(ends), sparse.changes, strict=True)
    ]


def _applied(model: delta.ChangeModel, sparse: delta.Sparse, old: Bytes, threads: int = 1) -> Bytes:
    out = old.copy()
    model.apply(sparse, out, threads, dry=True)
    assert (out == old).all(), "a dry run changed a word"
    model.apply(sparse, out, threads)
    return out


@modes
@every_dtype
def test_every_state_comes_back_and_as_the_document_says(dtype: str, fast: bool) -> None:
    for content in CONTENTS:
        for change in CHANGES:
            for words in (0, 1, 63, 64, 65, 700):
                old, new = pair(dtype, content, change, words)
                model = model_of(dtype, old, new, fast=fast)
                sparse = model.encode(old, new)
                if sparse is None:  # more than the words themselves
                    assert change in ("all", "most", "signs") or words < 64, (content, change, words)
                    continue
                assert (_applied(model, sparse, old) == new).all(), (content, change, words)
                slow = reference.Model.parse(model.data)
                assert reference.encode(slow, old.tobytes(), new.tobytes()) == _chunks(sparse)
                assert reference.decode(slow, old.tobytes(), _chunks(sparse)) == new.tobytes()


@modes
@every_dtype
def test_models_write_what_they_were_not_made_for(dtype: str, fast: bool) -> None:
    """Every change can be written under every model: gaps and steps that the sample did not have."""
    model = model_of(dtype, *pair(dtype, "normal", "few", 300), fast=fast)
    slow = reference.Model.parse(model.data)
    old, new = pair(dtype, "random", "some", 500)
    sparse = model.encode(old, new)
    assert sparse is not None
    assert (_applied(model, sparse, old) == new).all()
    assert reference.encode(slow, old.tobytes(), new.tobytes()) == _chunks(sparse)


@modes
@pytest.mark.parametrize("dtype", ["BF16", "F32", "F8_E4M3", "I64"])
def test_neither_threads_nor_instruction_sets_change_a_byte(
    dtype: str, fast: bool, simd_restored: None
) -> None:
    old, new = pair(dtype, "normal", "few", 3 * delta.CHUNK_WORDS + 1021)
    found = set()
    for path in native.simd_available():
        native.simd_select(path)
        for threads in (1, 3):
            model = model_of(dtype, old, new, fast=fast)
            sparse = model.encode(old, new, threads)
            assert sparse is not None
            found.add((model.data, *(part.tobytes() for part in sparse[:3]), sparse.check))
            assert (_applied(model, sparse, old, threads) == new).all()
    assert len(found) == 1


@settings(max_examples=500)
@given(st.data())
def test_any_pair_of_tensors(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(sorted(DTYPES)))
    b = DTYPES[dtype].word_bytes
    old = np.frombuffer(data.draw(st.binary(max_size=40 * b)), np.uint8)
    old = old[: old.size // b * b].copy()
    new = old.copy()
    for _ in range(data.draw(st.integers(0, 8)) if old.size else 0):
        new[data.draw(st.integers(0, old.size - 1))] = data.draw(st.integers(0, 255))
    model = model_of(dtype, old, new, fast=data.draw(st.booleans()))
    sparse = model.encode(old, new)
    if sparse is not None:
        assert (_applied(model, sparse, old) == new).all()


@modes
def test_every_prefix_of_the_chunks_is_refused(fast: bool) -> None:
    old, new = pair("BF16", "normal", "some", 400)
    model = model_of("BF16", old, new, fast=fast)
    sparse = model.encode(old, new)
    assert sparse is not None
    for end in range(sparse.data.size):
        out = old.copy()
        with pytest.raises(Corrupt):
            model.apply(sparse._replace(data=sparse.data[:end]), out)
        with pytest.raises(Corrupt):
            model.apply(sparse._replace(data=sparse.data[:end], sizes=np.array([end], np.uint32)), out)
    with pytest.raises(Corrupt):
        model.apply(sparse._replace(data=np.append(sparse.data, np.uint8(0))), old.copy())


@modes
@pytest.mark.parametrize("dtype", ["BF16", "F64", "U8"])
def test_changed_bytes_are_refused_or_decode_alike(dtype: str, fast: bool, simd_restored: None) -> None:
    old, new = pair(dtype, "specials", "some", 300)
    model = model_of(dtype, old, new, fast=fast)
    sparse, draw = model.encode(old, new), rng("mutations", dtype)
    assert sparse is not None
    slow = reference.Model.parse(model.data)
    refused = 0
    for _ in range(150):
        data, changes = sparse.data.copy(), sparse.changes.copy()
        if draw.random() < 0.2:
            changes[0] = draw.integers(0, 400)
        else:
            data[draw.integers(0, data.size)] ^= draw.integers(1, 256)
        damaged, outcomes = sparse._replace(data=data, changes=changes), set()
        for path in native.simd_available():
            native.simd_select(path)
            try:
                outcomes.add(_applied(model, damaged, old).tobytes())
            except Corrupt:
                outcomes.add(b"refused")
        try:
            outcomes.add(reference.decode(slow, old.tobytes(), _chunks(damaged)))
        except Corrupt:
            outcomes.add(b"refused")
        assert len(outcomes) == 1
        refused += b"refused" in outcomes
    assert refused > 0


def test_a_dry_run_finds_what_a_wet_one_would() -> None:
    old, new = pair("BF16", "normal", "some", 400)
    model = model_of("BF16", old, new)
    sparse = model.encode(old, new)
    assert sparse is not None
    damaged, out = sparse._replace(changes=sparse.changes + 9), old.copy()
    with pytest.raises(Corrupt, match="changes") as caught:
        model.apply(damaged, out, dry=True)
    assert caught.value.chunk == 0
    assert (out == old).all()


def test_models_are_refused_as_the_document_says() -> None:
    """Every prefix, and bytes changed anywhere: the core refuses what the slow codec refuses."""
    whole = model_of("BF16", *pair("BF16", "normal", "some", 3000)).data
    for end in range(len(whole)):
        with pytest.raises(Corrupt):
            delta.ChangeModel(whole[:end])
    draw, refused = rng("models"), 0
    for _ in range(2000):
        data = bytearray(whole)
        data[int(draw.integers(0, len(data)))] ^= int(draw.integers(1, 256))
        outcomes = []
        for opener in (reference.Model.parse, delta.ChangeModel):
            try:
                opener(bytes(data))
                outcomes.append(True)
            except TpdeError:
                outcomes.append(False)
        assert outcomes[0] == outcomes[1], data.hex()
        refused += not outcomes[0]
    assert refused > 1000


@given(st.binary(max_size=3000), st.integers(0, 300))
def test_fingerprints_are_those_of_the_document_and_add_up(data: bytes, cut: int) -> None:
    whole = fingerprints.fingerprint(data)
    assert whole == reference.fingerprint(data)
    at = min(8 * cut, len(data) // 8 * 8)
    tail, head = fingerprints.fingerprint(data[at:], at), fingerprints.fingerprint(data[:at])
    assert (np.frombuffer(tail, "<u8") + np.frombuffer(head, "<u8")).tobytes() == whole


def test_every_instruction_set_gives_the_same_fingerprint(simd_restored: None) -> None:
    data = rng("prints").bytes(100_003)
    found = set()
    for path in native.simd_available():
        native.simd_select(path)
        found.add(fingerprints.fingerprint(data))
    assert len(found) == 1


def test_changes_are_found_by_exponent() -> None:
    """Words of one exponent in ten change: their positions then take bits for a tenth of the words."""
    draw = rng("exponents")
    n = 4 * delta.CHUNK_WORDS
    exponent = draw.integers(0, 10, n).astype(np.uint16) + 110
    old = exponent << 7 | draw.integers(0, 128, n).astype(np.uint16)
    new = np.where((exponent == 110) & (draw.random(n) < 0.1), old ^ 1, old)
    states = old.view(np.uint8), new.view(np.uint8)
    one, other = (
        model_of("BF16", *states).encode(*states),
        model_of("BF16", *states, fast=True).encode(*states),
    )
    assert one is not None
    assert other is not None
    entropy = int((old != new).sum()) * (4.69 + 1.0)  # 10 % of a tenth, and the sign
    assert 8 * one.data.size < 1.03 * entropy
    assert 8 * other.data.size > 1.4 * entropy
