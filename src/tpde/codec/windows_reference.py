"""Sections 1 to 5 of docs/windows.md in plain Python: slow, readable, in the document's order.

Written from the document alone, to test the C core against. Matrices are arrays of `uint16`.
Sections 6 and 7 are in `windows_encoder_reference`.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tpde.codec.reference import align
from tpde.errors import Corrupt, Truncated, UnsupportedVersion

Words = npt.NDArray[np.uint16]

# ---------------------------------------------------------------------------------------------
# 1. Windows

ZERO = 1  # windows.md 5.1
MAX_BASE = 124  # windows.md 1.3


def window_of(record: int, flags: int) -> list[int]:
    """Give the four pairs of a row's window (1.3)."""
    steps, mask = (0x02010000, 0xFFFFFF00) if flags & ZERO else (0x03020100, 0xFFFFFFFF)
    return list(((record >> 1) * 0x01010101 + steps & mask).to_bytes(4, "little"))


class Coded(NamedTuple):
    """A word as it is coded: its code, its low byte, and its XOR, 0 but for escapes (1.4, 4.1)."""

    code: int
    low: int
    xor: int


def encode_word(word: int, record: int, flags: int) -> Coded:
    """Code a word of a row (1.1 to 1.4)."""
    v = (word - (record & 1) * 0x80) % (1 << 16)
    sign, pair, low = v >> 15, v >> 8 & 127, v & 255
    window = window_of(record, flags)
    if pair in window:
        return Coded(sign << 2 | window.index(pair), low, 0)
    return Coded(sign << 2, low, pair ^ window[0])


def decode_word(coded: Coded, record: int, flags: int) -> int:
    """Give a word back (1.5)."""
    high = (window_of(record, flags)[coded.code & 3] | coded.code >> 2 << 7) ^ coded.xor
    return ((high << 8 | coded.low) + (record & 1) * 0x80) % (1 << 16)


# ---------------------------------------------------------------------------------------------
# 2. Tiles

STRIPE_ROWS, CHUNK_COLUMNS, PAIR_COLUMNS = 16, 256, 64  # windows.md 2.1
LANES = 32


def place_of(row: int, column: int) -> int:
    """Give the place of a word in its chunk (2.2); row and column are those in the chunk."""
    tile, half, g, q, i = column // 32, row // 8, row % 8, column % 32 // 8, column % 8
    return 256 * (2 * tile + half) + 8 * (4 * g + q) + i


def at_place(place: int) -> tuple[int, int]:
    """Invert `place_of`: row and column in the chunk."""
    octet, lane, i = place >> 8, place >> 3 & 31, place & 7
    return octet % 2 * 8 + lane // 4, octet // 2 * 32 + lane % 4 * 8 + i


PADDING = Coded(0, 0, 0)  # windows.md 2.3

# ---------------------------------------------------------------------------------------------
# 3. Bodies

PAIR_BYTES = 1408  # windows.md 3.1


def code_word_at(pairs: int, k: int, lane: int) -> int:
    """Give where code word `k` of a lane lies in a body (3.4)."""
    if pairs == 4:
        return 512 * (k >> 2) + 16 * lane + 4 * (k & 3)
    return 128 * k + 4 * lane


def low_word_at(pairs: int, m: int, lane: int) -> int:
    """Give where word `m` of low bytes of a lane lies in a body (3.4)."""
    if pairs == 4:
        return 1536 + 512 * (m >> 2) + 16 * lane + 4 * (m & 3)
    return 384 * pairs + 128 * m + 4 * lane


def pack_codes(octets: Sequence[Sequence[int]]) -> list[int]:
    """Pack the codes of four octets into three words (3.2)."""
    words = [sum(code << 4 * i for i, code in enumerate(octet)) for octet in octets[:3]]
    for i, code in enumerate(octets[3]):
        for k in range(3):
            words[k] |= (code >> k & 1) << (4 * i + 3)
    return words


def unpack_codes(words: Sequence[int]) -> list[list[int]]:
    """Invert `pack_codes`."""
    octets = [[word >> 4 * i & 7 for i in range(8)] for word in words]
    octets.append([sum((words[k] >> (4 * i + 3) & 1) << k for k in range(3)) for i in range(8)])
    return octets


