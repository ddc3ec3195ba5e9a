"""The blob format of docs/format.md in plain Python: slow, readable, in the document's order.

Written from the document alone, to test the C core against. Section numbers are the document's.
In metadata (everything before the first chunk) whatever the document fixes is checked, padding
included. In chunks, padding is ignored: a chunk is right if its words have the right checksum.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import xxhash
import zstandard

from tpde.errors import Corrupt, TpdeError, Truncated, UnsupportedVersion

# ---------------------------------------------------------------------------------------------
# 2. Blob header

MAGIC = bytes.fromhex("89 54 50 44 45 0D 0A 1A")  # format.md 2
VERSION = 1  # format.md 2
# magic, version, codec, layout, dtype, word_bytes, rotate, ndim, words, segment_words, chunks,
# blob_bytes, chunk_words, max_chunk_bytes, max_stream_bytes, tables, unit_log2, context, reserved,
# hash, base, constant, tables_bytes, reserved, meta_hash
HEADER = struct.Struct("<8sH6B4Q3I4B16s16s8sI12sQ")  # format.md 2
META_HASH_AT = 120  # format.md 2
MAX_DIMS = 64  # format.md 2, 7
MAX_TABLES = 16  # format.md 2, 7
MAX_ORIGINAL_BYTES = (1 << 60) - 1  # format.md 2, 7
UNIT_LOG2 = range(4, 13)  # format.md 2
MAX_UNITS = 1 << 32  # format.md 7


class DtypeRow(NamedTuple):
    """A row of the table of dtypes (2.1)."""

    code: int
    word_bytes: int
    rotate: int
    bits: int


# fmt: off
DTYPES: dict[str, DtypeRow] = {  # format.md 2.1
    "BOOL": DtypeRow(1, 1, 0, 8),            "F4": DtypeRow(2, 1, 0, 4),
    "F6_E2M3": DtypeRow(3, 1, 0, 6),         "F6_E3M2": DtypeRow(4, 1, 0, 6),
    "U8": DtypeRow(5, 1, 0, 8),              "I8": DtypeRow(6, 1, 0, 8),
    "F8_E5M2": DtypeRow(7, 1, 1, 8),         "F8_E4M3": DtypeRow(8, 1, 1, 8),
    "F8_E8M0": DtypeRow(9, 1, 0, 8),         "F8_E4M3FNUZ": DtypeRow(10, 1, 1, 8),
    "F8_E5M2FNUZ": DtypeRow(12, 1, 1, 8),    "I16": DtypeRow(13, 2, 0, 16),
    "U16": DtypeRow(14, 2, 0, 16),           "F16": DtypeRow(15, 2, 1, 16),
    "BF16": DtypeRow(16, 2, 1, 16),          "I32": DtypeRow(17, 4, 0, 32),
    "U32": DtypeRow(18, 4, 0, 32),           "F32": DtypeRow(19, 4, 1, 32),
    "C64": DtypeRow(20, 4, 1, 64),           "F64": DtypeRow(21, 8, 1, 64),
    "I64": DtypeRow(22, 8, 0, 64),           "U64": DtypeRow(23, 8, 0, 64),
}
# fmt: on
DTYPE_OF_CODE = {dtype.code: dtype for dtype in DTYPES.values()}
CODECS = {"prefix": 1, "zstd": 2, "constant": 3}  # format.md 2.2
PREFIX, ZSTD, CONSTANT = CODECS.values()


def align(size: int, unit: int) -> int:
    """Round `size` up to a multiple of `unit`."""
    return -(-size // unit) * unit


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise Corrupt(message)


def _check_zero(data: bytes, what: str) -> None:
    _check(not any(data), f"{what} must be zero, found {data[:32].hex(' ')}")


@dataclass
class Header:
    """The header of a blob with its shape and planes (2), under the document's names."""

    codec: int
    dtype: int
    word_bytes: int
    rotate: int
    words: int
    segment_words: int
    chunks: int
    blob_bytes: int
    chunk_words: int
    max_chunk_bytes: int
    max_stream_bytes: int
    tables: int
    unit_log2: int
    hash: bytes
    constant: bytes
    tables_bytes: int
    shape: tuple[int, ...]
    planes: tuple[tuple[int, int], ...]  # (first_table, table_count), none for codec 3
    version: int = VERSION
    layout: int = 0
    context: int = 0
    base: bytes = bytes(16)
    meta_hash: int = 0

    @property
    def tables_at(self) -> int:
        """Where the table section starts."""
        return align(HEADER.size + 8 * len(self.shape) + 4 * len(self.planes), 16)

    @property
    def index_at(self) -> int:
        """Where the index map starts."""
        return self.tables_at + self.tables_bytes

    @property
    def chunks_at(self) -> int:
        """Where the chunks start and what `meta_hash` covers ends; codec 3: where the blob ends."""
        if self.codec == CONSTANT:
            return self.tables_at
        return align(self.index_at + RECORD.size * self.chunks, 1 << self.unit_log2)

    def serialize(self) -> bytes:
        """Give the header, shape and planes, padded to a multiple of 16."""
        out = HEADER.pack(
            *(MAGIC, self.version, self.codec, self.layout, self.dtype, self.word_bytes),
            *(self.rotate, len(self.shape), self.words, self.segment_words, self.chunks),
            *(self.blob_bytes, self.chunk_words, self.max_chunk_bytes, self.max_stream_bytes),
            *(self.tables, self.unit_log2, self.context, 0, self.hash, self.base, self.constant),
            *(self.tables_bytes, bytes(12), self.meta_hash),
        )
        out += struct.pack(f"<{len(self.shape)}Q", *self.shape)
        out += b"".join(struct.pack("<BBH", first, count, 0) for first, count in self.planes)
        return out.ljust(self.tables_at, b"\0")


