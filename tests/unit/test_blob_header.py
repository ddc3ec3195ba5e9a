"""Blob headers are read as they were written, and every damaged field gives an error of its class."""

from __future__ import annotations

import dataclasses
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.contents import spec_of
from support.craft import FIELDS, constant_blob, edited, patch, prefix_blob, reseal, zstd_blob

from tpde.codec import reference
from tpde.codec.selection import ZSTD_CHUNK_WORDS, base_header
from tpde.errors import Corrupt, TpdeError, Truncated, UnsupportedVersion
from tpde.format.blob_header import MAX_FIXED_BYTES, BlobHeader, parse_blob_header
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


# ---- what is told of a header that cannot be

PLANES = HEADER_BYTES + 8 * 2  # of `prefix`, which has two dimensions
ONE_PLANE = HEADER_BYTES + 8  # of `zstd`


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        ("prefix", {"magic": 0}, "the magic bytes are missing"),
        ("prefix", {"codec": 0}, "codec 0 is unknown"),
        ("prefix", {"codec": 4}, "codec 4 is unknown"),
        ("prefix", {"layout": 1}, "layout 1 is unknown"),
        ("prefix", {"dtype": 11}, "dtype 11 is unknown"),
        ("prefix", {"ndim": 65}, "65 dimensions, at most 64"),
        ("prefix", {"word_bytes": 4}, "words do not fit BF16"),
        ("prefix", {"rotate": 0}, "words do not fit BF16"),
        ("prefix", {"rotate": 2}, "words do not fit BF16"),
        ("prefix", {"words": 1 << 59}, "576460752303423488 words are too many"),
        ("prefix", {"words": (1 << 59) - 1}, "and 576460752303423487 words differ"),
        ("prefix", {"words": 1501}, r"shape \[3, 500\] and 1501 words differ"),
        ("prefix", {"words": 1499}, r"shape \[3, 500\] and 1499 words differ"),
        ("prefix", {"base": 1}, "the blob is a delta"),
        ("prefix", {"context": 1}, "reserved bytes are not zero"),
        ("prefix", {"reserved": 1}, "reserved bytes are not zero"),
        ("prefix", {"reserved_2": 1}, "reserved bytes are not zero"),
        ("prefix", {"constant": 1}, "a constant without its codec"),
        ("zstd", {"constant": 1}, "a constant without its codec"),
        ("prefix", {"tables": 17}, "17 tables, at most 16"),
        ("prefix", {"unit_log2": 3}, r"a unit of 2\^3 bytes"),
        ("prefix", {"unit_log2": 13}, r"a unit of 2\^13 bytes"),
        ("prefix", {"chunk_words": 256}, "chunks of 256 words"),
        ("prefix", {"chunk_words": 0}, "chunks of 0 words"),
        ("prefix", {"chunk_words": 768}, "chunks of 768 words"),
        ("prefix", {"chunk_words": 65536}, "chunks of 65536 words"),
        ("zstd", {"chunk_words": 131072}, "chunks of 131072 words"),
        ("constant", {"chunk_words": 131072}, "chunks of 131072 words"),
        ("prefix", {"segment_words": 0}, "segments of 0 words"),
        ("prefix", {"segment_words": 1501}, "segments of 1501 words"),
        ("prefix", {"tables": 0}, "a plane uses tables 0 to 1"),
        ("prefix", {"chunks": 2}, "2 chunks, 3 by the shape"),
        ("prefix", {"chunks": 4}, "4 chunks, 3 by the shape"),
        ("constant", {"chunks": 1}, "1 chunks, 0 by the shape"),
        ("prefix", {"max_chunk_bytes": 1040}, "chunks of up to 1040 bytes, 1024 are enough"),
        ("constant", {"max_chunk_bytes": 16}, "chunks of up to 16 bytes, 0 are enough"),
        ("prefix", {"max_chunk_bytes": 1016}, "chunks and planes of up to 1016"),
        ("prefix", {"max_stream_bytes": 2}, "chunks and planes of up to .* 2 bytes"),
        (
            "prefix",
            {"max_chunk_bytes": 1008, "max_stream_bytes": 1012},
            "planes of up to 1012 bytes in chunks of 1008",
        ),
        ("constant", {"max_stream_bytes": 4}, "planes of up to 4 bytes in chunks of 0"),
        ("prefix", {"tables_bytes": 8}, "a table section of 8 bytes"),
        ("prefix", {"tables_bytes": 131_600}, "a table section of 131600 bytes"),
        ("prefix", {"tables_bytes": 131_584}, "before its chunks"),
        ("zstd", {"tables": 1}, "tables without their codec"),
        ("zstd", {"tables_bytes": 16}, "tables without their codec"),
        ("constant", {"tables": 1}, "tables without their codec"),
    ],
)
def test_headers_that_cannot_be_say_what_is_wrong(name: str, fields: dict[str, int], says: str) -> None:
    blob = edited(BLOBS[name], **fields)
    with pytest.raises(Corrupt, match=says) as caught:
        parse_blob_header(blob, len(blob))
    assert caught.value.hint == "the header is damaged, fetch the file again"


