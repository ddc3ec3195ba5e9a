"""Decoding prefix-coded blobs on a GPU: what the kernels of `kernels/decode.cu` take, and their launches.

Nothing here allocates on the device: callers put `lookup_tables` and `WorkList.descriptors` there, and pass
addresses. Launches go to the caller's stream and synchronize nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tpde.codec import native
from tpde.codec.native import Bytes
from tpde.codec.plan import core_layout
from tpde.cuda import compile as nvrtc
from tpde.cuda.device import DeviceFacts, facts
from tpde.format.blob import BlobHeader, align
from tpde.format.constants import CODEC_PREFIX

SOURCE = "decode.cu"
WARPS = 24  # a block's, where registers and shared memory allow: see benchmarks/results/gpu_decode.md
_ROW_WARPS = 8
ALIGNMENT = 16  # of blobs, tables and descriptors

# What a lane may read beyond its bits: every symbol an escape, of 20 bits for one or 28 for a pair
# (format.md 3), so at most 20 bits a symbol, and the two words read ahead.
_SLACK_BITS = 20

_ITEM = np.dtype(
    [
        *((name, "<u8") for name in ("blob", "tables", "out", "words", "segment_words")),
        *((name, "<u8") for name in ("blob_bytes", "chunks", "index_at", "first")),
        *((name, "<u4") for name in ("chunk_words", "segment_chunks", "unit_log2")),
        *((name, "<u4") for name in ("table_bits", "tables_bytes", "number")),
        ("first_table", "u1", 8),
        ("table_count", "u1", 8),
        ("reserved", "<u8", 2),
    ]
)


class Tables(NamedTuple):
    """Expanded tables of a blob: `image` is what the device needs, `bits` the index bits of each."""

    image: Bytes
    bits: int
    pairs: int  # planes, one bit each, whose tables hold pairs


class Item(NamedTuple):
    """A blob on a device, and where its words go."""

    header: BlobHeader
    tables: Tables
    blob: int  # address, a multiple of 16
    tables_at: int  # address of the image, a multiple of 16
    out: int  # byte offset in the launch's output


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
    if header.codec != CODEC_PREFIX:
        return None
    tables = native.Codec(core_layout(header), section).tables()
    pairs = 0
    for plane, (first, count) in enumerate(header.planes):
        kinds = {tables[number].kind for number in range(first, first + count)}
        if len(kinds) > 1:
            return None
        pairs |= (kinds == {2}) << plane
    bits = max((table.entries.size.bit_length() - 1 for table in tables), default=0)
    images = []
    for table in tables:
        entry = table.entries & 0x1F
        symbols = table.entries >> 16 << (16 if pairs else 8)
        # An escape's entry has no symbol; its raw bits take the place (`ESCAPE` in decode.cu).
        escape = np.uint32(0x80 | table.raw_bits << 8)
        image = np.where(table.entries & 0x100, entry | escape, entry | symbols)
        images.append(np.tile(image, (1 << bits) // image.size))
    whole = np.concatenate(images) if images else np.zeros(0, np.uint32)
    image = whole.astype("<u4" if pairs else "<u2").view(np.uint8)
    return Tables(np.pad(image, (0, -image.size % ALIGNMENT)), bits, pairs)


class _Launch(NamedTuple):
    """A run of items that one kernel decodes."""

    defines: dict[str, int]
    begin: int
    items: int
    chunks: int
    grid: int
    block: int
    shared: int
    room: int
    table_room: int
    ahead: int


def _defines(header: BlobHeader, tables: Tables) -> dict[str, int]:
    coded = sum((count > 0) << plane for plane, (_, count) in enumerate(header.planes))
    return {
        "WORD": header.word_bytes,
        "ROTATE": header.rotate,
        "CODED": coded,
        "PAIRS": tables.pairs,
    }


def _room(items: Sequence[Item]) -> int:
    """Bytes that hold the coded planes of a chunk of any item."""
    return max(
        align(it.header.max_stream_bytes * sum(count > 0 for _, count in it.header.planes), 16)
        for it in items
    )


def geometry(
    have: DeviceFacts, room: int, table_room: int, slack: int, warps: int = WARPS
) -> tuple[int, int, int, int, int]:
    """How to share a multiprocessor: warps of its one block, buffers ahead, and rooms that fit.

    Returns
    -------
    warps, ahead, room, table_room, shared : int
        `ahead` is 1 if the next chunk is staged while one is decoded. A room of 0 leaves its bytes in global
        memory.
    """
    limit = have.shared_bytes - 128 - slack  # 128: the item, in static shared memory
    if table_room > limit // 2:
        table_room = 0
    for ahead, least in ((1, warps * 2 // 3), (0, 4)):
        fit = min(warps, (limit - table_room) // max(room * (1 + ahead), 1))
        if fit >= least:
            return fit, ahead, room, table_room, table_room + fit * room * (1 + ahead) + slack
    return warps, 0, 0, table_room, table_room + slack


class WorkList:
    """Blobs to decode together: one launch for each kind of kernel they need, one for a usual block.

    Parameters
    ----------
    items : sequence of Item
        In any order; outputs must not overlap.
    device : int
        The device's number.

    Attributes
    ----------
    descriptors : ndarray of uint8
        What the caller puts on the device, at a multiple of 16, for `launch`.

    Raises
    ------
    UnsupportedDevice
        If the device cannot run the kernels.
    """

    def __init__(self, items: Sequence[Item], device: int) -> None:
        self._device = device
        kinds: dict[tuple[tuple[str, int], ...], list[tuple[int, Item]]] = {}
        for number, item in enumerate(items):
            if item.blob % ALIGNMENT or item.tables_at % ALIGNMENT:
                raise ValueError(
                    f"item {number}: blob and tables must start at multiples of {ALIGNMENT} bytes"
                )
            if item.header.chunks:
                kinds.setdefault(tuple(_defines(item.header, item.tables).items()), []).append((number, item))
        self._launches: list[_Launch] = []
        rows: list[npt.NDArray[np.void]] = []
        for defines, numbered in kinds.items():
            self._launches.append(self._plan(dict(defines), [it for _, it in numbered], len(rows)))
            first = 0
            for number, item in numbered:
                rows.append(_descriptor(item, number, first))
                first += item.header.chunks
        self.descriptors: Bytes = np.concatenate(rows).view(np.uint8) if rows else np.zeros(0, np.uint8)

    def _plan(self, defines: dict[str, int], items: Sequence[Item], begin: int) -> _Launch:
        have = facts(self._device)
        symbols = max(it.header.chunk_words for it in items) // 32
        slack = align(symbols * _SLACK_BITS // 8 + 16, 16)
        warps, ahead, room, table_room, shared = geometry(
            have, _room(items), max(it.tables.image.size for it in items), slack
        )
        chunks = sum(it.header.chunks for it in items)
        return _Launch(
            defines,
            begin,
            len(items),
            chunks,
            min(have.multiprocessors, chunks),
            32 * warps,
            shared,
            room,
            table_room,
            ahead,
        )

    def _kernel(self, launch: _Launch, name: str, check: bool) -> Any:
        defines = {**launch.defines, "CHECK": int(check), "THREADS": 32 * WARPS}
        return nvrtc.kernel(SOURCE, name, defines, self._device)

    def prepare(self) -> None:
        """Compile what `launch` needs, before a capture or a measurement."""
        for launch in self._launches:
            for check in (False, True):
                self._kernel(launch, "decode_items", check)

    def launch(self, descriptors: int, out: int, status: int, stream: int, check: bool = False) -> None:
        """Decode all items.

        Parameters
        ----------
        descriptors : int
            Address of `descriptors` on the device.
        out : int
            Address of the output; items go to their offsets from it.
        status : int
            Address of four uint32 on the device. They stay as they are, or if the first was 0 become 1, the
            number of an item with a damaged chunk, and the chunk's number, lower half first.
        stream : int
            The stream's handle.
        check : bool
            Compare checksums. Without, only bytes that cannot be decoded at all are reported.
        """
        for it in self._launches:
            nvrtc.launch(
                self._kernel(it, "decode_items", check),
                it.grid,
                it.block,
                it.shared,
                stream,
                np.uint64(descriptors + it.begin * _ITEM.itemsize),
                np.uint32(it.items),
                np.uint64(it.chunks),
                np.uint64(out),
                np.uint64(status),
                np.uint32(it.room),
                np.uint32(it.table_room),
                np.uint32(it.ahead),
            )


class Rows:
    """A matrix whose rows are decoded as asked for.

    Parameters
    ----------
    item : Item
        The matrix; its `out` is not used.
    device : int
        The device's number.

    Attributes
    ----------
    descriptors : ndarray of uint8
        What the caller puts on the device, at a multiple of 16, for `launch`.

    Raises
    ------
    ValueError
        If the blob is not a matrix of one segment.
    """

    def __init__(self, item: Item, device: int) -> None:
        header = item.header
        if len(header.spec.shape) != 2 or header.segment_words != header.words:
            raise ValueError(f"rows are of matrices, the shape is {header.spec.shape}")
        self._device, self._item = device, item
        self._row_words = header.words // header.spec.shape[0]
        row, chunk = self._row_words, header.chunk_words
        if row and chunk % row == 0:
            self._per_row = 1
        elif row % chunk == 0:
            self._per_row = row // chunk
        else:  # rows that start anywhere in a chunk may touch one more
            self._per_row = (row + chunk - 2) // chunk + 1
        self.descriptors: Bytes = _descriptor(item, 0, 0).view(np.uint8)
        slack = align(chunk // 32 * _SLACK_BITS // 8 + 16, 16)
        self._warps, _, self._room, self._table_room, _ = geometry(
            facts(device), _room([item]), item.tables.image.size, slack, _ROW_WARPS
        )
        self._shared = self._table_room + self._warps * self._room + slack

    def launch(
        self, descriptors: int, ids: int, count: int, out: int, status: int, stream: int, check: bool = False
    ) -> None:
        """Decode rows `ids[0]` to `ids[count - 1]`, 64-bit integers on the device, to rows of `out`.

        A number that is not a row's ends in a trap, as in the framework's own kernel. For the other
        parameters see `WorkList.launch`.
        """
        if not count or not self._row_words:
            return
        defines = {
            **_defines(self._item.header, self._item.tables),
            "CHECK": int(check),
            "THREADS": 32 * WARPS,
        }
        blocks = -(-count * self._per_row // self._warps)
        nvrtc.launch(
            nvrtc.kernel(SOURCE, "decode_rows", defines, self._device),
            min(blocks, 4 * facts(self._device).multiprocessors),
            32 * self._warps,
            self._shared,
            stream,
            np.uint64(descriptors),
            np.uint64(self._item.header.spec.shape[0]),
            np.uint64(self._row_words),
            np.uint64(ids),
            np.uint64(count),
            np.uint64(self._per_row),
            np.uint64(out),
            np.uint64(status),
            np.uint32(self._room),
            np.uint32(self._table_room),
        )


def _descriptor(item: Item, number: int, first: int) -> npt.NDArray[np.void]:
    header = item.header
    row = np.zeros(1, _ITEM)
    row["blob"], row["tables"], row["out"] = item.blob, item.tables_at, item.out
    row["words"], row["segment_words"], row["blob_bytes"] = (
        header.words,
        header.segment_words,
        header.blob_bytes,
    )
    row["chunks"], row["index_at"], row["first"] = header.chunks, header.index_at, first
    row["chunk_words"], row["unit_log2"], row["number"] = header.chunk_words, header.unit_log2, number
    row["segment_chunks"] = -(-header.segment_words // header.chunk_words)
    row["table_bits"], row["tables_bytes"] = item.tables.bits, item.tables.image.size
    for plane, (table, count) in enumerate(header.planes):
        row["first_table"][0, plane], row["table_count"][0, plane] = table, count
    return row