def parse_header(blob: bytes) -> Header:
    """Parse and validate the header of a whole blob (2), `meta_hash` included."""
    have = len(blob)
    _check(blob[:8] == MAGIC[:have], f"magic is {blob[:8].hex()}, needs {MAGIC.hex()}")
    if have >= 10 and (found := int.from_bytes(blob[8:10], "little")) != VERSION:
        raise UnsupportedVersion(f"blob has version {found}, this reader knows {VERSION}")
    if have < HEADER.size:
        raise Truncated(f"blob has {have} bytes, its header needs {HEADER.size}")
    (_, version, codec, layout, dtype, word_bytes, rotate, ndim, words, segment_words, chunks,
     blob_bytes, chunk_words, max_chunk_bytes, max_stream_bytes, tables, unit_log2, context,
     reserved1, hash_, base, constant, tables_bytes, reserved2, meta_hash,
     ) = HEADER.unpack_from(blob)  # fmt: skip
    _check(codec in CODECS.values(), f"codec is {codec}, needs 1 to 3")
    _check(layout == 0, f"layout is {layout}, needs 0")
    _check(dtype in DTYPE_OF_CODE, f"dtype {dtype} is unknown")
    want = DTYPE_OF_CODE[dtype]
    _check(
        (word_bytes, rotate) == (want.word_bytes, want.rotate),
        f"word_bytes and rotate are {word_bytes} and {rotate}, dtype {dtype} needs "
        f"{want.word_bytes} and {want.rotate}",
    )
    _check(ndim <= MAX_DIMS, f"ndim is {ndim}, at most {MAX_DIMS}")
    _check(words * word_bytes <= MAX_ORIGINAL_BYTES, f"{words} words are 2^60 bytes or more")
    _check(tables <= MAX_TABLES, f"tables is {tables}, at most {MAX_TABLES}")
    _check(unit_log2 in UNIT_LOG2, f"unit_log2 is {unit_log2}, needs 4 to 12")
    _check(context == 0, f"context is {context}, needs 0")
    _check_zero(bytes([reserved1]) + reserved2, "reserved bytes of the header")
    _check(not any(base), "base is not zero: deltas are not of version 1")
    _check_zero(constant[word_bytes if codec == CONSTANT else 0 :], "unused bytes of constant")
    _check(tables_bytes % 16 == 0, f"tables_bytes is {tables_bytes}, needs a multiple of 16")

    # 4.1, 7: the numbers that describe segments and chunks
    _check_geometry(codec, words, segment_words, chunk_words)
    want_chunks = 0 if codec == CONSTANT else count_chunks(words, segment_words, chunk_words)
    _check(chunks == want_chunks, f"chunks is {chunks}, needs {want_chunks}")
    largest = align(chunk_words * word_bytes, 1 << unit_log2) if chunks else 0  # format.md 7
    _check(
        max_chunk_bytes % 16 == 0 and max_chunk_bytes <= largest,
        f"max_chunk_bytes is {max_chunk_bytes}, needs a multiple of 16, at most {largest}",
    )
    _check(
        max_stream_bytes % 4 == 0 and max_stream_bytes <= max_chunk_bytes,
        f"max_stream_bytes is {max_stream_bytes}, needs a multiple of 4, at most {max_chunk_bytes}",
    )
    _check(blob_bytes <= MAX_UNITS << unit_log2, f"blob_bytes is {blob_bytes}, above 2^32 units")
    if codec == CONSTANT:
        used = (tables, tables_bytes, max_stream_bytes)
        _check(not any(used), f"a constant blob has tables or streams: {used}")

    planes = 0 if codec == CONSTANT else word_bytes
    header = Header(
        codec, dtype, word_bytes, rotate, words, segment_words, chunks, blob_bytes, chunk_words,
        max_chunk_bytes, max_stream_bytes, tables, unit_log2, hash_, constant, tables_bytes,
        (0,) * ndim, ((0, 0),) * planes, version, layout, context, base, meta_hash,
    )  # fmt: skip
    end = header.chunks_at
    exact = chunks == 0
    _check(
        blob_bytes == end if exact else blob_bytes >= end,
        f"blob_bytes is {blob_bytes}, needs {'' if exact else 'at least '}{end}",
    )
    if have < blob_bytes:
        raise Truncated(f"blob has {have} bytes, its header says {blob_bytes}")

    header.shape = struct.unpack_from(f"<{ndim}Q", blob, HEADER.size)
    _check(
        math.prod(header.shape) * want.bits == words * word_bytes * 8,
        f"shape {header.shape} of {want.bits} bits each does not give {words * word_bytes} bytes",
    )
    _check(
        math.prod(filter(None, header.shape)) * want.bits <= 8 * MAX_ORIGINAL_BYTES,
        f"the dimensions that are not 0 of {header.shape} give 2^60 bytes or more",
    )
    at = HEADER.size + 8 * ndim
    records = [struct.unpack_from("<BBH", blob, at + 4 * p) for p in range(planes)]  # format.md 2.3
    for first, count, zero in records:
        _check(zero == 0, f"reserved bytes of a plane's record are {zero}, need zero")
        _check(codec != ZSTD or (first, count) == (0, 0), "codec zstd with tables for a plane")
        _check(
            count == 0 or first + count <= tables,
            f"a plane uses tables {first} to {first + count - 1}, there are {tables}",
        )
    header.planes = tuple((first, count) for first, count, _ in records)
    _check_zero(blob[at + 4 * planes : header.tables_at], "padding after the planes")
    if codec != CONSTANT:
        _check_zero(blob[header.index_at + RECORD.size * chunks : end], "padding after the index")
    found = meta_hash_of(blob[:end])
    _check(found == meta_hash, f"meta_hash is {meta_hash:016x}, the metadata has {found:016x}")
    return header


