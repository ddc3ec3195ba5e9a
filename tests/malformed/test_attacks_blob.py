"""Attacks on blobs: header, tables, index map and chunks (docs/reference/attacks.md, A18 to A38)."""

from __future__ import annotations

import contextlib
import struct
from unittest import mock

import numpy as np
import pytest
import zstandard
from support.craft import (
    DATA,
    SPEC,
    TABLE,
    bounded,
    constant_blob,
    edited,
    edited_record,
    edited_section,
    file_of,
    patch,
    prefix_blob,
    read_blob,
    refused,
    reseal,
    zstd_blob,
)

from tpde.codec import reference
from tpde.errors import Corrupt, Truncated, UnsupportedVersion
from tpde.files.checked_reads import stream
from tpde.files.reader import PackedFile


def test_the_blobs_that_are_attacked_are_valid() -> None:
    for blob in (prefix_blob(), zstd_blob(), constant_blob()):
        assert read_blob(blob) == reference.decode_blob(blob)
    header = reference.parse_header(prefix_blob())
    records = reference.parse_index(header, prefix_blob())
    assert [r.modes for r in records] == [(reference.RAW, reference.CODED)] * 3
    assert edited(prefix_blob()) == prefix_blob()
    assert reference.parse_index(reference.parse_header(zstd_blob()), zstd_blob())[0].modes == (2,)


