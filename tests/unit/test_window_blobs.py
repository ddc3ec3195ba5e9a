"""Blobs of windows: their sizes, what is asked before the core is, and what encoders elsewhere choose."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from support.windows import escapes, pruned, weights

from tpde.codec import window_cut, window_plan, windows, windows_encoder_reference
from tpde.codec import windows_reference as reference
from tpde.codec.window_plan import WindowPlan
from tpde.codec.windows import FLAG_ZERO, encoded_size, sections
from tpde.codec.windows_reference import ZERO
from tpde.errors import Corrupt, InvalidInput

WORDS = weights(40, 200)
BLOB = window_plan.encode(WORDS)


def test_sizes_of_blobs() -> None:
    one = sections(1, 1)
    assert (one.records_at, one.offsets_at, one.entries_at, one.bodies_at) == (128, 256, 384, 384)
    assert one.nbytes == encoded_size(1, 1, 0) == 384 + 1408
    assert encoded_size(1, 1, 1) == encoded_size(1, 1, 64) == 512 + 1408
    for rows, columns, entries in (
        (16, 256, 0),
        (17, 257, 65),
        (100, 1000, 3),
        (5, 63, 1000),
        (1 << 20, 384, 9),
    ):
        found, needed = sections(rows, columns, entries), reference.sections_of(rows, columns, entries)
        assert found.nbytes == needed.end
        assert (found.stripes, found.stripe_chunks) == (needed.stripes, needed.chunks)
        assert found.stripe_bytes == 1408 * needed.pairs
        assert (found.records_at, found.offsets_at) == (needed.records, needed.offsets)
        assert (found.entries_at, found.bodies_at) == (needed.entries, needed.bodies)


@pytest.mark.parametrize(
    "given",
    [
        (0, 1, 0),
        (1, 0, 0),
        (-1, 1, 0),
        (1, -1, 0),
        (1, 1, -1),
        (1 << 27, 1, 0),
        (1, 1 << 27, 0),
        (1 << 20, 1 << 20, 0),
        (1, 1, 1 << 32),
        (1 << 64, 1, 0),
        ((1 << 64) + 1, 1, 0),
    ],
)
def test_matrices_without_a_window_layout(given: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidInput, match="has no window layout"):
        sections(*given)


def test_the_largest_matrices() -> None:
    side = (1 << 27) - 1
    assert sections(side, 8191).nbytes > side * 8191 * 11 // 8
    assert sections(1, side, (1 << 32) - 1).entries == (1 << 32) - 1
    assert sections(side, 1).stripes == 1 << 23


def test_what_is_no_matrix_is_refused() -> None:
    for wrong in (WORDS[0], WORDS.view(np.uint8), WORDS[None], WORDS.astype(np.float32)):
        with pytest.raises(ValueError, match="is no bf16 matrix"):
            WindowPlan(wrong)
    with pytest.raises(ValueError, match="contiguous"):
        WindowPlan(WORDS[:, ::2])
    for empty in (WORDS[:0], WORDS[:, :0].copy()):
        with pytest.raises(InvalidInput):
            WindowPlan(empty)


def test_a_plan_says_what_the_blob_takes() -> None:
    plan = WindowPlan(WORDS)
    assert plan.nbytes == encoded_size(*WORDS.shape, plan.entries) == BLOB.size
    assert plan.entries == windows.validate(BLOB).entries > 0
    out = np.zeros(plan.nbytes, np.uint8)
    assert plan.encode(out) is out or np.shares_memory(plan.encode(out), out)
    assert np.array_equal(out, BLOB)
    read_only = out.copy()
    read_only.flags.writeable = False
    for wrong in (out[:-1], np.zeros(plan.nbytes + 1, np.uint8), read_only):
        with pytest.raises(ValueError, match="an output of"):
            plan.encode(wrong)


def test_words_that_change_after_they_are_planned_are_refused() -> None:
    from tpde.errors import NativeError

    for change in (0, 0x7F80):
        words = WORDS.copy()
        plan = WindowPlan(words)
        words[:20] = change
        words[20:] ^= np.uint16(change)
        with pytest.raises(NativeError, match="not what the entries were counted in"):
            plan.encode()


def test_decoding_into_what_is_there() -> None:
    out = np.zeros(WORDS.shape, np.uint16)
    assert windows.decode(BLOB, out=out) is out
    assert np.array_equal(out, WORDS)
    for wrong in (out[:-1], out.view(np.uint8), out.reshape(200, 40), np.zeros((41, 200), np.uint16)):
        with pytest.raises(ValueError):
            windows.decode(BLOB, out=wrong)
    for rows in ((-1, 4), (3, 2), (0, 41), (41, 41)):
        with pytest.raises(ValueError, match="of 40"):
            windows.decode(BLOB, *rows)


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ((1, 16), (0, 200)),
        ((0, 17), (0, 200)),
        ((0, 0), (0, 200)),
        ((16, 0), (0, 200)),
        ((0, 41), (0, 200)),
        ((40, 40), (0, 200)),
        ((-16, 16), (0, 200)),
        ((0, 40), (32, 200)),
        ((0, 40), (0, 96)),
        ((0, 40), (64, 64)),
        ((0, 40), (0, 201)),
        ((0, 40), (0, 256)),
        ((0, 40), (-64, 64)),
    ],
)
def test_parts_that_cannot_be_cut_are_refused(rows: tuple[int, int], columns: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="cannot be cut out"):
        window_cut.cut(BLOB, rows, columns)
    with pytest.raises(ValueError, match="cannot be cut out"):
        windows_encoder_reference.cut(BLOB.tobytes(), *rows, *columns)


def test_a_cut_fills_what_is_given() -> None:
    needed = window_cut.cut_rows(BLOB, 16, 40)
    out = np.zeros(needed.size, np.uint8)
    window_cut.cut(BLOB, (16, 40), (0, 200), out=out)
    assert np.array_equal(out, needed)
    with pytest.raises(ValueError, match="an output of"):
        window_cut.cut(BLOB, (16, 40), (0, 200), out=out[1:])


def test_flags_are_those_of_the_document() -> None:
    assert FLAG_ZERO == reference.ZERO
    assert (windows.ROWS_AT, windows.COLUMNS_AT) == (reference.STRIPE_ROWS, reference.PAIR_COLUMNS)


def test_the_chunk_that_is_damaged_is_named() -> None:
    words = weights(64, 600)
    blob = window_plan.encode(words)
    found = windows.validate(blob)
    offsets = blob[found.offsets_at :][: 4 * 13].view("<u4")
    for threads in (1, 3):
        for chunk in (0, 4, 11):
            damaged = blob.copy()
            at = found.entries_at + 2 * int(offsets[chunk])
            damaged[at : at + 4] = 0
            with pytest.raises(Corrupt, match="do not ascend") as caught:
                windows.validate(damaged, threads)
            assert caught.value.chunk == chunk
            with pytest.raises(Corrupt, match="do not ascend"):
                windows.decode(damaged, threads=threads)


# ---- choosing for encoders elsewhere ----


def _counts(words: np.ndarray) -> np.ndarray:
    """Count the XORs of escapes, with the flag clear and set, as the reference says."""
    counts = np.zeros((2, 128), np.uint64)
    for zero, row in itertools.product((0, ZERO), words):
        record = windows_encoder_reference.choose_record(row, zero)
        for word in row.tolist():
            counts[zero, reference.encode_word(word, record, zero).xor] += 1
    counts[:, 0] = 0
    return counts


@pytest.mark.parametrize("make", [weights, pruned, escapes])
def test_table_and_flag_of_counts(make: Callable[[int, int], np.ndarray]) -> None:
    words = make(40, 200)
    window, said = window_plan.choose(40, 200, _counts(words))
    assert window == windows.validate(window_plan.encode(words))
    sets = {x: tuple(i for i in range(16) if it >> i & 1) for x, it in enumerate(said.tolist()) if x}
    assert sets == windows_encoder_reference.say(window.table)
    assert said[0] == 0


def test_counts_that_no_blob_has() -> None:
    counts = np.zeros((2, 128), np.uint64)
    with pytest.raises(ValueError, match=r"\(2, 127\)"):
        window_plan.choose(40, 200, counts[:, 1:])
    with pytest.raises(ValueError, match="int64"):
        window_plan.choose(40, 200, counts.view(np.int64))
    with pytest.raises(InvalidInput, match="no window layout"):
        window_plan.choose(0, 200, counts)
    counts[:, 1] = 1 << 32
    with pytest.raises(InvalidInput, match="a blob has fewer"):
        window_plan.choose(1 << 19, 1 << 20, counts)