def meta_hash_of(meta: bytes) -> int:
    """Hash everything before the first chunk, the hash's own field taken as zero (2)."""
    return xxhash.xxh3_64_intdigest(meta[:META_HASH_AT] + bytes(8) + meta[HEADER.size :])


# ---------------------------------------------------------------------------------------------
# 2.3. Planes


def _rotate(word: int, word_bytes: int, left: int) -> int:
    """Rotate the topmost 16 bits, or all 8, to the left by `left` places."""
    bits = min(16, 8 * word_bytes)
    low_bits = 8 * word_bytes - bits
    top, low = word >> low_bits, word & ((1 << low_bits) - 1)
    top = (top << left | top >> (bits - left)) & ((1 << bits) - 1)
    return top << low_bits | low


def split(words: bytes, word_bytes: int, rotate: int) -> list[bytes]:
    """Split words into planes (2.3), plane 0 first."""
    if rotate:
        words = b"".join(
            _rotate(int.from_bytes(words[i : i + word_bytes], "little"), word_bytes, 1).to_bytes(
                word_bytes, "little"
            )
            for i in range(0, len(words), word_bytes)
        )
    return [words[p::word_bytes] for p in range(word_bytes)]


def merge(planes: Sequence[bytes], word_bytes: int, rotate: int) -> bytes:
    """Invert `split`."""
    out = bytearray(len(planes[0]) * word_bytes)
    for p, plane in enumerate(planes):
        out[p::word_bytes] = plane
    if rotate:
        back = min(16, 8 * word_bytes) - 1
        for i in range(0, len(out), word_bytes):
            word = int.from_bytes(out[i : i + word_bytes], "little")
            word = _rotate(word, word_bytes, back)
            out[i : i + word_bytes] = word.to_bytes(word_bytes, "little")
    return bytes(out)


# ---------------------------------------------------------------------------------------------
# 3. Tables

MAX_BITS = 12  # format.md 3
MAX_RAW_BITS = 7  # format.md 3


def _low_first(value: int, count: int) -> str:
    """Write the lowest `count` bits of `value` as text, least significant bit first."""
    return "".join(str(value >> i & 1) for i in range(count))