@pytest.mark.parametrize(
    ("name", "at", "data", "says"),
    [
        ("prefix", PLANES + 2, b"\1", "reserved bytes of a plane"),
        ("prefix", PLANES + 7, b"\1", "reserved bytes of a plane"),
        ("prefix", PLANES + 4, b"\0\2", "a plane uses tables 0 to 2"),
        ("prefix", PLANES + 4, b"\1\1", "a plane uses tables 1 to 2"),
        ("zstd", ONE_PLANE, b"\1\0", "a plane's tables without their codec"),
        ("zstd", ONE_PLANE, b"\0\1", "a plane uses tables 0 to 1"),
        ("constant", 98, b"\1", "a constant larger than a word"),
        ("constant", 103, b"\1", "a constant larger than a word"),
    ],
)
def test_planes_and_constants_that_cannot_be_say_what_is_wrong(
    name: str, at: int, data: bytes, says: str
) -> None:
    blob = patch(BLOBS[name], at, data)
    with pytest.raises(Corrupt, match=says):
        parse_blob_header(blob, len(blob))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("prefix", {"tables": 16}),
        ("prefix", {"segment_words": 1500}),
        ("prefix", {"segment_words": 512}),
        ("prefix", {"chunk_words": 32768, "chunks": 1}),
        ("zstd", {"chunk_words": 65536}),
        ("prefix", {"max_chunk_bytes": 1024}),
        ("prefix", {"max_chunk_bytes": 1024, "max_stream_bytes": 1024}),
        ("prefix", {"max_stream_bytes": 0}),
    ],
)
def test_fields_at_their_limits_are_taken(name: str, fields: dict[str, int]) -> None:
    blob = edited(BLOBS[name], **fields)
    header = parse_blob_header(blob, len(blob))
    for field, value in fields.items():
        assert getattr(header, field) == value


def test_a_plane_without_tables_may_name_any() -> None:
    blob = patch(BLOBS["prefix"], PLANES, b"\7\0")
    assert parse_blob_header(blob, len(blob)).planes == ((7, 0), (0, 1))


def test_a_blob_ends_where_its_chunks_do() -> None:
    prefix, constant = (parse_blob_header(BLOBS[it], len(BLOBS[it])) for it in ("prefix", "constant"))
    for size in (0, prefix.chunks_at - 1):
        with pytest.raises(Corrupt, match=f"the blob ends at {size}, before its chunks"):
            parse_blob_header(edited(BLOBS["prefix"], blob_bytes=size), 1 << 20)
    assert parse_blob_header(edited(BLOBS["prefix"], blob_bytes=prefix.chunks_at), 1 << 20)
    with pytest.raises(
        Corrupt, match=f"{constant.chunks_at + 16} bytes, {constant.chunks_at} without chunks"
    ):
        parse_blob_header(edited(BLOBS["constant"], blob_bytes=constant.chunks_at + 16), 1 << 20)
    size = len(BLOBS["prefix"])
    with pytest.raises(Truncated) as caught:
        parse_blob_header(BLOBS["prefix"], size - 1)
    assert (caught.value.found, caught.value.needed) == (size - 1, size)


@pytest.mark.parametrize("name", BLOBS)
def test_padding_before_the_chunks_is_zero(name: str) -> None:
    """Also under a hash that fits."""
    header = parse_blob_header(BLOBS[name], len(BLOBS[name]))
    planes_end = HEADER_BYTES + 8 * len(header.spec.shape) + 4 * len(header.planes)
    index_end = header.index_at + RECORD_BYTES * header.chunks
    for at in (*range(planes_end, header.tables_at), *range(index_end, header.chunks_at)):
        blob = reseal(patch(BLOBS[name], at, b"\1"), header.chunks_at)
        with pytest.raises(Corrupt, match=r"padding .* is not zero"):
            _parse_all(blob)
    damaged = patch(BLOBS[name], HEADER_BYTES - 8, bytes(8))
    with pytest.raises(Corrupt, match="their hash is"):
        _parse_all(damaged)


@pytest.mark.parametrize("name", BLOBS)
def test_a_header_that_is_cut_says_how_much_is_there(name: str) -> None:
    blob = BLOBS[name]
    header = parse_blob_header(blob, len(blob))
    end = HEADER_BYTES + 8 * len(header.spec.shape) + 4 * len(header.planes)
    for size in (0, HEADER_BYTES - 1, HEADER_BYTES, end - 1):
        for data in (blob[:size], blob):
            with pytest.raises(Truncated, match=f"header .*here are {size}"):
                parse_blob_header(data, size)
        with pytest.raises(Truncated, match=f"header .*here are {size}"):
            parse_blob_header(blob[:size], len(blob))


def test_the_last_chunk_of_a_segment_ends_with_it() -> None:
    header = BlobHeader(spec_of("U8", 2000), CODEC_PREFIX, 700, 512)
    assert header.chunks == 6
    assert [header.chunk_range(i, i) for i in range(6)] == [
        (0, 512), (512, 700), (700, 1212), (1212, 1400), (1400, 1912), (1912, 2000),
    ]  # fmt: skip
    assert header.chunk_range(1, 4) == (512, 1912)
    assert BlobHeader(spec_of("U8", 0), CODEC_PREFIX, 1, 512).chunks == 0