@pytest.mark.parametrize("words", [1 << 60, (1 << 59), (1 << 59) - 1, (1 << 64) - 1, 1 << 63])
def test_a18_more_words_than_there_are(words: int) -> None:
    with bounded(1):
        for blob in (prefix_blob(), zstd_blob(), constant_blob()):
            refused(edited(blob, words=words))
            refused(edited(blob, words=words, chunks=words // 512, segment_words=words))


def test_a19_a_shape_whose_product_overflows() -> None:
    header = reference.parse_header(constant_blob())
    for dims in ([1 << 32, 1 << 32], [(1 << 64) - 1, 1 << 63], [1 << 63, 2, 999], [0, 1 << 63]):
        header.shape = tuple(dims)
        header.blob_bytes = header.tables_at
        blob = header.serialize()
        refused(reseal(blob, len(blob)))


def test_a20_a_few_bytes_that_describe_an_exbibyte() -> None:
    header = reference.parse_header(constant_blob())
    header.words = header.segment_words = (1 << 59) - 1
    header.shape = (header.words,)
    blob = reseal(header.serialize(), header.tables_at)
    with bounded(1), PackedFile(file_of(blob)) as file:  # it is valid: nothing is allocated until asked
        assert file.specs["x"].nbytes == (1 << 60) - 2
        out = np.empty(5, np.uint8)
        file.tensor("x").read((1 << 59) + 1, (1 << 59) + 6, out)
        assert out.tobytes() == b"\x3f\x80\x3f\x80\x3f"

    header.words = header.segment_words = 1 << 40  # fewer pieces, lest a list of them fill the memory
    header.shape = (header.words,)
    blob = reseal(header.serialize(), header.tables_at)
    read = mock.Mock(side_effect=KeyboardInterrupt)
    # When the whole is read, a piece at a time is.
    with bounded(16), PackedFile(file_of(blob)) as file, pytest.raises(KeyboardInterrupt):
        stream(file.tensor("x"), 1, read)


@pytest.mark.parametrize("field", ["context", "reserved", "reserved_2"])
def test_a21_reserved_fields(field: str) -> None:
    for blob in (prefix_blob(), zstd_blob(), constant_blob()):
        refused(edited(blob, **{field: 1}))


def test_a22_reserved_bytes_of_planes_and_a_constant_without_its_codec() -> None:
    header = reference.parse_header(prefix_blob())
    planes = reference.HEADER.size + 8 * len(header.shape)
    for at in (planes + 2, planes + 3, planes + 6):
        refused(reseal(patch(prefix_blob(), at, b"\1"), header.chunks_at))
    refused(edited(prefix_blob(), constant=1))
    refused(reseal(patch(constant_blob(), 98, b"\1"), len(constant_blob())))


def test_a23_a_base_that_is_not_there() -> None:
    for blob in (prefix_blob(), zstd_blob(), constant_blob()):
        refused(edited(blob, base=0x5A), match="delta")


@pytest.mark.parametrize(
    ("field", "value"),
    [("codec", 0), ("codec", 4), ("codec", 255), ("layout", 1), ("dtype", 0), ("dtype", 11), ("dtype", 24)]
    + [("dtype", 15), ("dtype", 19), ("word_bytes", 0), ("word_bytes", 4), ("rotate", 0), ("rotate", 2)]
    + [("unit_log2", 3), ("unit_log2", 13), ("unit_log2", 64), ("tables", 17), ("tables", 0), ("tables", 2)]
    + [("chunk_words", v) for v in (0, 1, 32, 256, 513, 65536, 1 << 31)]
    + [("segment_words", v) for v in (0, 1, 1501, (1 << 64) - 1)]
    + [("chunks", v) for v in (0, 2, 4, 1 << 60)]
    + [("tables_bytes", v) for v in (0, 8, 17, 1 << 20, 0xFFFFFFF0)],
)  # fmt: skip
def test_a24_header_fields_that_cannot_be(field: str, value: int) -> None:
    blob = prefix_blob()
    if (field, value) == ("dtype", 15):  # F16 has the words of BF16: only the hash protects it
        refused(edited(blob, sealed=False, dtype=15))
    else:
        refused(edited(blob, **{field: value}))


def test_a25_dimensions_above_the_limit() -> None:
    for ndim in (0, 1, 3, 65, 255):
        with pytest.raises((Corrupt, Truncated)):
            read_blob(edited(prefix_blob(), ndim=ndim))


@pytest.mark.parametrize("version", [0, 2, 256, 65535])
def test_a26_blobs_of_another_version(version: int) -> None:
    refused(edited(prefix_blob(), version=version), UnsupportedVersion, "upgrade")


def test_a27_metadata_that_does_not_match_its_hash() -> None:
    blob = prefix_blob()
    for at in range(reference.parse_header(blob).chunks_at):
        damaged = bytearray(blob)
        damaged[at] ^= 0x10
        if at < 8:  # without the magic it is a tensor like any other
            with PackedFile(file_of(bytes(damaged))) as file:
                assert not file.is_packed
            continue
        with pytest.raises((Corrupt, Truncated, UnsupportedVersion), match="`x`"):
            read_blob(bytes(damaged))


def test_a28_chunks_that_overlap_or_lie_outside() -> None:
    blob = prefix_blob()
    starts = [r.start >> 4 for r in reference.parse_index(reference.parse_header(blob), blob)]
    refused(edited_record(blob, 0, offset=0), chunk=0)
    refused(edited_record(blob, 0, offset=starts[0] + 1), chunk=0)
    refused(edited_record(blob, 1, offset=starts[0] - 1), chunk=0)  # it ends before it starts
    refused(edited_record(blob, 1, offset=starts[2] + 1), chunk=0)  # larger than the header says
    refused(edited_record(blob, 2, offset=starts[1] - 1), chunk=1)
    refused(edited_record(blob, 2, offset=0xFFFFFFFF), chunk=1)
    refused(edited_record(blob, 2, offset=len(blob) // 16 + 1), chunk=1)


def test_a29_a_blob_that_ends_elsewhere() -> None:
    blob = prefix_blob()
    header = reference.parse_header(blob)
    for size in (len(blob) + 1, 1 << 40, (1 << 64) - 1):
        with bounded(1), pytest.raises((Truncated, Corrupt), match="`x`"):
            read_blob(edited(blob, blob_bytes=size))
    for size in (0, header.chunks_at - 1, header.chunks_at):
        with pytest.raises(Corrupt, match="`x`"):
            read_blob(edited(blob, blob_bytes=size))


def test_a30_chunks_larger_than_the_header_or_the_format_allows() -> None:
    blob = prefix_blob()
    refused(edited(blob, max_chunk_bytes=reference.parse_header(blob).max_chunk_bytes - 16), chunk=0)
    # Never larger than raw (format.md 7): 512 words are 1024 bytes.
    refused(edited(blob, max_chunk_bytes=1 << 30))
    refused(edited(blob, max_chunk_bytes=1040))
    # Nor is a coded plane larger than its chunk.
    refused(edited(blob, max_stream_bytes=reference.parse_header(blob).max_chunk_bytes + 4))
    refused(edited(blob, max_stream_bytes=1 << 31))


@pytest.mark.parametrize(
    ("modes", "fill"),
    [(0b11_00, 0), (0b00_11, 0), (0b1_00_00, 0), (1 << 15, 0), (0xFFFF, 0), (0b00_00, 7), (0b10_00, 1)],
)
def test_a31_modes_that_are_not_known(modes: int, fill: int) -> None:
    refused(edited_record(prefix_blob(), 1, modes=modes, fill=fill), chunk=1)
    if modes != 0b10_00:
        refused(edited_record(zstd_blob(), 0, modes=modes | 0b11, fill=fill), chunk=0)


def test_a32_a_coded_plane_without_a_table() -> None:
    blob = prefix_blob()
    refused(edited_record(blob, 1, modes=0b10_10), chunk=1)
    header = reference.parse_header(blob)
    planes = reference.HEADER.size + 8 * len(header.shape)
    for record in ((0, 2), (1, 1), (255, 255), (16, 1)):
        refused(reseal(patch(blob, planes + 4, bytes(record)), header.chunks_at))
    assert read_blob(edited_record(blob, 1, table=255)) == DATA  # the last table is meant (format.md 4.3)


# A table of three values and an escape: kind, max_bits, raw_bits, escape_bits, counts of 1, 2, 3 bits.
COUNTS, VALUES = 4, 4 + 2 * 3


@pytest.mark.parametrize(
    ("at", "data"),
    [
        pytest.param(COUNTS, b"\0\0", id="incomplete"),
        pytest.param(COUNTS + 4, b"\0\0", id="incomplete by one"),
        pytest.param(COUNTS, b"\2\0", id="oversubscribed"),
        pytest.param(COUNTS + 4, b"\2\0", id="oversubscribed by one"),
        pytest.param(COUNTS, b"\xff\xff" * 3, id="counts that overflow"),
        pytest.param(3, b"\0", id="no escape, incomplete"),
        pytest.param(VALUES, b"\x3c\x3c", id="values twice"),
        pytest.param(VALUES, b"\x80", id="value too large"),
        pytest.param(0, b"\0", id="kind 0"),
        pytest.param(0, b"\3", id="kind 3"),
        pytest.param(1, b"\0", id="no bits"),
        pytest.param(1, b"\x0d", id="13 bits"),
        pytest.param(1, b"\xff", id="255 bits"),
        pytest.param(2, b"\x08", id="8 raw bits"),
        pytest.param(2, b"\xff", id="255 raw bits"),
        pytest.param(3, b"\x04", id="escape longer than the longest"),
        pytest.param(3, b"\xff", id="escape of 255 bits"),
        pytest.param(0, b"\2", id="kind 2 with raw bits"),
    ],
)
def test_a33_tables_that_are_no_codes(at: int, data: bytes) -> None:
    assert TABLE.serialize()[VALUES : VALUES + 3] == b"\x3c\x3b\x3a"
    refused(edited_section(prefix_blob(), at, data))


def test_a34_a_table_section_too_short_for_its_tables() -> None:
    lengths = dict.fromkeys(range(256), 8)
    blob = prefix_blob(reference.Table.from_lengths(1, 8, 0, lengths))
    refused(edited(blob, tables_bytes=reference.parse_header(blob).tables_bytes - 16))
    refused(edited(blob, tables=2))


def _stream_at(blob: bytes, chunk: int) -> int:
    """Where a chunk's coded plane lies: behind its raw plane of 512 bytes."""
    return reference.parse_index(reference.parse_header(blob), blob)[chunk].start + 512


@pytest.mark.parametrize(
    ("at", "data"),
    [
        pytest.param(0, b"\xff\xff", id="lanes past the chunk"),
        pytest.param(4, b"\xff" * 32, id="excess past the chunk"),
        pytest.param(0, b"\0\0", id="lanes too short"),
        pytest.param(4, b"\0" * 32, id="excess too short"),
        pytest.param(2, b"\x09", id="shift 9"),
        pytest.param(2, b"\xff", id="shift 255"),
        pytest.param(2, b"\x08", id="shift 8"),
        pytest.param(3, b"\x01", id="reserved byte"),
        pytest.param(36, b"\xff" * 40, id="bits"),
    ],
)
def test_a35_lanes_that_leave_their_place(at: int, data: bytes) -> None:
    for chunk in range(2):
        blob = prefix_blob()
        refused(patch(blob, _stream_at(blob, chunk) + at, data), chunk=chunk)


@pytest.mark.parametrize("codec", ["prefix", "zstd"])
def test_raw_planes_that_end_after_their_chunk(codec: str) -> None:
    """The last chunk's are followed by nothing, the others' by the next chunk."""
    blob = prefix_blob()
    if codec == "zstd":
        blob = reference.encode_blob(DATA, SPEC.dtype, SPEC.shape, codec="zstd", chunk_words=512)
    for chunk, record in enumerate(reference.parse_index(reference.parse_header(blob), blob)):
        assert record.modes == (reference.RAW, reference.CODED)
        refused(edited_record(blob, chunk, modes=0), match="raw plane", chunk=chunk)


def test_a36_checksums_and_hashes_that_are_wrong() -> None:
    blob = prefix_blob()
    refused(edited_record(blob, 2, checksum=1), match="checksum", chunk=2)
    with pytest.raises(Corrupt):
        reference.decode_blob(edited(blob, hash=blob[64] ^ 1))
    from support.files import unpack_bytes, verify_bytes

    for damaged in (edited(blob, hash=blob[64] ^ 1), edited(constant_blob(), constant=0x81)):
        assert [(p.tensor, p.chunk) for p in verify_bytes(file_of(damaged))] == [("x", None)]
        with pytest.raises(Corrupt, match="hash"):
            unpack_bytes(file_of(damaged))


def _zstd_with(frame: bytes, size: int | None = None) -> bytes:
    """Give a zstd blob whose only frame is another, and whose checksum is that of 512 times the letter A."""
    blob = edited_record(zstd_blob(), 0, checksum=reference.checksum(b"A" * 512))
    header = reference.parse_header(blob)
    body = struct.pack("<I", len(frame) if size is None else size) + frame
    body = body.ljust(reference.align(len(body), 16), b"\0")
    meta = edited(blob, blob_bytes=header.chunks_at + len(body), max_chunk_bytes=512)
    return reseal(meta[: header.chunks_at] + body, header.chunks_at)


def _block(size: int, *, last: bool) -> bytes:
    """A block of one byte again and again: 4 bytes that decompress to any number up to 128 KiB."""
    return (size << 3 | 2 | last).to_bytes(3, "little") + b"A"


def _frame(content: int | None, blocks: bytes, window_log: int | None = 10) -> bytes:
    """Give a frame by hand: content size, window and blocks may lie."""
    descriptor = 0 if content is None else 0x80
    window = b"" if window_log is None else bytes([(window_log - 10) << 3])
    size = b"" if content is None else content.to_bytes(4, "little")
    return b"\x28\xb5\x2f\xfd" + bytes([descriptor]) + window + size + blocks


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(
            _frame(512, _block(100_000, last=False) * 100 + _block(512, last=True)), id="holds more"
        ),
        pytest.param(_frame(513, _block(513, last=True)), id="one more"),
        pytest.param(_frame(511, _block(511, last=True)), id="one less"),
        pytest.param(_frame(512, _block(511, last=True)), id="claims more than it holds"),
        pytest.param(_frame(1 << 31, _block(512, last=True)), id="claims 2 GiB"),
        pytest.param(_frame(0, _block(0, last=True)), id="empty"),
        pytest.param(_frame(512, _block(512, last=False)), id="no last block"),
        pytest.param(_frame(None, _block(512, last=True)), id="no content size"),
        pytest.param(_frame(512, _block(512, last=True))[:-1], id="cut"),
        pytest.param(_frame(512, _block(512, last=True)) + b"\0" * 8, id="bytes after it"),
        pytest.param(_frame(512, _block(512, last=True)) * 2, id="two frames"),
        pytest.param(b"\x50\x2a\x4d\x18\x08\0\0\0" + bytes(8), id="skippable frame"),
        pytest.param(b"\x28\xb5\x2f\xfd\xa3" + b"\1\0\0\0\0\2\0\0" + _block(512, last=True), id="dictionary"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x28\xb5\x2f\xfd", id="magic only"),
        pytest.param(zstandard.ZstdCompressor(write_checksum=True).compress(b"B" * 512), id="other content"),
    ],
)
def test_a37_zstd_bombs_and_frames_that_lie(frame: bytes) -> None:
    assert read_blob(_zstd_with(_frame(512, _block(512, last=True)))) == b"A" * 512  # one that does not
    with bounded(1):
        refused(_zstd_with(frame), chunk=0)
    for size in (len(frame) + 60, 1 << 31, 0xFFFFFFFF):
        with bounded(1):
            refused(_zstd_with(frame, size), chunk=0)


@pytest.mark.parametrize("window_log", [20, 27, 31, 41])
def test_a38_zstd_frames_with_a_huge_window(window_log: int) -> None:
    """The window of a frame whose content is known needs no memory: it may be refused, never allocated."""
    resource = pytest.importorskip("resource")
    blob = _zstd_with(_frame(512, _block(512, last=True), window_log))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(Corrupt):
        assert read_blob(blob) == b"A" * 512
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10