@dataclass
class Table:
    """A prefix code (3). Codewords are texts of 0 and 1, their first bit first."""

    kind: int
    max_bits: int
    raw_bits: int
    escape_bits: int
    counts: list[int]
    values: list[int]
    codewords: dict[int, str] = field(init=False, repr=False)  # by value
    escape: str = field(init=False, repr=False)  # "" if there is none
    value_of: dict[str, int] = field(init=False, repr=False)  # by codeword; -1 is the escape

    def __post_init__(self) -> None:
        """Validate the table and assign the canonical codewords."""
        self._check_shape(self.kind, self.max_bits, self.raw_bits, self.escape_bits)
        self._check_complete(self.max_bits, self.escape_bits, self.counts)
        _check(len(self.values) == sum(self.counts), "a table's counts and values disagree")
        _check(len(set(self.values)) == len(self.values), "a table's values are not distinct")
        limit = 1 << self.value_bits
        _check(all(0 <= v < limit for v in self.values), f"a value of a table is not below {limit}")
        self.codewords, self.escape = {}, ""
        code, values = 0, iter(self.values)
        for length, count in enumerate(self.counts, 1):
            for _ in range(count):
                self.codewords[next(values)] = f"{code:0{length}b}"
                code += 1
            if length == self.escape_bits:  # the last codeword of its length
                self.escape = f"{code:0{length}b}"
                code += 1
            code <<= 1
        self.value_of = {word: value for value, word in self.codewords.items()}
        if self.escape:
            self.value_of[self.escape] = -1

    @staticmethod
    def _check_shape(kind: int, max_bits: int, raw_bits: int, escape_bits: int) -> None:
        _check(kind in (1, 2, 3), f"a table's kind is {kind}, needs 1, 2 or 3")
        _check(1 <= max_bits <= MAX_BITS, f"a table's max_bits is {max_bits}, needs 1 to 12")
        most = min(MAX_RAW_BITS, MAX_BITS - max_bits) if kind == 1 else 0
        _check(0 <= raw_bits <= most, f"a table's raw_bits is {raw_bits}, at most {most}")
        _check(0 <= escape_bits <= max_bits, f"escape_bits is {escape_bits}, above {max_bits}")

    @staticmethod
    def _check_complete(max_bits: int, escape_bits: int, counts: Sequence[int]) -> None:
        _check(len(counts) == max_bits, f"a table has {len(counts)} counts, needs {max_bits}")
        total = sum(count << (max_bits - length) for length, count in enumerate(counts, 1))
        total += 1 << (max_bits - escape_bits) if escape_bits else 0
        _check(total == 1 << max_bits, f"a code fills {total} of {1 << max_bits}: not complete")

    @property
    def value_bits(self) -> int:
        """Bits of a value, as it follows an escape."""
        return 8 - self.raw_bits if self.kind == 1 else 16 if self.kind == 2 else 14

    @classmethod
    def from_lengths(
        cls, kind: int, max_bits: int, raw_bits: int, lengths: dict[int, int], escape_bits: int = 0
    ) -> Table:
        """Build a table from the codeword length of each value; equal lengths by value."""
        cls._check_shape(kind, max_bits, raw_bits, escape_bits)
        in_order = sorted(lengths, key=lambda value: (lengths[value], value))
        counts = [list(lengths.values()).count(bits) for bits in range(1, max_bits + 1)]
        return cls(kind, max_bits, raw_bits, escape_bits, counts, in_order)

    @classmethod
    def parse(cls, data: bytes, at: int) -> tuple[Table, int]:
        """Parse the table at `at`; returns it and the position after its padding."""
        if len(data) < at + 4:
            raise Truncated(f"a table at {at} needs 4 bytes, there are {max(0, len(data) - at)}")
        kind, max_bits, raw_bits, escape_bits = data[at : at + 4]
        cls._check_shape(kind, max_bits, raw_bits, escape_bits)
        if len(data) < (values_at := at + 4 + 2 * max_bits):
            raise Truncated(f"a table's counts end at {values_at}, the data at {len(data)}")
        counts = list(struct.unpack_from(f"<{max_bits}H", data, at + 4))
        cls._check_complete(max_bits, escape_bits, counts)  # at most 4096 values from here on
        end = values_at + min(kind, 2) * sum(counts)
        if len(data) < (stop := at + align(end - at, 4)):
            raise Truncated(f"a table ends at {stop}, the data at {len(data)}")
        values = struct.unpack_from(f"<{sum(counts)}{'BHH'[kind - 1]}", data, values_at)
        _check_zero(data[end:stop], "padding after a table")
        return cls(kind, max_bits, raw_bits, escape_bits, counts, list(values)), stop

    def serialize(self) -> bytes:
        """Give the table's bytes, padded to a multiple of 4."""
        out = bytes([self.kind, self.max_bits, self.raw_bits, self.escape_bits])
        out += struct.pack(f"<{len(self.counts)}H", *self.counts)
        out += struct.pack(f"<{len(self.values)}{'BHH'[self.kind - 1]}", *self.values)
        return out.ljust(align(len(out), 4), b"\0")

    def encode(self, value: int) -> str:
        """Give the bits of a symbol (kind 1), a pair, first + 256 * second (kind 2), or a token (kind 3)."""
        top, raw = value >> self.raw_bits, _low_first(value, self.raw_bits)
        if top in self.codewords:
            return self.codewords[top] + raw
        if not self.escape:
            raise ValueError(f"the table has neither a codeword for {top} nor an escape")
        return self.escape + _low_first(top, self.value_bits) + raw

    def decode(self, bits: str) -> Iterator[int]:
        """Yield what a lane's bits stand for; raises Corrupt where they are exhausted."""
        at = 0
        longest = max(map(len, self.value_of))

        def take(count: int) -> int:
            nonlocal at
            at += count
            _check(at <= len(bits), f"a lane of {len(bits)} bits needs at least {at}")
            return int("0" + bits[at - count : at][::-1], 2)

        while True:
            for length in range(1, longest + 1):
                if (value := self.value_of.get(bits[at : at + length])) is not None:
                    break
            else:
                raise Corrupt(f"a lane of {len(bits)} bits ends within a codeword at {at}")
            at += length
            if value < 0:
                value = take(self.value_bits)
            yield value << self.raw_bits | take(self.raw_bits)


