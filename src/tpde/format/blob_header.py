"""Blob headers (docs/format.md 2): reading, checking and writing them."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

import xxhash

from tpde.errors import Corrupt, Truncated, UnsupportedVersion
from tpde.format.constants import (
    CODEC_FACTS,
    DTYPE_BY_CODE,
    DTYPES,
    HEADER_BYTES,
    LAYOUT_LINEAR,
    MAGIC,
    MAX_BYTES,
    MAX_DIMS,
    MAX_TABLES,
    MAX_TABLES_BYTES,
    MAX_UNIT_LOG2,
    MIN_CHUNK_WORDS,
    MIN_UNIT_LOG2,
    RECORD_BYTES,
    VERSION,
)
from tpde.format.container import TensorSpec

# format.md 2, field for field
_FIXED = struct.Struct("<8sHBBBBBBQQQQIIIBBBB16s16s8sI12sQ")
assert _FIXED.size == HEADER_BYTES
MAX_FIXED_BYTES = HEADER_BYTES + 8 * MAX_DIMS + 4 * 8 + 16  # to the end of the planes


def align(value: int, unit: int) -> int:
    """Round up to a multiple of `unit`."""
    return -(-value // unit) * unit


@dataclass(frozen=True)
class BlobHeader:
    """What a blob says of its tensor (docs/format.md 2, fields under their names there)."""

    spec: TensorSpec
    codec: int
    segment_words: int
    chunk_words: int
    unit_log2: int = MIN_UNIT_LOG2
    planes: tuple[tuple[int, int], ...] = ()
    tables: int = 0
    tables_bytes: int = 0
    blob_bytes: int = 0
    max_chunk_bytes: int = 0
    max_stream_bytes: int = 0
    hash: bytes = field(default=bytes(16), repr=False)
    constant: bytes = bytes(8)
    meta_hash: int = 0

    @cached_property
    def word_bytes(self) -> int:
        """Bytes of a word."""
        return DTYPES[self.spec.dtype].word_bytes

    @property
    def rotate(self) -> int:
        """Whether words are rotated before they are split into planes."""
        return DTYPES[self.spec.dtype].rotate

    @cached_property
    def words(self) -> int:
        """Number of words."""
        return self.spec.nbytes // self.word_bytes

    @cached_property
    def chunked(self) -> bool:
        """Whether its codec has chunks; without, `constant` says all."""
        return CODEC_FACTS[self.codec].chunks

    @cached_property
    def chunks(self) -> int:
        """Number of chunks (format.md 4.1)."""
        if not self.chunked or not self.words:
            return 0
        full, rest = divmod(self.words, self.segment_words)
        per = -(-self.segment_words // self.chunk_words)
        return full * per + -(-rest // self.chunk_words)

    def chunk_range(self, first: int, last: int) -> tuple[int, int]:
        """Words from the start of chunk `first` to the end of chunk `last`."""
        return self._chunk(first)[0], self._chunk(last)[1]

    def _chunk(self, number: int) -> tuple[int, int]:
        per = -(-self.segment_words // self.chunk_words)
        segment, inside = divmod(number, per)
        begin = segment * self.segment_words + inside * self.chunk_words
        end = min(begin + self.chunk_words, (segment + 1) * self.segment_words, self.words)
        return begin, end

    def chunk_of(self, word: int) -> int:
        """Number of the chunk that holds a word."""
        per = -(-self.segment_words // self.chunk_words)
        segment, inside = divmod(word, self.segment_words)
        return segment * per + inside // self.chunk_words

    @cached_property
    def tables_at(self) -> int:
        """Where the table section starts."""
        planes = 4 * self.word_bytes if self.chunked else 0
        return align(HEADER_BYTES + 8 * len(self.spec.shape) + planes, 16)

    @cached_property
    def index_at(self) -> int:
        """Where the index map starts."""
        return self.tables_at + self.tables_bytes

    @cached_property
    def chunks_at(self) -> int:
        """Where the first chunk starts, or the blob ends if it has none."""
        if not self.chunked:
            return self.tables_at
        return align(self.index_at + RECORD_BYTES * self.chunks, 1 << self.unit_log2)

    def _fixed(self, meta_hash: int) -> bytes:
        fixed = _FIXED.pack(
            MAGIC,
            VERSION,
            self.codec,
            LAYOUT_LINEAR,
            DTYPES[self.spec.dtype].code,
            self.word_bytes,
            self.rotate,
            len(self.spec.shape),
            self.words,
            self.segment_words,
            self.chunks,
            self.blob_bytes,
            self.chunk_words,
            self.max_chunk_bytes,
            self.max_stream_bytes,
            self.tables,
            self.unit_log2,
            0,
            0,
            self.hash,
            bytes(16),
            self.constant,
            self.tables_bytes,
            bytes(12),
            meta_hash,
        )
        shape = struct.pack(f"<{len(self.spec.shape)}Q", *self.spec.shape)
        planes = b"".join(struct.pack("<BBH", a, n, 0) for a, n in self.planes)
        return (fixed + shape + planes).ljust(self.tables_at, b"\0")

    def write(self, tables: bytes, index: bytes) -> bytes:
        """Write everything before the first chunk, with its hash.

        Parameters
        ----------
        tables : bytes
            The table section.
        index : bytes
            The index map.

        Returns
        -------
        bytes
            `chunks_at` bytes.
        """
        rest = tables + index + bytes(self.chunks_at - self.index_at - len(index))
        meta_hash = xxhash.xxh3_64_intdigest(self._fixed(0) + rest)
        return self._fixed(meta_hash) + rest

    def check_meta(self, meta: bytes) -> None:
        """Check everything before the first chunk against its hash, and that what means nothing is zero.

        Raises
        ------
        Corrupt
            If it differs, or padding is not zero.
        """
        at = HEADER_BYTES - 8
        hasher = xxhash.xxh3_64(meta[:at])
        hasher.update(bytes(8))
        hasher.update(meta[HEADER_BYTES:])
        if hasher.intdigest() != self.meta_hash:
            raise Corrupt(
                f"header, tables or index map are damaged: their hash is {hasher.intdigest():016x}, the "
                f"header says {self.meta_hash:016x}",
                hint="fetch the file again",
            )
        planes_end = HEADER_BYTES + 8 * len(self.spec.shape) + 4 * len(self.planes)
        index_end = self.index_at + RECORD_BYTES * self.chunks
        if any(meta[planes_end : self.tables_at]) or any(meta[index_end : self.chunks_at]):
            raise Corrupt(
                "padding between header, tables and chunks is not zero", hint="fetch the file again"
            )


def parse_blob_header(data: bytes, size: int) -> BlobHeader:
    """Parse and check a blob's header, shape and planes.

    Parameters
    ----------
    data : bytes
        The blob's first bytes: `MAX_FIXED_BYTES`, or all if it has fewer.
    size : int
        Size in bytes of the tensor that holds the blob.

    Raises
    ------
    Truncated, UnsupportedVersion, Corrupt
        With what was found and what is needed. The caller adds the tensor's name.
    """

    def need(ok: bool, what: str) -> None:
        if not ok:
            raise Corrupt(what, hint="the header is damaged, fetch the file again")

    if size < HEADER_BYTES or len(data) < HEADER_BYTES:
        raise Truncated(f"a blob header has {HEADER_BYTES} bytes, here are {min(size, len(data))}")
    fields = iter(_FIXED.unpack(data[:HEADER_BYTES]))
    magic, version, codec, layout, code, word_bytes, rotate, ndim = islice(fields, 8)
    words, segment_words, chunks, blob_bytes = islice(fields, 4)
    chunk_words, max_chunk, max_stream, tables, unit_log2, context, reserved = islice(fields, 7)
    digest, base, constant, tables_bytes, more, meta_hash = fields
    need(magic == MAGIC, "the magic bytes are missing")
    if version != VERSION:
        raise UnsupportedVersion(
            f"format version {version}; this tpde reads version {VERSION}",
            hint="upgrade tpde",
            found=version,
            needed=VERSION,
        )
    need(codec in CODEC_FACTS, f"codec {codec} is unknown")
    facts = CODEC_FACTS[codec]
    need(layout == LAYOUT_LINEAR, f"layout {layout} is unknown")
    need(code in DTYPE_BY_CODE, f"dtype {code} is unknown")
    dtype = DTYPE_BY_CODE[code]
    need(ndim <= MAX_DIMS, f"{ndim} dimensions, at most {MAX_DIMS} are allowed")
    need((word_bytes, rotate) == (dtype.word_bytes, dtype.rotate), f"words do not fit {dtype.name}")
    need(words * word_bytes < MAX_BYTES, f"{words} words are too many")
    planes_at = HEADER_BYTES + 8 * ndim
    planes_end = planes_at + (4 * word_bytes if facts.chunks else 0)
    if size < planes_end or len(data) < planes_end:
        raise Truncated(f"the blob's header needs {planes_end} bytes, here are {min(size, len(data))}")
    shape = struct.unpack(f"<{ndim}Q", data[HEADER_BYTES:planes_at])
    need(
        math.prod(shape) * dtype.bits == words * word_bytes * 8,
        f"shape {list(shape)} and {words} words differ",
    )
    need(not any(base), "the blob is a delta, which version 1 does not have")
    need(context == 0 and not reserved and not any(more), "reserved bytes are not zero")
    need(not facts.chunks or not any(constant), "a constant without its codec")
    need(not any(constant[word_bytes:]), "a constant larger than a word")
    need(tables <= MAX_TABLES, f"{tables} tables, at most {MAX_TABLES} are allowed")
    need(MIN_UNIT_LOG2 <= unit_log2 <= MAX_UNIT_LOG2, f"a unit of 2^{unit_log2} bytes")
    need(
        MIN_CHUNK_WORDS <= chunk_words <= facts.max_chunk_words and chunk_words & (chunk_words - 1) == 0,
        f"chunks of {chunk_words} words",
    )
    need(1 <= segment_words <= max(words, 1), f"segments of {segment_words} words")
    planes = []
    for at in range(planes_at, planes_end, 4):
        first, count, zero = struct.unpack("<BBH", data[at : at + 4])
        need(zero == 0, "reserved bytes of a plane are not zero")
        need(not count or first + count <= tables, f"a plane uses tables {first} to {first + count}")
        need(facts.tables or (first, count) == (0, 0), "a plane's tables without their codec")
        planes.append((first, count))
    try:
        spec = TensorSpec(dtype.name, shape)
    except ValueError as error:
        raise Corrupt(str(error), hint="the header is damaged, fetch the file again") from None
    header = BlobHeader(
        spec=spec,
        codec=codec,
        segment_words=segment_words,
        chunk_words=chunk_words,
        unit_log2=unit_log2,
        planes=tuple(planes),
        tables=tables,
        tables_bytes=tables_bytes,
        blob_bytes=blob_bytes,
        max_chunk_bytes=max_chunk,
        max_stream_bytes=max_stream,
        hash=digest,
        constant=constant,
        meta_hash=meta_hash,
    )
    need(chunks == header.chunks, f"{chunks} chunks, {header.chunks} by the shape")
    limit = align(word_bytes * chunk_words, 1 << unit_log2) if chunks else 0
    need(max_chunk <= limit, f"chunks of up to {max_chunk} bytes, {limit} are enough for any")
    need(
        max_chunk % 16 == 0 and max_stream % 4 == 0,
        f"chunks and planes of up to {max_chunk}, {max_stream} bytes",
    )
    need(max_stream <= max_chunk, f"planes of up to {max_stream} bytes in chunks of {max_chunk}")
    whole = tables_bytes % 16 == 0 and tables_bytes <= MAX_TABLES_BYTES
    need(whole, f"a table section of {tables_bytes} bytes")
    need(facts.tables or not tables_bytes + tables, "tables without their codec")
    need(header.chunks_at <= blob_bytes, f"the blob ends at {blob_bytes}, before its chunks")
    need(
        bool(chunks) or blob_bytes == header.chunks_at,
        f"{blob_bytes} bytes, {header.chunks_at} without chunks",
    )
    need(blob_bytes <= 1 << (32 + unit_log2), f"a blob of {blob_bytes} bytes, more than 2^32 units")
    if blob_bytes > size:
        raise Truncated(f"the blob has {blob_bytes} bytes, here are {size}", found=size, needed=blob_bytes)
    return header


def with_results(
    header: BlobHeader, *, blob_bytes: int, max_chunk: int, max_stream: int, digest: bytes
) -> BlobHeader:
    """Fill in what is known only when all chunks are written."""
    return replace(
        header,
        blob_bytes=blob_bytes,
        max_chunk_bytes=max_chunk,
        max_stream_bytes=max_stream,
        hash=digest,
    )
