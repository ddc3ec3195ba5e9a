"""What kernels are told of a blob: addresses, chunks, tables; no GPU is needed for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.contents import fill
from support.packed import pack

from tpde.codec import reference
from tpde.codec.selection import base_header
from tpde.cuda import decode
from tpde.cuda.items import DESCRIPTOR_BYTES, Item, StagedChunks, descriptor, kind_defines, lookup_tables
from tpde.format.constants import CODEC_PREFIX, CODEC_ZSTD
from tpde.format.container import TensorSpec

SPEC = TensorSpec("BF16", (3, 700, 1024))  # segments of 87.5 chunks: each starts a chunk of its own


@pytest.fixture(scope="module")
def packed() -> Any:
    return pack(SPEC, fill("normal", SPEC))


def test_a_descriptor_says_where_everything_is(packed: Any) -> None:
    tables = lookup_tables(packed.header, packed.section)
    assert tables is not None
    item = Item(packed.header, tables, 4096, 8192, 512)
    (row,) = descriptor(item, 7, 100)
    header = packed.header
    assert header.segment_words == 700 * 1024
    assert row["segment_chunks"] == 88
    assert header.chunks == 3 * 88
    assert (row["blob"], row["out"], row["tables"]) == (4096, 512, 8192)
    assert row["index"] == 4096 + header.index_at
    assert (row["first"], row["begin"], row["count"], row["number"]) == (100, 0, 264, 7)
    assert (row["low"], row["high"], row["chunks"]) == (0, header.blob_bytes, 264)
    part = item._replace(chunks=StagedChunks(5, 9, 1000, 2000), index_at=64, blob=-16)
    (row,) = descriptor(part, 0, 0)
    assert (row["begin"], row["count"], row["low"], row["high"], row["index"]) == (5, 5, 1000, 2000, 64)
    assert row["blob"] == (1 << 64) - 16, "it may lie before what is there"


def test_tables_for_kernels_are_those_of_the_document(packed: Any) -> None:
    """Each entry has its bits in the lowest byte, the symbol above, or an escape's raw bits."""
    tables = lookup_tables(packed.header, packed.section)
    assert tables is not None
    kind = np.dtype("<u4" if tables.pairs else "<u2")
    image = tables.image.view(kind)
    found, at, escapes = [], 0, 0
    for number in range(packed.header.tables):
        table, at = reference.Table.parse(packed.section, at)
        size = 1 << (table.max_bits + table.raw_bits)
        entries = image[number << tables.bits :][:size]
        escapes += int(((entries & 0x80) != 0).sum())
        found.append(entries)
        assert ((entries & 0x1F) <= table.max_bits + table.raw_bits).all()
        assert ((entries & 0x1F) >= 1).all()
    assert found
    assert escapes > 0, "weights have rare exponents, which escape"


def _opened(tables: list[reference.Table], planes: list[tuple[int, int]], dtype: str = "BF16") -> Any:
    """Tables of a blob of these, and the blob's header."""
    section = b"".join(it.serialize() for it in tables)
    section = section.ljust(reference.align(len(section), 16), b"\0")
    header = base_header(TensorSpec(dtype, (5000,)), CODEC_PREFIX)
    header = replace(header, tables=len(tables), tables_bytes=len(section), planes=tuple(planes))
    return lookup_tables(header, section), header


SHORT = reference.Table.from_lengths(1, 2, 1, {5: 1, 6: 2}, 2)
LONG = reference.Table.from_lengths(1, 4, 0, {7: 1, 8: 2, 9: 3, 10: 4}, 4)
PAIRS = reference.Table.from_lengths(2, 3, 0, {0x0102: 1, 0x0304: 2, 0x0506: 3}, 3)


def test_entries_of_tables_of_single_symbols() -> None:
    """The shorter of two is repeated until it is as long: bits of both index it alike."""
    tables, _ = _opened([SHORT, LONG], [(0, 0), (0, 2)])
    assert (tables.bits, tables.pairs, tables.image.size) == (4, 0, 2 * 16 * 2)
    short, long = tables.image.view("<u2").reshape(2, 16)
    # Codewords of 0, 10 and the escape 11, first bit lowest; behind them a raw bit, but for the escape.
    values = {0: 5 << 1, 1: 6 << 1, 2: 5 << 1 | 1, 4: 5 << 1, 5: 6 << 1 | 1, 6: 5 << 1 | 1}
    bits = {0: 2, 1: 3, 2: 2, 4: 2, 5: 3, 6: 2}
    expected = [0x80 | 1 << 8 | 2 if i % 4 == 3 else values[i] << 8 | bits[i] for i in range(8)]
    assert short.tolist() == expected * 2
    assert long[0b0000] == 7 << 8 | 1
    assert long[0b0001] == 8 << 8 | 2
    assert long[0b0011] == 9 << 8 | 3
    assert long[0b0111] == 10 << 8 | 4
    assert long[0b1111] == 0x80 | 4


