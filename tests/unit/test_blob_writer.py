"""Blobs are written of any pieces, bound what they hold, and are read by the chunk."""

from __future__ import annotations

import errno
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support.contents import fill, spec_of
from support.craft import edited_record, patch, read_blob, zstd_blob

from tpde.codec.blob import RECORD, BlobReader, BlobWriter, write_constant
from tpde.codec.reference import META_HASH_AT
from tpde.codec.selection import PREFIX_CHUNK_WORDS, TensorPlan, base_header, plan_tensor, sample_ranges
from tpde.errors import Corrupt
from tpde.files.tensor_writer import TensorWriter
from tpde.format.constants import CODEC_ZSTD, MODE_CODED
from tpde.format.container import TensorSpec
from tpde.io.sinks import BytesSink
from tpde.io.sources import BytesSource

SPEC = spec_of("BF16", 30 * PREFIX_CHUNK_WORDS + 77)
# Chunks of random mantissas and signs become larger from the first to the last, and small again.
DATA = np.frombuffer(fill("normal", SPEC), np.uint8).copy()
_WORDS = DATA.view(np.uint16)
_WORDS[: 3 * PREFIX_CHUNK_WORDS] = np.arange(3 * PREFIX_CHUNK_WORDS) % 300 * 128
_WORDS[20 * PREFIX_CHUNK_WORDS :] = np.arange(_WORDS.size - 20 * PREFIX_CHUNK_WORDS) % 3 + 0x3C00


def written(pieces: list[int], threads: int = 1) -> bytes:
    """Write a tensor in pieces of so many bytes, each from a buffer that is used again."""
    sample = np.concatenate([DATA[a:b] for a, b in sample_ranges(SPEC)])
    plan = plan_tensor(SPEC, sample, "prefix")
    assert plan is not None
    sink, at = BytesSink(), 0
    writer = BlobWriter(plan, sink, 0, threads)
    buffer = np.empty(max(pieces), np.uint8)
    for size in pieces:
        buffer[:size] = DATA[at : at + size]
        writer.write(buffer[:size])
        buffer[:] = 0xEE
        at += size
    assert at == DATA.size
    writer.finish(bytes(16))
    return bytes(sink.data)


