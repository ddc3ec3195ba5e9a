"""Chunks of zstd frames: their largest sizes, the room they need, and bytes that are not theirs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard
from support.contents import rng

from tpde.codec import reference, zstd
from tpde.codec.core_chunks import EncodedChunks
from tpde.codec.native import Bytes
from tpde.codec.selection import base_header, core_layout
from tpde.codec.zstd import ZstdCodec
from tpde.errors import Corrupt
from tpde.format.constants import CODEC_ZSTD
from tpde.format.container import TensorSpec

CHUNK = 512  # words


def _codec(words: int, dtype: str = "U16", unit: int = 4) -> ZstdCodec:
    header = base_header(TensorSpec(dtype, (words,)), CODEC_ZSTD, CHUNK)
    header = replace(header, unit_log2=unit)
    return ZstdCodec(header, core_layout(header))


def _words() -> Bytes:
    """Four chunks: the planes of the second are the largest, the last chunk is short."""
    draw = rng("zstd")
    parts = [draw.integers(0, top, CHUNK) for top in (16, 1 << 16, 64)]
    words = np.concatenate([*parts, draw.integers(0, 16, 33)]).astype(np.uint16)
    words[CHUNK : 2 * CHUNK] &= 0x1F7F  # both planes are coded, the first one takes more
    return words.view(np.uint8)


def _encoded(threads: int = 1) -> tuple[ZstdCodec, EncodedChunks, Bytes]:
    words = _words()
    codec = _codec(words.size // 2)
    made = codec.encode(words, 0, 4, 0, np.full(codec.bound(words.size // 2, 4), 0xA5, np.uint8), threads)
    return codec, made, words


def _starts(made: EncodedChunks) -> list[int]:
    return [*(made.records.view("<u4")[::3].astype(int) << 4).tolist(), made.data.size]


def test_the_largest_chunk_and_the_longest_frame_are_told() -> None:
    _, made, _ = _encoded()
    starts = _starts(made)
    sizes = np.diff(starts)
    assert made.max_chunk == sizes.max() == sizes[1] > sizes[-1]
    streams = []
    for chunk, start in enumerate(starts[:-1]):
        modes = int(made.records.view("<u2")[6 * chunk + 4])
        found, n = [modes >> (2 * p) & 3 for p in range(2)], CHUNK if chunk < 3 else 33
        at = start + found.count(reference.RAW) * reference.align(n, 16)
        for _ in range(found.count(reference.CODED)):
            size = reference.align(4 + int.from_bytes(made.data[at : at + 4].tobytes(), "little"), 4)
            streams.append((size, chunk))
            at += size
    first, second = [size for size, chunk in streams if chunk == 1]
    assert made.max_stream == first == max(streams)[0] > max(second, streams[-1][0])


@pytest.mark.parametrize("unit", [4, 6, 12])
@pytest.mark.parametrize("dtype", ["U8", "U16", "U64"])
def test_noise_has_room_for_its_padding(dtype: str, unit: int) -> None:
    b = reference.DTYPES[dtype].word_bytes
    for n in (1, 15, 17, CHUNK + 1, 3 * CHUNK + 17):
        codec, chunks = _codec(n, dtype, unit), -(-n // CHUNK)
        words = np.frombuffer(rng("noise", dtype, n).bytes(n * b), np.uint8)
        made = codec.encode(words, 0, chunks, 0, np.full(codec.bound(n, chunks), 0xA5, np.uint8))
        assert made.data.size % (1 << unit) == 0
        out = np.empty(n * b, np.uint8)
        codec.decode(made.records, 0, made.data, 0, made.data.size, out)
        assert np.array_equal(out, words)


def test_some_chunks_are_decoded_by_themselves() -> None:
    codec, made, words = _encoded()
    starts = _starts(made)
    for first in range(4):
        for last in range(first, 4):
            begin, end = starts[first], starts[last + 1]
            part = words[2 * CHUNK * first : 2 * CHUNK * (last + 1)]
            out = np.full(part.size, 0xA5, np.uint8)
            records = made.records[12 * first : 12 * (last + 1)]
            codec.decode(records, first, made.data[begin:end], begin, end, out)
            assert np.array_equal(out, part)


def _moved(made: EncodedChunks, chunk: int, units: int) -> Bytes:
    records = made.records.copy()
    records.view("<u4")[3 * chunk] += units
    return records


@pytest.mark.parametrize(
    ("given", "chunk"),
    [
        (lambda it, size: (it.records, it.data, 16, size), 0),  # begins before what is there
        (lambda it, size: (it.records, it.data[:-16], 0, size), 3),  # ends behind it
        (lambda it, size: (it.records, it.data, 0, size + 16), 3),
        (lambda it, size: (_moved(it, 1, 1000), it.data, 0, size), 0),
        (lambda it, size: (_moved(it, 3, 1000), it.data, 0, size), 2),
        (lambda it, size: (it.records, it.data, 0, _starts(it)[3] - 16), 3),  # before it begins
    ],
)
def test_chunks_outside_the_bytes_at_hand_are_refused(given: Any, chunk: int) -> None:
    codec, made, words = _encoded()
    records, data, begin, end = given(made, made.data.size)
    with pytest.raises(Corrupt, match="outside the bytes at hand") as caught:
        codec.decode(records, 0, data, begin, end, np.empty_like(words))
    assert caught.value.chunk == chunk


def test_planes_end_with_their_chunk() -> None:
    """Though the bytes behind are at hand."""
    codec, made, words = _encoded()
    last = _starts(made)[1]
    records = made.records[:12]
    for end in range(0, last, 16):
        with pytest.raises(Corrupt, match=r"the chunk ends inside a (raw plane|zstd frame)") as caught:
            codec.decode(records, 0, made.data, 0, end, words[: 2 * CHUNK].copy())
        assert caught.value.chunk == 0


@pytest.mark.parametrize("n", [15, 16, 17, 512])
def test_a_raw_plane_ends_where_its_chunk_does(n: int) -> None:
    """With its last word, without padding behind; one byte less is refused, by name."""
    codec = _codec(n, "U8")
    words = np.frombuffer(rng("raw", n).bytes(n), np.uint8)
    made = codec.encode(words, 0, 1, 0, np.empty(codec.bound(n, 1), np.uint8))
    out = np.empty(n, np.uint8)
    codec.decode(made.records, 0, made.data[:n], 0, n, out)
    assert np.array_equal(out, words)
    with pytest.raises(Corrupt, match="ends inside a raw plane"):
        codec.decode(made.records, 0, made.data[: n - 1], 0, n - 1, out)


def test_a_frame_has_nothing_behind_it_and_is_as_large_as_its_plane() -> None:
    content = bytes(range(200)) * 3
    frame = zstandard.ZstdCompressor(write_content_size=True).compress(content)
    assert zstd.decompress(memoryview(frame), 600, 1, 2).tobytes() == content
    for damaged, n in (
        (frame + b"\0", 600),
        (frame + frame, 600),
        (frame[:-1], 600),
        (frame, 599),
        (frame, 601),
    ):
        with pytest.raises(Corrupt, match="plane 1") as caught:
            zstd.decompress(memoryview(damaged), n, 1, 2)
        assert caught.value.chunk == 2


def test_memory_for_planes_is_kept_while_it_is_large_enough() -> None:
    own = zstd._Own()
    large = own.planes(2, 100)
    assert large.shape == (2, 100)
    assert np.shares_memory(own.planes(4, 50), large)
    assert np.shares_memory(own.planes(1, 7), large)
    larger = own.planes(8, 100)
    assert larger.shape == (8, 100)
    assert not np.shares_memory(larger, large)


def test_a_frame_that_claims_more_than_its_plane_is_refused_before_it_is_read() -> None:
    claims = b"\x28\xb5\x2f\xfd\xe0" + (1 << 46).to_bytes(8, "little") + b"\x01\x00\x00"
    with pytest.raises(Corrupt, match=f"a zstd frame of {1 << 46} bytes, 100 are needed"):
        zstd.decompress(memoryview(claims), 100, 0, 0)