def write_body(pairs: int, coded: Sequence[Coded]) -> bytes:
    """Write the body of a chunk, whose words are given in the order of places (3)."""
    body = bytearray(PAIR_BYTES * pairs)
    for lane in range(LANES):
        octets = [coded[256 * o + 8 * lane : 256 * o + 8 * lane + 8] for o in range(4 * pairs)]
        for p in range(pairs):
            words = pack_codes([[it.code for it in octet] for octet in octets[4 * p : 4 * p + 4]])
            for k, word in enumerate(words):
                struct.pack_into("<I", body, code_word_at(pairs, 3 * p + k, lane), word)
        for o, octet in enumerate(octets):
            for half in range(2):
                low = bytes(it.low for it in octet[4 * half : 4 * half + 4])
                at = low_word_at(pairs, 2 * o + half, lane)
                body[at : at + 4] = low
    return bytes(body)


def read_body(pairs: int, body: bytes) -> list[Coded]:
    """Invert `write_body`; XORs are left out."""
    coded = [PADDING] * (1024 * pairs)
    for lane in range(LANES):
        for p in range(pairs):
            places = (code_word_at(pairs, 3 * p + k, lane) for k in range(3))
            octets = unpack_codes([struct.unpack_from("<I", body, at)[0] for at in places])
            for o, codes in enumerate(octets, 4 * p):
                places = (low_word_at(pairs, 2 * o + half, lane) for half in range(2))
                low = b"".join(body[at : at + 4] for at in places)
                for i in range(8):
                    coded[256 * o + 8 * lane + i] = Coded(codes[i], low[i], 0)
    return coded


# ---------------------------------------------------------------------------------------------
# 4. Escapes

TABLE_SIZE = 16  # windows.md 4.2
POWERS = (1, 2, 4, 8, 16, 32, 64)  # windows.md 4.2


def entries_of(coded: Sequence[Coded], said: dict[int, tuple[int, ...]]) -> list[int]:
    """Give a chunk's entries, for its words in the order of places (4.3, 4.4)."""
    return [place | index << 12 for place, it in enumerate(coded) if it.xor for index in said[it.xor]]


def xors_of(entries: Sequence[int], table: bytes) -> dict[int, int]:
    """Give the XORs of a chunk's places (4.3)."""
    xors: dict[int, int] = {}
    for entry in entries:
        xors[entry & 4095] = xors.get(entry & 4095, 0) ^ table[entry >> 12]
    return xors


# ---------------------------------------------------------------------------------------------
# 5. The blob

MAGIC = bytes.fromhex("89 54 50 44 57 0D 0A 1A")  # windows.md 5.1
VERSION = 1  # windows.md 5.1
# magic, version, flags, reserved, rows, columns, entries, reserved, table, reserved
HEADER = struct.Struct("<8sHHIQQQQ16s64s")  # windows.md 5.1
ALIGNMENT = 128  # windows.md 5.2
SIDE_LIMIT, WORDS_LIMIT, ENTRIES_LIMIT = 1 << 27, 1 << 40, 1 << 32  # windows.md 8


class Sections(NamedTuple):
    """Where the sections of a blob start (5.2)."""

    stripes: int
    chunks: int
    pairs: int
    records: int
    offsets: int
    entries: int
    bodies: int
    end: int