@pytest.mark.parametrize(
    ("made", "short"),
    [
        ((1, 1, 0, {7: 1, 9: 1}), True),
        ((1, 1, 0, {7: 1}, 1), True),
        ((1, 2, 0, {7: 2, 9: 2}, 1), True),
        ((1, 2, 0, {7: 1, 9: 2}, 2), True),
        ((1, 2, 0, {7: 2, 9: 2, 10: 2, 11: 2}), True),
        ((1, 12, 0, {7: 1, 9: 2}, 2), True),
        ((1, 3, 0, {7: 1, 9: 2, 10: 3}, 3), False),
        ((1, 3, 0, {7: 2, 9: 3, 10: 3}, 1), False),
        ((1, 1, 1, {7: 1}, 1), False),
        ((2, 1, 0, {0x0101: 1}, 1), False),
    ],
)
def test_planes_whose_tables_have_four_entries(made: Any, short: bool) -> None:
    """Codewords of two bits or less, without raw bits: the kernel reads no more than four entries."""
    table = reference.Table.from_lengths(*made)
    assert _opened([table], [(0, 0), (0, 1)])[0].short == 0b10 * short
    assert _opened([table, LONG], [(0, 1), (1, 1)])[0].short == 0b01 * short
    tables, header = _opened([table, table], [(0, 2), (1, 1)])
    assert tables.short == 0b11 * short
    assert kind_defines(header, tables)["SHORT"] == tables.short
    assert tables.bits >= 2 * short
    several, _ = _opened([table, LONG], [(0, 0), (0, 2)])
    assert several is None or not several.short, "all tables of a plane must be"


def test_entries_of_tables_of_pairs() -> None:
    tables, _ = _opened([PAIRS, SHORT], [(1, 1), (0, 1)])
    assert (tables.bits, tables.pairs, tables.image.size) == (3, 0b10, 2 * 8 * 4)
    pairs, short = tables.image.view("<u4").reshape(2, 8)
    assert pairs[0] == 0x0102 << 16 | 1
    assert pairs[0b001] == 0x0304 << 16 | 2
    assert pairs[0b011] == 0x0506 << 16 | 3
    assert pairs[0b111] == 0x80 | 3
    assert short[0] == (5 << 1) << 16 | 2
    assert short[0b011] == 0x80 | 1 << 8 | 2


def test_images_end_at_multiples_of_16() -> None:
    one, _ = _opened([reference.Table.from_lengths(1, 1, 0, {1: 1, 2: 1})], [(0, 0), (0, 1)])
    assert (one.bits, one.image.size) == (2, 16)
    assert one.image[:8].view("<u2").tolist() == [1 << 8 | 1, 2 << 8 | 1] * 2
    assert not one.image[8:].any()
    none, header = _opened([], [(0, 0), (0, 0)])
    assert (none.bits, none.pairs, none.image.size) == (0, 0, 0)
    assert kind_defines(header, none)["CODED"] == 0


def test_what_is_not_for_these_kernels_has_no_tables() -> None:
    assert _opened([SHORT, PAIRS], [(0, 0), (0, 2)])[0] is None, "of both kinds for one plane"
    assert _opened([SHORT, PAIRS], [(0, 1), (1, 1)])[0] is not None
    spec = TensorSpec("U16", (5000,))
    assert lookup_tables(base_header(spec, CODEC_ZSTD, 65536), b"") is None


@pytest.mark.parametrize(
    ("planes", "coded", "pairs"),
    [
        ([(0, 0), (0, 1)], 0b10, 0),
        ([(0, 1), (0, 2)], 0b11, 0),
        ([(0, 1), (2, 1)], 0b11, 0b10),
        ([(1, 1), (0, 0)], 0b01, 0),
        ([(2, 1), (0, 0)], 0b01, 0b01),
    ],
)
def test_kernels_are_made_for_the_planes_that_are_coded(
    planes: list[tuple[int, int]], coded: int, pairs: int
) -> None:
    tables, header = _opened([SHORT, LONG, PAIRS], planes)
    expected = {"WORD": 2, "ROTATE": 1, "CODED": coded, "PAIRS": pairs, "SHORT": 0}
    assert kind_defines(header, tables) == expected


def test_a_descriptor_holds_all_of_the_header() -> None:
    tables, header = _opened([SHORT, LONG, PAIRS], [(1, 1), (0, 2)])
    header = replace(header, unit_log2=5, blob_bytes=9999, segment_words=2500)
    (row,) = descriptor(Item(header, tables, 0, 64, -32), 1, 2)
    assert (row["words"], row["segment_words"], row["chunk_words"]) == (5000, 2500, 8192)
    assert (row["unit_log2"], row["segment_chunks"], row["chunks"], row["high"]) == (5, 1, 2, 9999)
    assert (row["table_bits"], row["tables_bytes"]) == (tables.bits, tables.image.size)
    assert row["first_table"].tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    assert row["table_count"].tolist() == [1, 2, 0, 0, 0, 0, 0, 0]
    assert row["out"] == (1 << 64) - 32
    assert descriptor(Item(header, tables, 0, 64, 0, index_at=0), 1, 2)["index"][0] == 0


@pytest.mark.parametrize("wrong", ["blob", "tables_at"])
def test_what_lies_at_odd_addresses_is_refused(packed: Any, wrong: str) -> None:
    tables = lookup_tables(packed.header, packed.section)
    assert tables is not None
    item = Item(packed.header, tables, 4096, 8192, 0)._replace(**{wrong: 4104})
    with pytest.raises(ValueError, match="item 0: blob and tables must start at multiples of 16"):
        decode.WorkList([item], 0)
    assert DESCRIPTOR_BYTES % 8 == 0
