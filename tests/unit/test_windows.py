"""Windows: the slow codec of docs/windows.md, its own example, and what is asked before the core is."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.contents import rng
from support.windows import escapes, pruned, weights

from tpde.codec import window_cut, window_plan, windows, windows_encoder_reference
from tpde.codec import windows_reference as reference
from tpde.codec.window_plan import WindowPlan
from tpde.codec.windows import FLAG_ZERO, encoded_size, sections
from tpde.codec.windows_reference import ZERO, Coded
from tpde.errors import Corrupt, InvalidInput

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "windows.md"
WORDS = weights(40, 200)
BLOB = window_plan.encode(WORDS)

every_flag = pytest.mark.parametrize("flags", [0, ZERO])


# ---- the document ----


def _example() -> tuple[np.ndarray, str]:
    """Give the example's matrix, and the document's text about it."""
    text = DOCUMENT.read_text().partition("## 10.")[2]
    words = np.full((9, 40), 0x3C00, np.uint16)
    for row, column, octet in re.findall(r"^\| (\d), (\d+) to \d+ \| `([0-9a-f ]+)` \|", text, re.MULTILINE):
        words[int(row), int(column) : int(column) + 8] = [int(it, 16) for it in octet.split()]
    return words, text


def test_the_worked_example() -> None:
    words, text = _example()
    assert (words != 0x3C00).sum() == 32
    blob = windows_encoder_reference.encode(words)
    assert blob == window_plan.encode(words).tobytes()
    parsed = reference.parse(blob)
    header = bytes.fromhex(
        "".join(re.findall(r"^\| \d+ \| `((?:[0-9a-f]{2} ?){16})` \|", text, re.MULTILINE))
    )
    assert header == blob[:64]
    where = reference.sections_of(9, 40, 3)
    places = re.findall(
        r"at (\d+), the offsets `0, 3` at (\d+), .* at (\d+), .* at (\d+), .* (\d+) bytes", text
    )
    assert [*map(int, places[0])] == [where.records, where.offsets, where.entries, where.bodies, where.end]
    (records,) = re.findall(r"records are `([0-9a-f ]+)`", text)
    assert bytes.fromhex(records) == parsed.records[:9]
    (entries,) = re.findall(r"entries are `([0-9a-f ]+)`", text)
    assert [int(it, 16) for it in entries.split()] == parsed.entries[0]
    assert windows_encoder_reference.say(parsed.table)[0x50] == (0xB, 0xE)

    coded = reference.read_body(1, parsed.bodies[0])
    codes = re.findall(r"^\| (\d) \| ((?:\d ?){8}) \|", text, re.MULTILINE)
    assert [int(octet) for octet, _ in codes] == [0, 1, 2, 3]
    for octet, listed in codes:
        assert [it.code for it in coded[256 * int(octet) :][:8]] == [int(it) for it in listed.split()]
    rows = re.findall(
        r"^\| (code word|low bytes) \| (\d+) \| (\d+) \| `([0-9a-f]{8})` \|", text, re.MULTILINE
    )
    assert len(rows) == 3 + 8
    for what, number, offset, word in rows:
        at = (reference.code_word_at if what == "code word" else reference.low_word_at)(1, int(number), 0)
        assert at == int(offset)
        assert int.from_bytes(parsed.bodies[0][at : at + 4], "little") == int(word, 16)


def test_the_figure_of_the_overview() -> None:
    for word, code, low in ((0x3C01, 0b000, 0x81), (0xBC82, 0b101, 0x02)):
        assert reference.encode_word(word, 0x3B << 1 | 1, 0) == Coded(code, low, 0)


# ---- the slow codec ----


@every_flag
@given(st.integers(0, 65535), st.integers(0, 249))
def test_words_come_back(flags: int, word: int, record: int) -> None:
    if word >> 7 & 255 == 0:
        record &= ~1
    coded = reference.encode_word(word, record, flags)
    assert reference.decode_word(coded, record, flags) == word
    assert coded.xor < 128
    assert max(reference.window_of(record, flags)) <= 127


def test_places_are_all_words_of_a_chunk() -> None:
    for place in range(4096):
        assert reference.place_of(*reference.at_place(place)) == place
    assert {reference.at_place(it) for it in range(4096)} == set(itertools.product(range(16), range(256)))
    # An octet of lane 4g + q: row g, columns 8q to 8q + 7; a half of a tile is 8 rows of 32 words.
    assert [reference.at_place(it) for it in (0, 8, 32, 256, 512)] == [
        (0, 0),
        (0, 8),
        (1, 0),
        (8, 0),
        (0, 32),
    ]


@pytest.mark.parametrize("pairs", [1, 2, 3, 4])
def test_words_of_a_body_do_not_overlap(pairs: int) -> None:
    places = [
        at(pairs, number, lane)
        for at, count in ((reference.code_word_at, 3), (reference.low_word_at, 8))
        for number in range(count * pairs)
        for lane in range(32)
    ]
    assert sorted(places) == list(range(0, 1408 * pairs, 4))


@given(st.lists(st.lists(st.integers(0, 7), min_size=8, max_size=8), min_size=4, max_size=4))
def test_codes_of_four_octets_take_three_words(octets: list[list[int]]) -> None:
    words = reference.pack_codes(octets)
    assert all(word < 1 << 32 for word in words)
    assert reference.unpack_codes(words) == octets


def test_xors_are_said_by_the_fewest_entries() -> None:
    """Against sums over all sets."""
    draw = rng("tables")
    for _ in range(3):
        others = draw.permutation([x for x in range(1, 128) if x & (x - 1)])[:9].tolist()
        table = bytes(sorted([*reference.POWERS, *others]))
        best: dict[int, tuple[int, tuple[int, ...]]] = {}
        for size in range(1, 5):
            for indices in itertools.combinations(range(16), size):
                x = int(np.bitwise_xor.reduce([table[i] for i in indices]))
                best[x] = min(best.get(x, (99, ())), (size, indices))
        said = windows_encoder_reference.say(table)
        assert len(said) == 127
        assert {x: best[x][1] for x in said if x in best} == said


def test_rows_choose_the_lowest_of_the_best_windows() -> None:
    def record(*exponents: int, flags: int = 0) -> int:
        return windows_encoder_reference.choose_record(np.array(exponents, np.uint16) << 7, flags)

    assert record(100) == 93
    assert record(100, 107) == 100
    assert record(100, 108) == 93
    assert record(100, 0) == 0
    assert record(100, 100, 0) == 94
    assert record(255, 254) == 248
    assert record(0, 1, flags=ZERO) == 0
    assert record(0, 0, 100, flags=ZERO) == 96
    assert record(255, 250, flags=ZERO) == 245
    assert record(255, flags=ZERO) == 0  # no window of six reaches it


# ---- before the core ----


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
        (1 << 28, 1, 0),
        (1, 1 << 28, 0),
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
    side = (1 << 28) - 1
    assert sections(side, 4095).nbytes > side * 4095 * 11 // 8
    assert sections(1, side, (1 << 32) - 1).entries == (1 << 32) - 1
    assert sections(side, 1).stripes == 1 << 24


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
