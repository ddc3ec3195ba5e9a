"""Decoding prefix-coded blobs on a GPU: what the kernels of `kernels/decode.cu` take, and their launches.

Nothing here allocates on the device: callers put `lookup_tables` and `WorkList.descriptors` there, and pass
addresses. Launches go to the caller's stream and synchronize nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tpde.codec import native
from tpde.codec.native import Bytes
from tpde.codec.plan import core_layout
from tpde.cuda import compile as nvrtc
from tpde.cuda.device import facts
from tpde.format.blob import BlobHeader, align
from tpde.format.constants import CODEC_PREFIX

SOURCE = "decode.cu"
LANES = 32  # format.md 5.1
GROUP_BYTES = 512
MAX_WORD_BYTES = 8
LEAST_WARPS = 4  # with fewer, streams stay in global memory
TABLE_WARPS = 8  # with fewer, loading tables takes longer
LARGE_CHUNK = 16 << 10  # bytes; with more, 16 warps were 3 % faster than 24: memory has fewer rows open
# Bytes of a block's shared memory. Below, on compute capability 8.6, 8.9 and 12.0, a block has 99 KiB.
SMALL_SHARED = 128 << 10
RING_PIECES = 4  # decode.cu knows it too
WINDOWS = (8, 4, 2, 1)
_ROW_WARPS = 8
ALIGNMENT = 16  # of blobs, tables and descriptors
_WRAP = 1 << 64  # addresses before what is there may be negative, and add up modulo this

# An escape has at most so many bits for a symbol, or a pair (format.md 3).
_ESCAPE_BITS, _ESCAPE_PAIR_BITS = 20, 28
# What a lane may read beyond its bits: every symbol an escape, the word it is at then, and four more.
_SLACK_BITS, _SLACK_BYTES = _ESCAPE_BITS, 24

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


class Tables(NamedTuple):
    """Expanded tables of a blob: `image` is what the device needs, `bits` the index bits of each."""

    image: Bytes
    bits: int
    pairs: int  # planes, one bit each, whose tables hold pairs


class Chunks(NamedTuple):
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
    chunks: Chunks | None = None  # by default all

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
    kind = np.dtype("<u4" if pairs else "<u2")
    size = align(len(tables) * kind.itemsize << bits, ALIGNMENT)
    image = np.zeros(size // kind.itemsize, kind)
    for i, table in enumerate(tables):
        entries = table.entries
        # An escape's entry has no symbol; its raw bits take the place (`ESCAPE` in decode.cu).
        symbols = np.where(entries & 0x100, 0x80 | table.raw_bits << 8, entries >> 16 << (16 if pairs else 8))
        image[i << bits : i + 1 << bits].reshape(-1, entries.size)[:] = entries & 0x1F | symbols
    return Tables(image.view(np.uint8), bits, pairs)


def _defines(header: BlobHeader, tables: Tables) -> dict[str, int]:
    coded = sum((count > 0) << plane for plane, (_, count) in enumerate(header.planes))
    return {
        "WORD": header.word_bytes,
        "ROTATE": header.rotate,
        "CODED": coded,
        "PAIRS": tables.pairs,
    }


class Need(NamedTuple):
    """What a list of blobs asks of shared memory, in bytes."""

    room: int  # the coded planes of any chunk
    fair: int  # the coded planes of all chunks but about 1 of 100
    chunk: int  # a chunk, on average
    raw: int  # a group's raw planes
    tables: int
    slack: int
    warps: int  # the most that are worth it where shared memory is large
    most: int  # warps that registers allow
    piece: int  # a piece of a lane's ring
    rings: int  # a warp's rings


def max_warps(word_bytes: int, check: bool) -> int:
    """Warps of a block that registers allow: 80 each for 24, 96 for checksums, 128 for eight planes."""
    if word_bytes == MAX_WORD_BYTES:
        return 16
    return 20 if check else 24


def _piece(word_bytes: int, coded: int, pairs: int) -> int:
    """Bytes of a ring's piece: more than what is looked up at a time, four entries or a group's, may take."""
    words = 16 // word_bytes
    singles = min(words, 4) * _ESCAPE_BITS if coded & ~pairs else 0
    doubles = min(words // 2, 4) * _ESCAPE_PAIR_BITS if pairs else 0
    return 8 if max(singles, doubles) < 8 * 8 else 16


def need(items: Sequence[Item]) -> Need:
    """What the chunks of some blobs of one kind take."""
    headers = [it.header for it in items]
    kind = _defines(headers[0], items[0].tables)
    piece, most = _piece(kind["WORD"], kind["CODED"], kind["PAIRS"]), max_warps(kind["WORD"], check=False)
    words = max(header.chunk_words for header in headers)
    raw_planes = sum(not count for _, count in headers[0].planes)
    room = max(
        align(header.max_stream_bytes * sum(count > 0 for _, count in header.planes), 16)
        for header in headers
    )
    chunks = max(sum(header.chunks for header in headers), 1)
    chunk = sum(header.blob_bytes - header.chunks_at for header in headers) // chunks
    # 1.08 times the mean holds 99 of 100 chunks of weights; planes that are filled hide the mean.
    fair = align(max(chunk - words * raw_planes, 0) * 108 // 100, 16)
    return Need(
        room,
        min(fair, room) or room,
        chunk,
        raw_planes * GROUP_BYTES // headers[0].word_bytes,
        max(it.tables.image.size for it in items),
        align(words // LANES * _SLACK_BITS // 8 + _SLACK_BYTES, 16),
        16 if chunk > LARGE_CHUNK else most,
        most,
        piece,
        kind["CODED"].bit_count() * LANES * RING_PIECES * piece,
    )


class Geometry(NamedTuple):
    """How the warps of a multiprocessor's one block share its memory."""

    warps: int
    window: int  # groups of raw planes that a warp stages at a time, two times over
    piece: int  # 0: coded planes are staged; or bytes of a piece of the rings that they pass through
    ahead: int  # 1: the next chunk's coded planes are staged while one is decoded
    room: int  # bytes for a chunk's coded planes, larger ones stay in global memory; or for a warp's rings
    table_room: int  # bytes for tables; 0: they stay in global memory
    shared: int


