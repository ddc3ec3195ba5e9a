"""Blob headers are read as they were written, and every damaged field gives an error of its class."""

from __future__ import annotations

import dataclasses
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.contents import spec_of
from support.craft import FIELDS, constant_blob, edited, prefix_blob, zstd_blob

from tpde.codec import reference
from tpde.codec.plan import ZSTD_CHUNK_WORDS, base_header
from tpde.errors import Corrupt, TpdeError, Truncated, UnsupportedVersion
from tpde.format.blob import MAX_FIXED_BYTES, BlobHeader, parse_blob_header
from tpde.format.constants import (
    CODEC_PREFIX,
    CODEC_ZSTD,
    DTYPES,
    HEADER_BYTES,
    MAX_DIMS,
    MAX_UNIT_LOG2,
    MIN_UNIT_LOG2,
    RECORD_BYTES,
)
from tpde.format.container import TensorSpec

BLOBS = {"prefix": prefix_blob(), "zstd": zstd_blob(), "constant": constant_blob()}


@pytest.mark.parametrize("name", BLOBS)
def test_the_reference_and_the_package_read_the_same_header(name: str) -> None:
    blob = BLOBS[name]
    header, needed = parse_blob_header(blob[:MAX_FIXED_BYTES], len(blob)), reference.parse_header(blob)
    for field in dataclasses.fields(reference.Header):
        if field.name in ("dtype", "shape", "version", "layout", "context", "base"):
            continue
        found = getattr(header, field.name)
        assert found == getattr(needed, field.name), field.name
    assert DTYPES[header.spec.dtype].code == needed.dtype
    assert header.spec.shape == needed.shape
    assert (header.tables_at, header.index_at) == (needed.tables_at, needed.index_at)
    assert header.chunks_at == needed.chunks_at
    header.check_meta(blob[: header.chunks_at])


@pytest.mark.parametrize("name", BLOBS)
def test_headers_are_written_as_they_were_read(name: str) -> None:
    blob = BLOBS[name]
    header = parse_blob_header(blob, len(blob))
    section = blob[header.tables_at : header.index_at]
    index = blob[header.index_at : header.index_at + RECORD_BYTES * header.chunks]
    assert header.write(section, index) == blob[: header.chunks_at]


def _parse_all(blob: bytes) -> None:
    header = parse_blob_header(blob, len(blob))
    header.check_meta(blob[: header.chunks_at])


@pytest.mark.parametrize("name", BLOBS)
@pytest.mark.parametrize("field", FIELDS)
def test_every_field_damaged_gives_a_typed_error(name: str, field: str) -> None:
    at, kind = FIELDS[field]
    blob, size = BLOBS[name], struct.calcsize(kind)
    old = int.from_bytes(blob[at : at + size], "little")
    largest = (1 << (8 * size)) - 1
    for value in {0, 1, 2, 3, old ^ 1, old + 1, old * 2, largest, largest // 2 + 1} - {old}:
        if value > largest:
            continue
        damaged = blob[:at] + value.to_bytes(size, "little") + blob[at + size :]
        expected = (Corrupt, Truncated)
        if field == "version":
            expected = (UnsupportedVersion,)
        with pytest.raises(expected, match=r"fetch|upgrade|here are"):
            _parse_all(damaged)


@pytest.mark.parametrize("unit", range(MIN_UNIT_LOG2, MAX_UNIT_LOG2 + 1))
def test_blobs_end_where_offsets_do(unit: int) -> None:
    most = 1 << (32 + unit)
    for size in (most, most + 1, most + (1 << unit), most * 2):
        head = edited(BLOBS["prefix"], unit_log2=unit, blob_bytes=size)[:MAX_FIXED_BYTES]
        if size == most:
            assert parse_blob_header(head, size).blob_bytes == size
        else:
            with pytest.raises(Corrupt, match=r"more than 2\^32 units"):
                parse_blob_header(head, size)


@pytest.mark.parametrize("name", BLOBS)
def test_headers_cut_anywhere_are_truncated(name: str) -> None:
    blob = BLOBS[name]
    for size in range(len(blob)):
        with pytest.raises(Truncated):
            parse_blob_header(blob[: min(size, MAX_FIXED_BYTES)], size)


@given(st.binary(max_size=400))
def test_random_bytes_are_refused(data: bytes) -> None:
    for start in (b"", BLOBS["prefix"][:8], BLOBS["prefix"][:16], BLOBS["prefix"][:64]):
        blob = (start + data)[:400]
        with pytest.raises(TpdeError):
            _parse_all(blob)


def test_the_most_dimensions_fit() -> None:
    header = base_header(TensorSpec("F64", (1,) * MAX_DIMS), CODEC_ZSTD, ZSTD_CHUNK_WORDS)
    assert header.tables_at <= MAX_FIXED_BYTES
    assert header.tables_at > HEADER_BYTES + 8 * MAX_DIMS


@given(
    st.integers(1, 200_000),
    st.integers(1, 200_000),
    st.sampled_from([512, 1024, 8192]),
    st.sampled_from(["U8", "BF16", "F64"]),
)
def test_chunks_cover_the_words_once(words: int, segment: int, chunk: int, dtype: str) -> None:
    header = BlobHeader(spec_of(dtype, words), CODEC_PREFIX, min(segment, words), chunk)
    if header.chunks > 3000:
        return
    assert header.chunks == reference.count_chunks(words, min(segment, words), chunk)
    at = 0
    for i in range(header.chunks):
        begin, end = header.chunk_range(i, i)
        assert (begin, end) == reference.chunk_span(words, header.segment_words, chunk, i)
        assert begin == at < end
        assert header.chunk_of(begin) == header.chunk_of(end - 1) == i
        at = end
    assert at == words
