"""The zstd codec: byte planes as zstd frames (docs/format.md 6). For what prefix codes do not suit."""

from __future__ import annotations

import struct
import threading
from typing import NamedTuple

import numpy as np
import zstandard

from tpde.codec import core_chunks, pool
from tpde.codec.core_chunks import EncodedChunks
from tpde.codec.native import Bytes, CoreLayout
from tpde.errors import Corrupt
from tpde.format.blob_header import BlobHeader, align
from tpde.format.constants import MODE_CODED, MODE_FILL, MODE_RAW

LEVEL = 3  # zstd's own default
# What one thread does in a second, by which the pool judges if more pay. Encoding, in bytes of words: 130
# to 280 MB on weights, 0.4 to 2 GB on integers. Decoding, in stored bytes, since only zstd's part of the work
# runs beside other threads, and words of zeros need none of it: 0.35 to 0.75 GB. (2.5 GHz Xeon.)
ENCODE_SPEED = 200e6
DECODE_SPEED = 600e6
_RECORD = struct.Struct("<IIHBB")  # format.md 4.3


class _Own(threading.local):
    """What each thread keeps: zstd contexts, which take 20 us to make, and memory for a chunk's planes."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=LEVEL)
        # A window is never larger than the content, which is a plane of 64 KiB.
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 20)
        self._planes = np.empty(0, np.uint8)

    def planes(self, word_bytes: int, n: int) -> Bytes:
        """Planes of n words, of any content, until this is called again."""
        if self._planes.size < word_bytes * n:
            self._planes = np.empty(word_bytes * n, np.uint8)
        return self._planes[: word_bytes * n].reshape(word_bytes, n)


_own = _Own()


class _Chunk(NamedTuple):
    """An encoded chunk and what its record says."""

    data: bytes
    checksum: int
    modes: int
    fill: int
    longest: int  # coded plane


class ZstdCodec:
    """Encodes and decodes chunks of one tensor; the interface is that of `prefix_codes.PrefixCodec`.

    Parameters
    ----------
    header : BlobHeader
        What the blob says of its tensor.
    layout : CoreLayout
        The same for the core.
    """

    def __init__(self, header: BlobHeader, layout: CoreLayout) -> None:
        self._header = header
        self._layout = layout
        self._unit = 1 << header.unit_log2

    def bound(self, words: int, chunks: int) -> int:
        """Most bytes that encoding these many words in these many chunks can take."""
        b = self._header.word_bytes
        return words * b + chunks * (16 * b + self._unit)

    def encode(
        self, words: Bytes, first: int, count: int, offset: int, out: Bytes, threads: int = 1
    ) -> EncodedChunks:
        """Encode chunks `first` to `first + count - 1`; see `prefix_codes.PrefixCodec.encode`."""
        start = self._header.chunk_range(first, first)[0]
        b = self._header.word_bytes

        def one(number: int) -> _Chunk:
            begin, end = self._header.chunk_range(number, number)
            return self._encode_chunk(words[(begin - start) * b : (end - start) * b])

        numbers = range(first, first + count)
        chunks = pool.each(one, numbers, seconds=words.size / ENCODE_SPEED, threads=threads)
        index, at, largest, stream = bytearray(), 0, 0, 0
        for chunk in chunks:
            index += _RECORD.pack((offset + at) // self._unit, chunk.checksum, chunk.modes, 0, chunk.fill)
            out[at : at + len(chunk.data)] = np.frombuffer(chunk.data, np.uint8)
            at += len(chunk.data)
            largest, stream = max(largest, len(chunk.data)), max(stream, chunk.longest)
        return EncodedChunks(out[:at], np.frombuffer(index, np.uint8), largest, stream)

    def _encode_chunk(self, words: Bytes) -> _Chunk:
        planes = core_chunks.split(self._layout, words)
        raw: list[bytes] = []
        coded: list[bytes] = []
        modes, fill, longest = 0, None, 0
        for p, plane in enumerate(planes):
            if bool((plane == plane[0]).all()) and fill in (None, plane[0]):
                fill = plane[0]
                modes |= MODE_FILL << (2 * p)
                continue
            data = plane.tobytes()
            frame = _own.compressor.compress(data)
            size, limit = align(4 + len(frame), 4), align(len(data), 16)
            if size < limit:
                modes |= MODE_CODED << (2 * p)
                coded.append((struct.pack("<I", len(frame)) + frame).ljust(size, b"\0"))
                longest = max(longest, size)
            else:
                raw.append(data.ljust(limit, b"\0"))
        body = b"".join(raw + coded)
        whole = body.ljust(align(len(body), self._unit), b"\0")
        return _Chunk(whole, core_chunks.checksum(words), modes, int(fill or 0), longest)

    def decode(
        self,
        index: Bytes,
        first: int,
        data: Bytes,
        data_offset: int,
        end_offset: int,
        out: Bytes,
        threads: int = 1,
    ) -> None:
        """Decode chunks from `first` on into `out`; see `prefix_codes.PrefixCodec.decode`."""
        records = list(_RECORD.iter_unpack(index.tobytes()))
        start, b = self._header.chunk_range(first, first)[0], self._header.word_bytes
        ends = [r[0] * self._unit for r in records[1:]] + [end_offset]

        def one(i: int) -> None:
            offset, checksum, modes, _, fill = records[i]
            at, end = offset * self._unit - data_offset, ends[i] - data_offset
            begin, stop = self._header.chunk_range(first + i, first + i)
            target = out[(begin - start) * b : (stop - start) * b]
            if not 0 <= at <= end <= data.size:
                raise Corrupt("a chunk lies outside the bytes at hand", chunk=first + i)
            self._decode_chunk(data[at:end], modes, fill, target, first + i)
            found = core_chunks.checksum(target)
            if found != checksum:
                raise Corrupt(
                    f"the checksum does not match: found {found}, needed {checksum}",
                    chunk=first + i,
                    found=found,
                    needed=checksum,
                )

        pool.each(one, range(len(records)), seconds=data.size / DECODE_SPEED, threads=threads)

    def _decode_chunk(self, data: Bytes, modes: int, fill: int, out: Bytes, chunk: int) -> None:
        b = self._header.word_bytes
        n = out.size // b
        planes = _own.planes(b, n)
        at = 0
        for p in range(b):
            mode = modes >> (2 * p) & 3
            if mode == MODE_FILL:
                planes[p] = fill
            elif mode == MODE_RAW:
                if at + n > data.size:
                    raise Corrupt(f"the chunk ends inside a raw plane (plane {p})", chunk=chunk)
                planes[p] = data[at : at + n]
                at += align(n, 16)
        for p in range(b):
            if modes >> (2 * p) & 3 != MODE_CODED:
                continue
            size = int.from_bytes(data[at : at + 4].tobytes(), "little")
            if at + 4 + size > data.size:
                raise Corrupt(f"the chunk ends inside a zstd frame (plane {p})", chunk=chunk)
            planes[p] = decompress(data[at + 4 : at + 4 + size].data, n, p, chunk)
            at += align(4 + size, 4)
        core_chunks.merge(self._layout, planes, out)


def decompress(frame: memoryview, n: int, plane: int, chunk: int) -> Bytes:
    """Decompress one frame whose content must be `n` bytes; nothing larger is allocated.

    Parameters
    ----------
    frame : memoryview
        Exactly one frame.
    n : int
        Bytes of its content.
    plane, chunk : int
        What an error names.

    Raises
    ------
    Corrupt
        If the frame is damaged, followed by anything, or of another size.
    """
    try:
        size = zstandard.frame_content_size(frame)
        if size != n:
            raise Corrupt(f"a zstd frame of {size} bytes, {n} are needed (plane {plane})", chunk=chunk)
        content = _own.decompressor.decompress(frame, max_output_size=n, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Corrupt(f"a zstd frame is damaged: {error} (plane {plane})", chunk=chunk) from None
    if len(content) != n:
        raise Corrupt(f"a zstd frame holds {len(content)} bytes, {n} are needed (plane {plane})", chunk=chunk)
    return np.frombuffer(content, np.uint8)