def parse_tables(header: Header, blob: bytes) -> list[Table]:
    """Parse the table section (3)."""
    section = blob[header.tables_at : header.index_at]
    tables, at = [], 0
    for _ in range(header.tables):
        try:
            table, at = Table.parse(section, at)
        except Truncated as error:
            raise Corrupt(f"the table section is too short: {error}") from error
        _check(table.kind != 3, "a table of kind 3 in a blob")
        tables.append(table)
    want = align(at, 16)
    _check(len(section) == want, f"tables_bytes is {len(section)}, the tables need {want}")
    _check_zero(section[at:], "padding after the tables")
    return tables


# ---------------------------------------------------------------------------------------------
# 4. Segments, chunks and the index map

CHUNK_WORDS = [32 << s for s in range(4, 12)]  # format.md 4.1: 32 * S, S from 16 to 2048
MAX_PREFIX_CHUNK_WORDS = 32 * 1024  # format.md 4.1


def _check_geometry(codec: int, words: int, segment_words: int, chunk_words: int) -> None:
    """Check segment_words and chunk_words (4.1)."""
    most = max(words, 1)
    _check(1 <= segment_words <= most, f"segment_words is {segment_words}, needs 1 to {most}")
    most = MAX_PREFIX_CHUNK_WORDS if codec == PREFIX else CHUNK_WORDS[-1]
    _check(
        chunk_words in CHUNK_WORDS and chunk_words <= most,
        f"chunk_words is {chunk_words}, needs a power of two from {CHUNK_WORDS[0]} to {most}",
    )


