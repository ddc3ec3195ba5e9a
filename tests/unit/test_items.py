"""What kernels are told of a blob: addresses, chunks, tables; no GPU is needed for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.contents import fill
from support.packed import pack

from tpde.codec import reference
from tpde.cuda import decode
from tpde.cuda.items import DESCRIPTOR_BYTES, Chunks, Item, descriptor, lookup_tables
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
    part = item._replace(chunks=Chunks(5, 9, 1000, 2000), index_at=64, blob=-16)
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


@pytest.mark.parametrize("wrong", ["blob", "tables_at"])
def test_what_lies_at_odd_addresses_is_refused(packed: Any, wrong: str) -> None:
    tables = lookup_tables(packed.header, packed.section)
    assert tables is not None
    item = Item(packed.header, tables, 4096, 8192, 0)._replace(**{wrong: 4104})
    with pytest.raises(ValueError, match="item 0: blob and tables must start at multiples of 16"):
        decode.WorkList([item], 0)
    assert DESCRIPTOR_BYTES % 8 == 0