def halves(step: int) -> list[int]:
    return [step] * (DATA.size // step) + [DATA.size % step]


@pytest.mark.parametrize("step", [2 * PREFIX_CHUNK_WORDS + 2, 100_000, 12_346])
def test_pieces_of_any_size_give_one_blob(step: int) -> None:
    blob = written(halves(step))
    assert blob == written([DATA.size])
    out = np.empty(DATA.size, np.uint8)
    BlobReader(BytesSource(blob), 0, len(blob)).read(0, out.size, out)
    assert out.tobytes() == DATA.tobytes()


@pytest.mark.parametrize("step", [DATA.size, 2 * PREFIX_CHUNK_WORDS])
def test_the_header_bounds_chunks_and_streams(step: int) -> None:
    """Exactly: the largest chunk is neither the first nor the last, nor is the longest coded plane."""
    blob = written(halves(step))
    reader = BlobReader(BytesSource(blob), 0, len(blob))
    sizes = np.diff(reader.offsets)
    assert reader.header.max_chunk_bytes == sizes.max() > max(sizes[0], sizes[-1])
    streams = [_streams(blob, reader, number) for number in range(reader.header.chunks)]
    assert reader.header.max_stream_bytes == max(map(max, streams)) > max(streams[-1])


def _streams(blob: bytes, reader: BlobReader, number: int) -> list[int]:
    """Bytes of a chunk's coded planes, by their headers of 36 bytes (format.md 5.2)."""
    begin, end = reader.header.chunk_range(number, number)
    at = int(reader.offsets[number])
    modes = int(reader.index.view(RECORD)["modes"][number])
    found = [modes >> (2 * plane) & 3 for plane in range(2)]
    at += found.count(0) * (-(-(end - begin) // 16) * 16)
    sizes = [0]
    for mode in found:
        if mode == MODE_CODED:
            (shortest,) = struct.unpack_from("<H", blob, at)
            bits = sum(shortest + (it << blob[at + 2]) for it in blob[at + 4 : at + 36])
            sizes.append(-(-(36 + -(-bits // 8)) // 4) * 4)
            at += sizes[-1]
    return sizes


def test_what_is_not_complete_is_not_finished() -> None:
    sample = np.concatenate([DATA[a:b] for a, b in sample_ranges(SPEC)])
    plan = plan_tensor(SPEC, sample, "prefix")
    assert plan is not None
    for size in (2 * PREFIX_CHUNK_WORDS, 2 * PREFIX_CHUNK_WORDS + 2, 0):
        writer = BlobWriter(plan, BytesSink(), 0, 1)
        writer.write(DATA[:size])
        with pytest.raises(ValueError, match="not complete"):
            writer.finish(bytes(16))


@pytest.mark.parametrize("more", [2, 1000])
def test_more_than_the_tensor_is_not_finished(more: int) -> None:
    sample = np.concatenate([DATA[a:b] for a, b in sample_ranges(SPEC)])
    plan = plan_tensor(SPEC, sample, "prefix")
    assert plan is not None
    writer = BlobWriter(plan, BytesSink(), 0, 1)
    writer.write(DATA)
    writer.write(DATA[:more])
    with pytest.raises(ValueError, match="not complete"):
        writer.finish(bytes(16))


def test_pieces_are_of_8_mib_and_end_with_chunks() -> None:
    """The last one with the tensor."""
    spec, mib = TensorSpec("U8", ((17 << 20) + 3,)), 1 << 20
    header = base_header(spec, CODEC_ZSTD, 65536)
    words = np.zeros(spec.nbytes, np.uint8)
    words[0] = 1
    sink = BytesSink()
    writer = BlobWriter(TensorPlan(header, b"", 0), sink, 0, 1)
    writer.write(words)
    size = writer.finish(bytes(16))
    reader = BlobReader(BytesSource(bytes(sink.data[:size])), 0, size)
    assert list(reader.pieces()) == [(0, 8 * mib), (8 * mib, 16 * mib), (16 * mib, spec.nbytes)]
    sink = BytesSink()
    size = write_constant(spec, b"\0", bytes(16), sink, 0)
    constant = BlobReader(BytesSource(bytes(sink.data[:size])), 0, size)
    assert list(constant.pieces()) == list(reader.pieces())


def test_every_damaged_chunk_is_named() -> None:
    blob = bytearray(written([DATA.size]))
    reader = BlobReader(BytesSource(bytes(blob)), 0, len(blob))
    last = reader.header.chunks - 1
    for number in (0, 7, last):
        blob[int(reader.offsets[number]) + 40] ^= 0x10
    damaged = BlobReader(BytesSource(bytes(blob)), 0, len(blob)).damaged_chunks(0, last)
    assert [error.chunk for error in damaged] == [0, 7, last]


def test_a_read_only_output_is_refused() -> None:
    blob = written([DATA.size])
    reader = BlobReader(BytesSource(blob), 0, len(blob))
    out = np.zeros(DATA.size, np.uint8)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        reader.decode(0, reader.header.chunks - 1, out)
    assert not out.any()


def test_planes_of_two_values_are_not_filled_with_one() -> None:
    """Each plane of an integer repeats a value of its own; the record has room for one."""
    words = np.full(70_000, 0x01020304, np.uint32)
    words[-1] ^= 1  # not constant
    spec = TensorSpec("U32", (words.size,))
    plan = plan_tensor(spec, words.view(np.uint8), "zstd")
    assert plan is not None
    sink = BytesSink()
    writer = BlobWriter(plan, sink, 0, 1)
    writer.write(words.view(np.uint8))
    size = writer.finish(bytes(16))
    out = np.empty(words.nbytes, np.uint8)
    BlobReader(BytesSource(bytes(sink.data[:size])), 0, size).read(0, out.size, out)
    assert np.array_equal(out.view(np.uint32), words)


def test_a_zstd_chunks_checksum_is_compared() -> None:
    blob = zstd_blob()
    read_blob(blob)
    with pytest.raises(Corrupt, match="checksum"):
        read_blob(edited_record(blob, 0, checksum=1))
    assert META_HASH_AT == 120
    assert patch(b"abc", 1, b"x") == b"axc"


class _Slow(ThreadPoolExecutor):
    """Fails what it is asked to do, when that is waited for."""

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        future = super().submit(lambda: None)

        def fail(timeout: float | None = None) -> Any:
            raise OSError(errno.EIO, "hashing failed")

        future.result = fail  # type: ignore[method-assign]
        return future


def test_hashing_beside_is_waited_for() -> None:
    data = np.frombuffer(fill("normal", spec_of("BF16", 1 << 20)), np.uint8)
    with _Slow(1) as pool:
        writer = TensorWriter(
            spec_of("BF16", 1 << 20), BytesSink(), 0, threads=2, codec="auto", may_pack=False, background=pool
        )
        with pytest.raises(OSError, match="hashing failed"):
            writer.write(data)


def test_pieces_that_wait_for_a_sample_are_kept() -> None:
    """Whoever gives them may use the memory again: a whole file is read through one buffer."""
    made = []
    for again in (False, True):
        sink = BytesSink()
        writer = TensorWriter(SPEC, sink, 0, threads=1, codec="auto", may_pack=True, background=None)
        buffer = np.empty(5000, np.uint8)
        for at in range(0, DATA.size, buffer.size):
            size = min(buffer.size, DATA.size - at)
            buffer[:size] = DATA[at : at + size]
            writer.write(buffer[:size] if again else DATA[at : at + size])
            buffer[:] = 0xEE
        writer.finish()
        made.append(bytes(sink.data))
    assert made[0] == made[1]