def count_chunks(words: int, segment_words: int, chunk_words: int) -> int:
    """Count the chunks of all segments (4.1)."""
    full, rest = divmod(words, segment_words)
    return full * -(-segment_words // chunk_words) + -(-rest // chunk_words)


def chunk_span(words: int, segment_words: int, chunk_words: int, i: int) -> tuple[int, int]:
    """Give the first word of chunk `i` and the word after its last (4.1)."""
    segment, number = divmod(i, -(-segment_words // chunk_words))
    start = segment * segment_words + number * chunk_words
    return start, min(start + chunk_words, (segment + 1) * segment_words, words)


RECORD = struct.Struct("<IIHBB")  # format.md 4.3
RAW, FILL, CODED = 0, 1, 2  # format.md 4.3


class Record(NamedTuple):
    """A chunk's record in the index map (4.3), with its place in bytes."""

    start: int
    end: int
    checksum: int
    modes: tuple[int, ...]  # of each plane
    table: int
    fill: int


def parse_index(header: Header, blob: bytes) -> list[Record]:
    """Parse and validate the index map (4.3)."""
    at, n = header.index_at, header.chunks
    if len(blob) < header.blob_bytes:
        raise Truncated(f"blob has {len(blob)} bytes, its header says {header.blob_bytes}")
    raw = list(RECORD.iter_unpack(blob[at : at + RECORD.size * n]))
    starts = [record[0] << header.unit_log2 for record in raw] + [header.blob_bytes]
    _check(starts[0] == header.chunks_at, f"chunks start at {starts[0]}, not {header.chunks_at}")
    records = []
    for i, (_, total, bits, table, fill) in enumerate(raw):
        start, end = starts[i : i + 2]
        # Offsets may be equal: a chunk whose planes are all in mode fill has no bytes.
        _check(start <= end, f"chunk {i} starts at {start}, after its end at {end}")
        _check(end - start <= header.max_chunk_bytes, f"chunk {i} is above max_chunk_bytes")
        modes = tuple(bits >> 2 * p & 3 for p in range(header.word_bytes))
        _check(bits >> 2 * header.word_bytes == 0, f"chunk {i} has modes for planes it lacks")
        _check(max(modes) <= CODED, f"chunk {i} has a plane in mode 3")
        _check(FILL in modes or fill == 0, f"chunk {i} fills no plane, its fill is {fill}")
        codes = header.codec == PREFIX and CODED in modes
        _check(codes or table == 0, f"chunk {i} codes no plane with a table, its table is {table}")
        for mode, (_, count) in zip(modes, header.planes, strict=True):
            bad = header.codec == PREFIX and mode == CODED and count == 0
            _check(not bad, f"chunk {i} codes a plane that has no table")
        records.append(Record(start, end, total, modes, table, fill))
    return records


def decode_chunk(
    header: Header, tables: Sequence[Table], records: Sequence[Record], i: int, blob: bytes
) -> bytes:
    """Decode chunk `i` to its words' original bytes and check them (4.4, 4.5)."""
    record = records[i]
    at, end = record.start, record.end
    if len(blob) < end:
        raise Truncated(f"chunk {i} ends at {end}, the blob at {len(blob)}")
    start, stop = chunk_span(header.words, header.segment_words, header.chunk_words, i)
    n = stop - start
    planes = [bytes([record.fill]) * n] * header.word_bytes
    for p, mode in enumerate(record.modes):  # format.md 4.4: raw planes first
        if mode == RAW:
            _check(at + align(n, 16) <= end, f"chunk {i} ends within its raw plane {p}")
            planes[p] = blob[at : at + n]
            at += align(n, 16)
    for p, mode in enumerate(record.modes):
        if mode == CODED:
            before = at
            if header.codec == PREFIX:
                first, count = header.planes[p]
                table = tables[first + min(record.table, count - 1)]  # format.md 4.3
                planes[p], at = decode_plane(blob, at, end, n, table, header.word_bytes)
            else:
                planes[p], at = decode_zstd(blob, at, end, n)
            _check(at - before <= header.max_stream_bytes, f"chunk {i}: above max_stream_bytes")
    words = merge(planes, header.word_bytes, header.rotate)
    found = checksum(words)
    _check(found == record.checksum, f"chunk {i}: checksum {found:08x}, not {record.checksum:08x}")
    return words


def checksum(data: bytes) -> int:
    """Give the checksum of a chunk's words (4.5)."""
    mask = 0xFFFFFFFF
    h = [(a + 1) * 0x9E3779B1 & mask for a in range(128)]
    padded = data + bytes(-len(data) % 4)
    for i, (x,) in enumerate(struct.iter_unpack("<I", padded)):
        a = i % 128
        h[a] = ((h[a] << 5 & mask | h[a] >> 27) ^ x) * 0x9E3779B1 & mask
    total = 0
    for value in h:
        g = (value ^ value >> 15) * 0x85EBCA77 & mask
        total += g ^ g >> 13
    return total & mask


# ---------------------------------------------------------------------------------------------
# 5. The prefix codec

LANES = 32  # format.md 2.2, 5.1
STREAM_HEADER = struct.Struct("<HBB32s")  # format.md 5.2
MAX_SHIFT = 8  # format.md 5.2


def lane_words(lane: int, n: int, word_bytes: int) -> list[int]:
    """List the numbers of a lane's words in order (5.1); those from `n` on lie beyond the chunk."""
    v = 16 // word_bytes
    groups = -(-n // (LANES * v))
    return [(g * LANES + lane) * v + j for g in range(groups) for j in range(v)]


def encode_plane(plane: bytes, table: Table, word_bytes: int) -> bytes:
    """Code a plane (5.1 to 5.3); raises ValueError if the table cannot code a symbol."""
    n = len(plane)
    lanes = []
    for lane in range(LANES):
        bits = []
        for e in lane_words(lane, n, word_bytes)[:: table.kind]:
            if e >= n:
                value = table.values[0] << table.raw_bits
            elif table.kind == 1:
                value = plane[e]
            else:
                value = plane[e] | plane[min(e + 1, n - 1)] << 8
            bits.append(table.encode(value))
        lanes.append("".join(bits))
    shortest = min(map(len, lanes))
    over = [len(lane) - shortest for lane in lanes]
    shift = next(s for s in range(MAX_SHIFT + 1) if -(-max(over) >> s) <= 255)  # format.md 5.3
    excess = [-(-bits >> shift) for bits in over]
    text = "".join(lane.ljust(shortest + (d << shift), "0") for lane, d in zip(lanes, excess, strict=True))
    body = int("0" + text[::-1], 2).to_bytes(-(-len(text) // 8), "little")
    out = STREAM_HEADER.pack(shortest, shift, 0, bytes(excess)) + body
    return out.ljust(align(len(out), 4), b"\0")


def decode_plane(data: bytes, at: int, end: int, n: int, table: Table, word_bytes: int) -> tuple[bytes, int]:
    """Decode the plane of `n` words at `at` in a chunk that ends at `end` (5.2).

    Returns
    -------
    tuple of bytes and int
        The plane, and the position after it and its padding.
    """
    if len(data) < end:
        raise Truncated(f"the chunk ends at {end}, the data at {len(data)}")
    _check(at + STREAM_HEADER.size <= end, f"the chunk ends within a coded plane's header at {at}")
    shortest, shift, zero, excess = STREAM_HEADER.unpack_from(data, at)
    _check(shift <= MAX_SHIFT, f"shift is {shift}, at most {MAX_SHIFT}")
    _check(zero == 0, f"reserved byte of a coded plane is {zero}, needs 0")
    lengths = [shortest + (d << shift) for d in excess]
    size = -(-sum(lengths) // 8)
    start = at + STREAM_HEADER.size
    stop = at + align(STREAM_HEADER.size + size, 4)
    _check(stop <= end, f"a coded plane ends at {stop}, its chunk at {end}")
    bits = f"{int.from_bytes(data[start : start + size], 'little'):0{8 * size}b}"[::-1]
    plane = bytearray(n)
    bit = 0
    for lane, length in enumerate(lengths):
        values = table.decode(bits[bit : bit + length])
        bit += length
        for e in lane_words(lane, n, word_bytes)[:: table.kind]:
            symbols = next(values).to_bytes(table.kind, "little")[: max(0, n - e)]
            plane[e : e + len(symbols)] = symbols
    return bytes(plane), stop


# ---------------------------------------------------------------------------------------------
# 6. The zstd codec


def encode_zstd(plane: bytes, level: int = 3) -> bytes:
    """Code a plane as one zstd frame after its size, padded to a multiple of 4 (6, 4.4)."""
    frame = zstandard.ZstdCompressor(level=level, write_content_size=True).compress(plane)
    out = struct.pack("<I", len(frame)) + frame
    return out.ljust(align(len(out), 4), b"\0")


def decode_zstd(data: bytes, at: int, end: int, n: int) -> tuple[bytes, int]:
    """Decode the plane of `n` words at `at` in a chunk that ends at `end`, as `decode_plane`."""
    _check(at + 4 <= end, f"the chunk ends within a coded plane's size at {at}")
    size = int.from_bytes(data[at : at + 4], "little")
    stop = at + align(4 + size, 4)
    _check(stop <= end, f"a coded plane ends at {stop}, its chunk at {end}")
    frame = data[at + 4 : at + 4 + size]
    try:
        found = zstandard.get_frame_parameters(frame)
        _check(found.content_size == n, f"a frame states {found.content_size} bytes, needs {n}")
        _check(found.dict_id == 0, f"a frame needs dictionary {found.dict_id}")
        decompressor = zstandard.ZstdDecompressor()
        plane = decompressor.decompress(frame, max_output_size=n, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Corrupt(f"a zstd frame of {size} bytes is damaged: {error}") from error
    _check(len(plane) == n, f"a frame holds {len(plane)} bytes, needs {n}")
    return plane, stop


# ---------------------------------------------------------------------------------------------
# Whole blobs


def decode_blob(blob: bytes, *, limit: int = 1 << 30) -> bytes:
    """Decode a blob to the original bytes and check everything that can be checked.

    `limit` bounds the result's size: a few bytes may describe an original of any size.
    """
    header = parse_header(blob)
    size = header.words * header.word_bytes
    if size > limit:
        raise TpdeError(f"the original has {size} bytes, above the limit of {limit}")
    if header.codec == CONSTANT:
        data = header.constant[: header.word_bytes] * header.words
    else:
        tables = parse_tables(header, blob)
        records = parse_index(header, blob)
        out = bytearray()
        for i in range(header.chunks):
            out += decode_chunk(header, tables, records, i, blob)
        data = bytes(out)
    found = xxhash.xxh3_128_digest(data)
    _check(found == header.hash, f"hash is {header.hash.hex()}, the words have {found.hex()}")
    return data


class _Chunk(NamedTuple):
    """A coded chunk; `size` is without its padding to the unit."""

    size: int
    table: int
    modes: tuple[int, ...]
    fill: int
    raw: list[bytes]
    coded: list[bytes]


def _encode_chunk(
    planes: Sequence[bytes], codec: int, tables: Sequence[Table], uses: Sequence[tuple[int, int]]
) -> _Chunk:
    """Code a chunk as 4.3 to 5.3 say, sizes compared before the padding to the unit."""
    n = len(planes[0])
    constants = [plane[0] for plane in planes if plane == plane[:1] * n]
    fill = constants[0] if constants else 0

    def code(p: int, v: int) -> bytes | None:
        if codec == ZSTD:
            return encode_zstd(planes[p])
        first, count = uses[p]
        if count == 0:
            return None
        try:
            return encode_plane(planes[p], tables[first + min(v, count - 1)], len(planes))
        except ValueError:  # a symbol that this table cannot code
            return None

    def build(v: int) -> _Chunk:
        modes, raw, coded = [], [], []
        for p, plane in enumerate(planes):
            if constants and plane == bytes([fill]) * n:
                modes.append(FILL)
            elif (stream := code(p, v)) is not None and len(stream) < align(n, 16):
                modes.append(CODED)
                coded.append(stream)
            else:
                modes.append(RAW)
                raw.append(plane.ljust(align(n, 16), b"\0"))
        return _Chunk(sum(map(len, raw + coded)), v, tuple(modes), fill, raw, coded)

    variants = range(max(1, *(count for _, count in uses)))
    return min(map(build, variants), key=lambda chunk: chunk.size)  # the lowest of equals


def encode_blob(
    data: bytes,
    dtype: str,
    shape: tuple[int, ...],
    *,
    codec: str = "prefix",
    tables: Sequence[Table] = (),
    planes: Sequence[tuple[int, int]] = (),
    segment_words: int | None = None,
    chunk_words: int = 8192,
    unit_log2: int = 4,
) -> bytes:
    """Write a blob with the given tables and planes, as a writer must.

    Parameters
    ----------
    data, dtype, shape
        The original bytes and what they are.
    codec
        "prefix", "zstd" or "constant".
    tables, planes
        The tables, and each plane's (first_table, table_count); () codes no plane with a table.
    segment_words
        None for one segment.
    chunk_words, unit_log2
        As in the header.
    """
    code, word_bytes, rotate, _ = DTYPES[dtype]
    words, odd = divmod(len(data), word_bytes)
    if odd:
        raise ValueError(f"{len(data)} bytes are not a multiple of {word_bytes}")
    if segment_words is None:
        segment_words = max(words, 1)
    constant = bytes(8)
    uses = tuple(planes) or ((0, 0),) * word_bytes
    if codec == "constant":
        if data[:word_bytes] * words != data:
            raise ValueError("the words are not all equal")
        constant, uses, tables = data[:word_bytes].ljust(8, b"\0"), (), ()
    elif len(uses) != word_bytes:
        raise ValueError(f"{len(uses)} planes are given, {dtype} has {word_bytes}")
    section = b"".join(table.serialize() for table in tables)
    section = section.ljust(align(len(section), 16), b"\0")
    header = Header(
        CODECS[codec], code, word_bytes, rotate, words, segment_words, 0, 0, chunk_words, 0, 0,
        len(tables), unit_log2, xxhash.xxh3_128_digest(data), constant, len(section), shape, uses,
    )  # fmt: skip
    _check_geometry(header.codec, words, segment_words, chunk_words)
    if codec != "constant":
        header.chunks = count_chunks(words, segment_words, chunk_words)
    index, body = bytearray(), bytearray()
    for i in range(header.chunks):
        start, stop = chunk_span(words, segment_words, chunk_words, i)
        part = data[start * word_bytes : stop * word_bytes]
        chunk = _encode_chunk(split(part, word_bytes, rotate), header.codec, tables, uses)
        modes = sum(mode << 2 * p for p, mode in enumerate(chunk.modes))
        offset = (header.chunks_at + len(body)) >> unit_log2
        index += RECORD.pack(offset, checksum(part), modes, chunk.table, chunk.fill)
        size = align(chunk.size, 1 << unit_log2)
        body += b"".join(chunk.raw + chunk.coded).ljust(size, b"\0")
        header.max_chunk_bytes = max(header.max_chunk_bytes, size)
        header.max_stream_bytes = max(header.max_stream_bytes, *map(len, chunk.coded), 0)
    header.blob_bytes = header.chunks_at + len(body)
    meta = header.serialize() + section + index
    header.meta_hash = meta_hash_of(meta.ljust(header.chunks_at, b"\0"))
    blob = (header.serialize() + section + index).ljust(header.chunks_at, b"\0") + body
    parse_header(blob)  # every "must" that the arguments could break
    return bytes(blob)
