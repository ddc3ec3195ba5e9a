"""The slow codec of docs/windows.md, and the document's own example."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.contents import rng

from tpde.codec import window_plan, windows_encoder_reference
from tpde.codec import windows_reference as reference
from tpde.codec.windows_reference import ZERO, Coded

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "windows.md"
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