def sections_of(rows: int, columns: int, entries: int) -> Sections:
    """Give where everything lies (5.2)."""
    stripes, chunks = -(-rows // STRIPE_ROWS), -(-columns // CHUNK_COLUMNS)
    pairs = -(-columns // PAIR_COLUMNS)
    offsets = HEADER.size + align(STRIPE_ROWS * stripes, ALIGNMENT)
    at = offsets + align(4 * (stripes * chunks + 1), ALIGNMENT)
    bodies = at + align(2 * entries, ALIGNMENT)
    end = bodies + PAIR_BYTES * stripes * pairs
    return Sections(stripes, chunks, pairs, HEADER.size, offsets, at, bodies, end)


class Blob(NamedTuple):
    """A blob taken apart: of each chunk, stripe by stripe, its entries and its body."""

    rows: int
    columns: int
    flags: int
    table: bytes
    records: bytes
    entries: list[list[int]]
    bodies: list[bytes]

    def serialize(self) -> bytes:
        """Give the blob's bytes."""
        counts = [len(it) for it in self.entries]
        where = sections_of(self.rows, self.columns, sum(counts))
        out = HEADER.pack(
            *(MAGIC, VERSION, self.flags, 0, self.rows, self.columns, sum(counts), 0),
            *(self.table, bytes(64)),
        )
        out = (out + self.records).ljust(where.offsets, b"\0")
        offsets = [0, *itertools.accumulate(counts)]
        out = (out + struct.pack(f"<{len(offsets)}I", *offsets)).ljust(where.entries, b"\0")
        listed = [entry for chunk in self.entries for entry in chunk]
        out = (out + struct.pack(f"<{len(listed)}H", *listed)).ljust(where.bodies, b"\0")
        return out + b"".join(self.bodies)

    def chunks(self) -> Iterator[tuple[int, int, int]]:
        """Give stripe, number in the stripe and pairs of tiles of each chunk."""
        for stripe in range(-(-self.rows // STRIPE_ROWS)):
            for chunk, column in enumerate(range(0, self.columns, CHUNK_COLUMNS)):
                yield stripe, chunk, min(4, -(-(self.columns - column) // PAIR_COLUMNS))


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise Corrupt(message)


def parse(data: bytes) -> Blob:
    """Take a blob apart, all but its bodies checked (5, 8)."""
    _check(data[:8] == MAGIC[: len(data)], f"magic is {data[:8].hex()}, needs {MAGIC.hex()}")
    if len(data) >= 10 and (version := int.from_bytes(data[8:10], "little")) != VERSION:
        raise UnsupportedVersion(f"windows of version {version}, this reader knows {VERSION}")
    if len(data) < HEADER.size:
        raise Truncated(f"{len(data)} bytes, the header needs {HEADER.size}")
    _, _, flags, zero, rows, columns, count, also_zero, table, spare = HEADER.unpack_from(data)
    _check(flags <= ZERO, f"flags are {flags:#x}")
    _check(0 < rows < SIDE_LIMIT and 0 < columns < SIDE_LIMIT, f"a matrix of {rows} x {columns}")
    _check(rows * columns < WORDS_LIMIT and count < ENTRIES_LIMIT, f"{rows} x {columns}, {count} entries")
    _check(not zero and not also_zero and not any(spare), "reserved bytes must be zero")
    ascends = all(a < b for a, b in itertools.pairwise([0, *table, 128]))
    _check(ascends and set(POWERS) <= set(table), f"a table of {list(table)}")
    where = sections_of(rows, columns, count)
    if len(data) < where.end:
        raise Truncated(f"{len(data)} bytes, the blob needs {where.end}")
    _check(len(data) == where.end, f"{len(data)} bytes, the blob has {where.end}")

    chunks = where.stripes * where.chunks
    offsets = struct.unpack_from(f"<{chunks + 1}I", data, where.offsets)
    listed = struct.unpack_from(f"<{count}H", data, where.entries)
    records = data[where.records : where.records + STRIPE_ROWS * where.stripes]
    _check(not any(data[where.records + len(records) : where.offsets]), "padding must be zero")
    _check(not any(data[where.offsets + 4 * len(offsets) : where.entries]), "padding must be zero")
    _check(not any(data[where.entries + 2 * count : where.bodies]), "padding must be zero")
    _check(all(it >> 1 <= MAX_BASE for it in records[:rows]), "a base above 124")
    _check(not any(records[rows:]), "records of rows that are not there")
    _check(offsets[0] == 0 and offsets[-1] == count, "entries of no chunk")
    _check(all(a <= b for a, b in itertools.pairwise(offsets)), "offsets that descend")
    entries = [list(listed[a:b]) for a, b in itertools.pairwise(offsets)]
    blob, at = Blob(rows, columns, flags, table, records, entries, []), where.bodies
    for (stripe, chunk, pairs), of_chunk in zip(blob.chunks(), entries, strict=True):
        keys = [(entry & 4095, entry >> 12) for entry in of_chunk]
        _check(all(a < b for a, b in itertools.pairwise(keys)), "entries that do not ascend")
        for place, _ in keys:
            row, column = at_place(place)
            there = row < rows - STRIPE_ROWS * stripe and column < columns - CHUNK_COLUMNS * chunk
            _check(there, "an entry of padding")
        blob.bodies.append(data[at : at + PAIR_BYTES * pairs])
        at += PAIR_BYTES * pairs
    return blob


def decode(data: bytes) -> Words:
    """Decode a blob: its matrix."""
    blob = parse(data)
    out = np.empty((blob.rows, blob.columns), np.uint16)
    for (stripe, chunk, pairs), entries, body in zip(blob.chunks(), blob.entries, blob.bodies, strict=True):
        xors = xors_of(entries, blob.table)
        for place, coded in enumerate(read_body(pairs, body)):
            row, column = at_place(place)
            row, column = row + STRIPE_ROWS * stripe, column + CHUNK_COLUMNS * chunk
            if row < blob.rows and column < blob.columns:
                escaped = coded._replace(xor=xors.get(place, 0))
                out[row, column] = decode_word(escaped, blob.records[row], blob.flags)
    return out
