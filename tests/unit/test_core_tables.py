"""The C core refuses layouts and tables that cannot be, as the document and Python's readers do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.core_layouts import coded_layout, layout_of, section_of
from support.craft import TABLE, edited_section, prefix_blob, refused

from tpde.codec import native, prefix_codes, reference
from tpde.errors import Corrupt, NativeError


@pytest.mark.parametrize(("longest", "raw"), [(12, 1), (11, 2), (6, 7)])
def test_an_index_above_twelve_bits_is_refused(longest: int, raw: int) -> None:
    counts = bytes(2 * (longest - 1)) + (1 << longest).to_bytes(2, "little")
    table = bytes([1, longest, raw, 0]) + counts + bytes(1 << longest)
    with pytest.raises(Corrupt, match="raw bits out of range"):
        prefix_codes.PrefixCodec(layout_of(), section_of(table))


def test_bytes_after_a_table_are_refused() -> None:
    table = TABLE.serialize()
    prefix_codes.PrefixCodec(layout_of(), section_of(table))
    with pytest.raises(Corrupt, match="does not fit its tables"):
        prefix_codes.PrefixCodec(layout_of(), section_of(table) + bytes(16))
    later = bytearray(section_of(table, table))
    prefix_codes.PrefixCodec(layout_of(2), bytes(later))
    later[2 * len(table) - 1] = 1
    with pytest.raises(Corrupt, match="table 1: padding after a table is not zero"):
        prefix_codes.PrefixCodec(layout_of(2), bytes(later))
    padded = reference.align(len(table), 16)
    blob = prefix_blob()
    for at in (len(table) - 1, padded - 1):  # of the table, and of the section
        refused(edited_section(blob, at, b"\1"), match="padding")


def test_a_seventeenth_table_is_refused() -> None:
    table = TABLE.serialize()
    assert len(prefix_codes.PrefixCodec(layout_of(16), section_of(*[table] * 16)).tables()) == 16
    with pytest.raises(NativeError, match="layout is not valid"):
        prefix_codes.PrefixCodec(layout_of(17), section_of(*[table] * 17))


def _wrong_plane(layout: native.CoreLayout) -> None:
    layout.first_table[1], layout.table_count[1] = 1, 1


@pytest.mark.parametrize(
    "change",
    [
        _wrong_plane,
        lambda it: setattr(it, "segment_words", 0),
        lambda it: setattr(it, "segment_words", it.words + 1),
        lambda it: setattr(it, "unit_log2", 3),
        lambda it: setattr(it, "unit_log2", 13),
        lambda it: setattr(it, "chunk_words", 256),
        lambda it: setattr(it, "chunk_words", 768),
        lambda it: setattr(it, "chunk_words", 1 << 17),
        lambda it: setattr(it, "word_bytes", 3),
        lambda it: setattr(it, "rotate", 2),
        lambda it: setattr(it, "words", 1 << 59),
    ],
)
def test_layouts_that_cannot_be_are_refused(change: Callable[[native.CoreLayout], None]) -> None:
    layout, section = coded_layout(), section_of(TABLE.serialize())
    prefix_codes.PrefixCodec(layout, section)
    change(layout)
    with pytest.raises(NativeError, match="the layout is not valid"):
        prefix_codes.PrefixCodec(layout, section)


def test_a_table_without_an_escape_writes_every_value_or_nothing() -> None:
    few = reference.Table.from_lengths(1, 1, 0, {3: 1, 4: 1}).serialize()
    prefix_codes.PrefixCodec(layout_of(), section_of(few))
    with pytest.raises(NativeError, match="without an escape cannot write every value"):
        prefix_codes.PrefixCodec(layout_of(), section_of(few), encode=True)
    every = reference.Table.from_lengths(1, 8, 0, dict.fromkeys(range(256), 8)).serialize()
    prefix_codes.PrefixCodec(layout_of(), section_of(every), encode=True)


def _opens(table: bytes) -> bool:
    try:
        prefix_codes.PrefixCodec(layout_of(), section_of(table))
    except Corrupt:
        return False
    return True


def _parses(table: bytes) -> bool:
    try:
        made, end = reference.Table.parse(section_of(table), 0)
    except Corrupt:
        return False
    rest = section_of(table)[end:]
    return made.kind < 3 and len(rest) < 16 and not any(rest)


@pytest.mark.parametrize("kind", [1, 2])
def test_tables_are_refused_as_the_document_says(kind: int) -> None:
    """Bytes changed anywhere, and counts moved from one length to another."""
    lengths = {1: 1, 2: 3, 3: 4, 5: 5, 4: 5, 9: 3, 6: 5, 7: 5} if kind == 1 else {256: 1, 2: 2, 770: 4, 5: 4}
    escape = 4 if kind == 1 else 3
    whole = reference.Table.from_lengths(kind, 5 if kind == 1 else 4, 0, lengths, escape).serialize()
    assert _opens(whole)
    draw, refused = np.random.default_rng(kind), 0
    for number in range(800):
        data = bytearray(whole)
        at = number % len(whole) if number < 300 else int(draw.integers(0, len(whole)))
        data[at] = (data[at] + int(draw.integers(-2, 3))) & 255 if number % 3 else int(draw.integers(0, 256))
        assert _opens(bytes(data)) == _parses(bytes(data)), data.hex()
        refused += not _opens(bytes(data))
    assert 200 < refused < 750


def test_an_escape_is_no_longer_than_the_longest_codeword() -> None:
    table = bytearray(TABLE.serialize())
    table[3] = table[1] + 1
    with pytest.raises(Corrupt, match="escape longer than the longest codeword"):
        prefix_codes.PrefixCodec(layout_of(), section_of(bytes(table)))
