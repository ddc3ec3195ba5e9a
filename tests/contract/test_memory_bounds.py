"""The core reads and writes nothing behind a buffer: it would crash here, where nothing is there."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys

import numpy as np
import pytest
from support.contents import fill, rng
from support.craft import TABLE
from support.deltas import model_of, pair
from support.guarded import guarded, room
from support.windows import MATRICES

from tpde.codec import (
    core_chunks,
    delta,
    fingerprints,
    native,
    prefix_codes,
    reference,
    window_cut,
    window_plan,
    windows,
)
from tpde.errors import Corrupt, NativeError, TpdeError
from tpde.format.constants import RECORD_BYTES
from tpde.format.container import TensorSpec

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs mprotect")
every_path = pytest.mark.parametrize("path", native.simd_available())
CHUNK = 512  # words, the fewest
EVERY = ("F8_E5M2", "I8", "BF16", "F16", "U16", "F32", "F64")


def _layout(dtype: str, words: int) -> native.CoreLayout:
    facts = reference.DTYPES[dtype]
    return native.CoreLayout(
        words=words,
        segment_words=max(words, 1),
        chunk_words=CHUNK,
        word_bytes=facts.word_bytes,
        rotate=facts.rotate,
        unit_log2=4,
    )


def _planned(dtype: str, words: int) -> tuple[prefix_codes.PrefixCodec, np.ndarray, int]:
    """Give a codec for chunks of 512 words, the words, guarded, and the number of chunks."""
    data = np.frombuffer(fill("normal", TensorSpec(dtype, (words,))), np.uint8).copy()
    draw = rng("escapes", dtype)
    data[draw.integers(0, data.size, 1 + data.size // 100)] = draw.integers(0, 256)
    layout = _layout(dtype, words)
    section, _ = prefix_codes.plan(layout, guarded(data))
    return (
        prefix_codes.PrefixCodec(layout, guarded(section), encode=True),
        guarded(data),
        core_chunks.chunk_count(layout),
    )


@every_path
@pytest.mark.parametrize("dtype", EVERY)
@pytest.mark.parametrize("words", [1, 511, 512, 513, 2048, 20_001])
def test_encoding_and_decoding(dtype: str, words: int, path: str, simd_restored: None) -> None:
    native.simd_select(path)
    codec, data, chunks = _planned(dtype, words)
    out = room(codec.bound(words, chunks))
    for threads in (1, 3):
        made = codec.encode(data, 0, chunks, 0, out, threads)
        coded, records, back = guarded(made.data), guarded(made.records), room(data.size)
        core_chunks.index_check(codec.layout, records, 0, coded.size, 1 << 20)
        codec.decode(records, 0, coded, 0, coded.size, back, threads)
        assert np.array_equal(back, data)


@every_path
@pytest.mark.parametrize("dtype", EVERY)
def test_damaged_chunks_and_those_that_are_cut(dtype: str, path: str, simd_restored: None) -> None:
    native.simd_select(path)
    codec, data, chunks = _planned(dtype, 2 * CHUNK)
    made = codec.encode(data, 0, chunks, 0, np.empty(codec.bound(2 * CHUNK, chunks), np.uint8))
    coded, records, draw = guarded(made.data), guarded(made.records), rng("damage", dtype)
    last, back = int(made.records[RECORD_BYTES:].view("<u4")[0]) << 4, room(data.size)
    refused = 0
    for at in range(last, coded.size, 3):
        before, coded[at] = coded[at], draw.integers(0, 256)
        try:
            codec.decode(records, 0, coded, 0, coded.size, back)
        except Corrupt:
            refused += 1
        coded[at] = before
    assert refused > 30
    for size in range(last, coded.size - 16, 7):
        with pytest.raises(Corrupt):
            codec.decode(records, 0, guarded(coded[:size]), 0, size, back)


@every_path
@pytest.mark.parametrize("dtype", EVERY)
def test_planes_checksums_and_fingerprints(dtype: str, path: str, simd_restored: None) -> None:
    native.simd_select(path)
    code = reference.DTYPES[dtype]
    for n in (0, 1, 7, 8, 15, 16, 31, 33, 63, 64, 65, 130):
        words = guarded(rng(dtype, n).bytes(n * code.word_bytes))
        layout = _layout(dtype, n)
        planes = room(words.size).reshape(code.word_bytes, n)
        native.core().tpde_split(layout, words.ctypes.data, n, planes.ctypes.data, n)
        assert [plane.tobytes() for plane in planes] == reference.split(
            words.tobytes(), code.word_bytes, code.rotate
        )
        back = room(words.size)
        core_chunks.merge(layout, planes, back)
        assert np.array_equal(back, words)
        assert core_chunks.checksum(words) == reference.checksum(words.tobytes())
        assert fingerprints.fingerprint(words) == fingerprints.fingerprint(words.tobytes())


@every_path
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8", "BF16", "U16", "F32", "F64"])
def test_deltas(dtype: str, fast: bool, path: str, simd_restored: None) -> None:
    native.simd_select(path)
    draw = rng("bounds", dtype)
    for words in (1, 63, 65, 700):
        old, new = (guarded(it) for it in pair(dtype, "normal", "some", words))
        model = model_of(dtype, old, new, fast=fast)
        sparse = model.encode(old, new)
        if sparse is None:
            continue
        target, data = guarded(old), guarded(sparse.data)
        model.apply(sparse._replace(data=data), target)
        assert np.array_equal(target, new)
        for _ in range(60 if data.size else 0):
            at = int(draw.integers(0, data.size))
            before, data[at] = data[at], draw.integers(0, 256)
            target[:] = old
            with contextlib.suppress(Corrupt):
                model.apply(sparse._replace(data=data), target)
            data[at] = before


@pytest.mark.parametrize("dtype", ["BF16", "I64"])
def test_changes_have_no_more_room_than_they_are_given(dtype: str) -> None:
    """Chunks of which everything changes take more than their part of the output."""
    b = reference.DTYPES[dtype].word_bytes
    old, _ = pair(dtype, "normal", "none", 2 * delta.CHUNK_WORDS)
    new = np.frombuffer(rng("other", dtype).bytes(old.size), np.uint8)
    model = model_of(dtype, *pair(dtype, "normal", "few", 500))
    chunks = np.zeros(2, np.uint32)
    used, error = ctypes.c_uint64(), native.Error()
    for size in (2 * 29, *range(2 * 60, 2 * 90, 2), 2000, old.size // 4):
        out = room(size)
        code = native.core().tpde_delta_encode(
            *(model._handle, old.ctypes.data, new.ctypes.data, old.size // b, out.ctypes.data, size, used),
            *(chunks.ctypes.data, chunks.copy().ctypes.data, 0, ctypes.c_uint64(), 2, error),
        )
        assert code == native.E_SPACE


def test_tables_and_models_that_are_cut() -> None:
    table, layout = TABLE.serialize(), _layout("BF16", 2048)
    layout.tables = 1
    for size in range(len(table)):
        with pytest.raises(TpdeError):
            prefix_codes.PrefixCodec(layout, guarded(table[:size]))
    whole = model_of("BF16", *pair("BF16", "normal", "some", 3000)).data
    handle, error = ctypes.c_void_p(), native.Error()
    for size in range(len(whole)):
        part = guarded(whole[:size])
        assert native.core().tpde_delta_model_open(part.ctypes.data, size, 1, handle, error)
        assert not handle.value


def _parts(size: int, unit: int) -> list[tuple[int, int]]:
    """Where a part can be cut out."""
    return list(itertools.combinations([*range(0, size, unit), size], 2))


@pytest.mark.parametrize("content", ["weights", "pruned", "escapes"])
@pytest.mark.parametrize("shape", [(1, 1), (16, 256), (19, 330), (33, 65)], ids=str)
def test_windows(content: str, shape: tuple[int, int]) -> None:
    words = guarded(MATRICES[content](*shape).tobytes()).view("<u2").reshape(shape)
    for threads in (1, 3):
        plan = window_plan.WindowPlan(words, threads)
        blob = plan.encode(room(plan.nbytes), threads)
        windows.validate(blob, threads)
        back = room(words.nbytes).view("<u2").reshape(shape)
        assert np.array_equal(windows.decode(blob, out=back, threads=threads), words)
        for rows, columns in itertools.product(_parts(shape[0], 16), _parts(shape[1], 64)):
            size = window_cut.cut(blob, rows, columns).size
            part = window_cut.cut(blob, rows, columns, out=room(size), threads=threads)
            height, width = rows[1] - rows[0], columns[1] - columns[0]
            back = room(2 * height * width).view("<u2").reshape(height, width)
            windows.decode(part, out=back)
            assert np.array_equal(back, words[slice(*rows), slice(*columns)])


def test_words_that_change_while_they_are_encoded() -> None:
    """Those of one stripe need more entries than were counted, and than a blob has bytes."""
    words = MATRICES["weights"](16, 2000).copy()
    plan = window_plan.WindowPlan(words)
    words[:] = MATRICES["escapes"](16, 2000)
    assert 2 * window_plan.WindowPlan(words).entries > plan.nbytes
    with pytest.raises(NativeError, match="not what the entries were counted in"):
        plan.encode(room(plan.nbytes))