def kernel_defines(kind: Mapping[str, int], chosen: Geometry, check: bool) -> dict[str, int]:
    """Macros of the kernel that decodes blobs of a kind in chosen ways."""
    threads = 32 * max_warps(kind["WORD"], check)
    return {**kind, "WINDOW": chosen.window, "PIECE": chosen.piece, "CHECK": int(check), "THREADS": threads}


class _Fit(NamedTuple):
    """What fits into a block's shared memory."""

    most: int  # warps
    window: int
    piece: int
    room: int
    table_room: int
    limit: int  # bytes for windows and rooms
    slack: int


def geometry(wanted: Need, shared_bytes: int, chunks: int = 0) -> Geometry:
    """Choose how to launch.

    Measured on an H200 (docs/gpu.md): 24 warps, or 16 where a chunk has more than 16 KiB, with the largest
    windows; of similar numbers of warps, the one whose last round is fullest. Chunks for one round get a warp
    each, of at least 8, and nothing is staged ahead. Where shared memory is small: as many warps as registers
    allow, coded planes passing through rings if staging them leaves fewer.

    Parameters
    ----------
    wanted : Need
        What the blobs ask for.
    shared_bytes : int
        What a block may have.
    chunks : int
        That a block will decode.
    """
    if shared_bytes >= SMALL_SHARED:
        fit = _staged(wanted, shared_bytes, wanted.warps)
    else:
        fit = _staged(wanted, shared_bytes, wanted.most)
        outside = not fit.room and wanted.room
        rings = _through_rings(wanted, shared_bytes)
        if rings.most > (LEAST_WARPS - 1 if outside else fit.most):
            fit = rings
    windows, most = 2 * wanted.raw * fit.window, fit.most

    def speed(warps: int) -> float:
        """How full the rounds are; a warp less costs 0.8 % beside, measured on six files."""
        return chunks / warps / -(-chunks // warps) - 0.008 * (most - warps)

    one_round = 0 < chunks <= most
    if one_round:
        warps = max(chunks, min(TABLE_WARPS, most))
    else:
        warps = max(range(max(most * 2 // 3, 1), most + 1), key=speed) if chunks else most
    ahead = int(not fit.piece and not one_round and warps * (windows + 2 * fit.room) <= fit.limit)
    shared = fit.table_room + warps * (windows + (1 + ahead) * fit.room) + fit.slack
    return Geometry(warps, fit.window, fit.piece, ahead, fit.room, fit.table_room, shared)


def _staged(wanted: Need, shared_bytes: int, most: int) -> _Fit:
    """Up to `most` warps with the coded planes of a chunk each."""
    limit = shared_bytes - _ITEM.itemsize - wanted.slack  # an item lies in static shared memory
    table_room = wanted.tables if wanted.tables <= limit // 2 else 0
    limit -= table_room
    choices = [(window, wanted.room) for window in WINDOWS] + [(1, wanted.fair)]
    for window, least in choices:
        windows = 2 * wanted.raw * window
        if most * (windows + least) <= limit:
            room = min(wanted.room, (limit // most - windows) // 16 * 16)
            break
    else:
        window, windows, room = 1, 2 * wanted.raw, wanted.room
        fit = min(most, limit // max(windows + room, 1))
        if fit < LEAST_WARPS:
            fit, room = min(most, limit // max(windows, 1)), 0
        most = fit
    return _Fit(most, window, 0, room, table_room, limit, wanted.slack)


def _through_rings(wanted: Need, shared_bytes: int) -> _Fit:
    """As many warps as may be with a ring for each lane and coded plane, which needs no slack."""
    ring = RING_PIECES * wanted.piece  # which starts at a multiple of its size
    limit = shared_bytes - align(_ITEM.itemsize, ring)
    table_room = align(wanted.tables, ring)
    limit = limit - table_room if table_room <= limit // 2 else 0
    for window in WINDOWS:
        each = 2 * wanted.raw * window + wanted.rings
        if wanted.most * each <= limit:
            break
    most = min(wanted.most, limit // max(each, 1))
    return _Fit(most, window, wanted.piece, wanted.rings, table_room, limit, 0)


class _Launch(NamedTuple):
    """A run of items that one kernel decodes."""

    defines: dict[str, int]
    begin: int
    items: int
    chunks: int
    grid: int
    geometry: Geometry


class _Ready(NamedTuple):
    """A launch with the arguments that never change."""

    start: nvrtc.Launch
    at: int  # of its descriptors, in bytes
    size: tuple[Any, ...]
    rooms: tuple[Any, ...]


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
            if item.chunk_count:
                kinds.setdefault(tuple(_defines(item.header, item.tables).items()), []).append((number, item))
        self._launches: list[_Launch] = []
        self._made: dict[bool, list[_Ready]] = {}
        # The last launches and what they were asked for: most are the same again, for each token.
        self._last: tuple[tuple[int, ...], list[Callable[[], None]]] = ((), [])
        rows: list[Bytes] = []
        for defines, numbered in kinds.items():
            self._launches.append(self._plan(dict(defines), [it for _, it in numbered], len(rows)))
            first = 0
            for number, item in numbered:
                rows.append(_descriptor(item, number, first).view(np.uint8))
                first += item.chunk_count
        self.descriptors: Bytes = np.concatenate(rows) if rows else np.zeros(0, np.uint8)

    def _plan(self, defines: dict[str, int], items: Sequence[Item], begin: int) -> _Launch:
        have = facts(self._device)
        chunks = sum(it.chunk_count for it in items)
        grid = min(have.multiprocessors, chunks)
        chosen = geometry(need(items), have.shared_bytes, -(-chunks // grid))
        return _Launch(defines, begin, len(items), chunks, grid, chosen)

    def _ready(self, check: bool) -> list[_Ready]:
        """What `launch` needs, made at its first use."""
        found = self._made.get(check)
        if found is None:
            found = self._made[check] = [self._make(it, check) for it in self._launches]
        return found

    def _make(self, it: _Launch, check: bool) -> _Ready:
        defines = kernel_defines(it.defines, it.geometry, check)
        made = nvrtc.kernel(SOURCE, "decode_items", defines, self._device)
        block = min(32 * it.geometry.warps, defines["THREADS"])
        return _Ready(
            nvrtc.Launch(made, it.grid, block, it.geometry.shared),
            it.begin * _ITEM.itemsize,
            (np.uint32(it.items), np.uint64(it.chunks)),
            (np.uint32(it.geometry.room), np.uint32(it.geometry.table_room), np.uint32(it.geometry.ahead)),
        )

    def prepare(self) -> None:
        """Compile what `launch` needs, before a capture or a measurement."""
        for check in (False, True):
            self._ready(check)

    def launch(
        self, descriptors: int, out: int, status: int, stream: int, check: bool = False, base: int = 0
    ) -> None:
        """Decode all items.

        Parameters
        ----------
        descriptors : int
            Address of `descriptors` on the device.
        out : int
            Address of the output; items go to their offsets from it.
        status : int
            Address of four uint32 on the device. They stay as they are, or if the first was 0 become 1, the
            number of an item with a damaged chunk, and the chunk's number, lower half first. While the others
            are written, the first is 2.
        stream : int
            The stream's handle.
        check : bool
            Compare checksums. Without, only bytes that cannot be decoded at all are reported.
        base : int
            What the items' blob addresses are counted from.
        """
        wanted = (descriptors, out, status, stream, check, base)
        last, launches = self._last
        if wanted != last:
            places = (np.uint64(base), np.uint64(out), np.uint64(status))
            launches = [
                start.bind(stream, np.uint64(descriptors + at), *size, *places, *rooms)
                for start, at, size, rooms in self._ready(check)
            ]
            self._last = (wanted, launches)
        for go in launches:
            go()


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
        wanted = need([item])
        self._fit = _staged(wanted, facts(device).shared_bytes, wanted.warps)
        # A row's chunk needs neither windows nor a second buffer, and small blocks spread a few rows better.
        self._warps = min(_ROW_WARPS, self._fit.most)
        self._shared = self._fit.table_room + self._warps * self._fit.room + wanted.slack
        self._made: dict[tuple[int, bool], nvrtc.Launch] = {}
        self._sizes = np.uint64(header.spec.shape[0]), np.uint64(self._row_words)
        self._rest = np.uint32(self._fit.room), np.uint32(self._fit.table_room)

    def launch(
        self, descriptors: int, ids: int, count: int, out: int, status: int, stream: int, check: bool = False
    ) -> None:
        """Decode rows `ids[0]` to `ids[count - 1]`, 64-bit integers on the device, to rows of `out`.

        A number that is not a row's ends in a trap, as in the framework's own kernel. For the other
        parameters see `WorkList.launch`.
        """
        if not count or not self._row_words:
            return
        blocks = -(-count * self._per_row // self._warps)
        grid = min(blocks, 4 * facts(self._device).multiprocessors)
        start = self._made.get((grid, check)) or self._make(grid, check)
        which = np.uint64(ids), np.uint64(count), np.uint64(self._per_row)
        start.bind(
            stream,
            np.uint64(descriptors),
            *self._sizes,
            *which,
            np.uint64(out),
            np.uint64(status),
            *self._rest,
        )()

    def _make(self, grid: int, check: bool) -> nvrtc.Launch:
        """What launches so many blocks: kept, and of no more numbers than a device has places for blocks."""
        defines = {
            **_defines(self._item.header, self._item.tables),
            "WINDOW": self._fit.window,
            "PIECE": 0,
            "CHECK": int(check),
            "THREADS": 32 * max_warps(self._item.header.word_bytes, check),
        }
        kernel = nvrtc.kernel(SOURCE, "decode_rows", defines, self._device)
        made = self._made[grid, check] = nvrtc.Launch(kernel, grid, 32 * self._warps, self._shared)
        return made


def _descriptor(item: Item, number: int, first: int) -> npt.NDArray[np.void]:
    header = item.header
    part = item.chunks or Chunks(0, header.chunks - 1, 0, header.blob_bytes)
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
