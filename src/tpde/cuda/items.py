"""Blobs as the kernels of `kernels/decode.cu` take them: their tables, expanded, and their descriptors."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tpde.codec import prefix_codes
from tpde.codec.native import Bytes
from tpde.codec.registry import Gpu, codec_of
from tpde.codec.selection import core_layout
from tpde.format.blob_header import BlobHeader, align

ALIGNMENT = 16  # of blobs, tables and descriptors
SHORT_BITS = 2  # of codewords whose entries fit into registers (`FEW` in decode.cu)
_WRAP = 1 << 64  # addresses before what is there may be negative, and add up modulo this

_ITEM = np.dtype(
    [
        *((name, "<u8") for name in ("blob", "index", "tables", "out", "words", "segment_words")),
        *((name, "<u8") for name in ("chunks", "low", "high", "first", "begin", "count")),
        *((name, "<u4") for name in ("chunk_words", "segment_chunks", "unit_log2")),
        *((name, "<u4") for name in ("table_bits", "tables_bytes", "number")),
        ("first_table", "u1", 8),
        ("table_count", "u1", 8),
    ]
)
DESCRIPTOR_BYTES = _ITEM.itemsize


class Tables(NamedTuple):
    """Expanded tables of a blob: `image` is what the device needs, `bits` the index bits of each."""

    image: Bytes
    bits: int
    pairs: int  # planes, one bit each, whose tables hold pairs
    short: int = 0  # planes whose codewords have `SHORT_BITS` or less


class StagedChunks(NamedTuple):
    """Chunks `first` to `last` of a blob, and the bytes of the blob that are there: from `low` to `high`."""

    first: int
    last: int
    low: int
    high: int


class Item(NamedTuple):
    """A blob on a device, or some chunks of one, and where its words go."""

    header: BlobHeader
    tables: Tables
    blob: int  # address from the launch's base, a multiple of 16; it may lie before what is there
    tables_at: int  # address of the image, a multiple of 16
    out: int  # byte offset of the blob's first word in the launch's output
    index_at: int | None = None  # address of the index map, by default in the blob
    chunks: StagedChunks | None = None  # by default all

    @property
    def chunk_count(self) -> int:
        """Number of chunks to decode."""
        return self.header.chunks if self.chunks is None else self.chunks.last - self.chunks.first + 1


def lookup_tables(header: BlobHeader, section: bytes) -> Tables | None:
    """Expand a blob's tables for the device.

    Parameters
    ----------
    header : BlobHeader
        Of a blob with prefix codes.
    section : bytes
        Its table section (format.md 3).

    Returns
    -------
    Tables or None
        None if the blob is not one for the GPU: another codec, or tables of both kinds for one plane, which
        no writer of ours makes.

    Raises
    ------
    Corrupt
        If a table is damaged.
    """
    if codec_of(header).gpu is not Gpu.KERNELS:
        return None
    tables = prefix_codes.PrefixCodec(core_layout(header), section).tables()
    pairs = short = 0
    for plane, (first, count) in enumerate(header.planes):
        some = tables[first : first + count]
        kinds = {it.kind for it in some}
        if len(kinds) > 1:
            return None
        pairs |= (kinds == {2}) << plane
        short |= (bool(some) and all(map(_is_short, some))) << plane
    bits = max((it.entries.size.bit_length() - 1 for it in tables), default=0)
    bits = max(bits, SHORT_BITS if short else 0)
    kind = np.dtype("<u4" if pairs else "<u2")
    size = align(len(tables) * kind.itemsize << bits, ALIGNMENT)
    image = np.zeros(size // kind.itemsize, kind)
    for i, table in enumerate(tables):
        entries = np.tile(table.entries, (1 << bits) // table.entries.size)
        # An escape's entry has no symbol; its raw bits take the place (`ESCAPE` in decode.cu).
        symbols = np.where(entries & 0x100, 0x80 | table.raw_bits << 8, entries >> 16 << (16 if pairs else 8))
        image[i << bits : i + 1 << bits] = entries & 0x1F | symbols
    return Tables(image.view(np.uint8), bits, pairs, short)


def _is_short(table: prefix_codes.PrefixTable) -> bool:
    """Whether four entries are all of it, as in planes of weights of which half are zeros."""
    return table.kind == 1 and not table.raw_bits and int((table.entries & 0x1F).max()) <= SHORT_BITS


def kind_defines(header: BlobHeader, tables: Tables) -> dict[str, int]:
    """Macros of the kernels that decode blobs of a kind."""
    coded = sum((count > 0) << plane for plane, (_, count) in enumerate(header.planes))
    return {
        "WORD": header.word_bytes,
        "ROTATE": header.rotate,
        "CODED": coded,
        "PAIRS": tables.pairs,
        "SHORT": tables.short,
    }


def descriptor(item: Item, number: int, first: int) -> npt.NDArray[np.void]:
    """What a kernel reads of an item, this number of a launch, whose items before have `first` chunks."""
    header = item.header
    part = item.chunks or StagedChunks(0, header.chunks - 1, 0, header.blob_bytes)
    row = np.zeros(1, _ITEM)
    row["blob"], row["out"] = item.blob % _WRAP, item.out % _WRAP
    row["index"] = item.blob + header.index_at if item.index_at is None else item.index_at
    row["tables"], row["words"], row["segment_words"] = item.tables_at, header.words, header.segment_words
    row["chunks"], row["low"], row["high"] = header.chunks, part.low, part.high
    row["first"], row["begin"], row["count"] = first, part.first, item.chunk_count
    row["chunk_words"], row["unit_log2"], row["number"] = header.chunk_words, header.unit_log2, number
    row["segment_chunks"] = -(-header.segment_words // header.chunk_words)
    row["table_bits"], row["tables_bytes"] = item.tables.bits, item.tables.image.size
    for plane, (table, count) in enumerate(header.planes):
        row["first_table"][0, plane], row["table_count"][0, plane] = table, count
    return row
