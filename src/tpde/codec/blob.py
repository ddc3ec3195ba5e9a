"""Writing and reading one packed tensor, in pieces and in bounded memory (docs/format.md 2 to 6)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, Future

import numpy as np
import numpy.typing as npt
import xxhash

from tpde.codec import core_chunks
from tpde.codec.core_chunks import EncodedChunks
from tpde.codec.native import Bytes
from tpde.codec.registry import CONSTANT, codec_of
from tpde.codec.selection import TensorPlan, base_header, core_layout
from tpde.errors import Corrupt
from tpde.format.blob_header import MAX_FIXED_BYTES, BlobHeader, parse_blob_header, with_results
from tpde.format.constants import RECORD_BYTES
from tpde.format.container import TensorSpec
from tpde.io.buffers import Buffer, byte_view
from tpde.io.sinks import ByteSink
from tpde.io.sources import ByteSource, read

PIECE_BYTES = 8 << 20  # of words at a time: more is no faster, and no longer fits a cache
MAX_PIECES = 4  # in one call of several threads, which starts them anew and waits for the last of them

RECORD = np.dtype(  # format.md 4.3
    [("offset", "<u4"), ("checksum", "<u4"), ("modes", "<u2"), ("table", "u1"), ("fill", "u1")]
)


def repeat_word(word: Bytes, out: Bytes) -> None:
    """Fill `out` with a word again and again; as numbers, where it is as long as one, that is fast."""
    whole = out.size // word.size * word.size
    number = f"{'u' if word.size in (1, 2, 4, 8) else 'V'}{word.size}"
    out[:whole].view(number)[:] = word.view(number)
    out[whole:] = word[: out.size - whole]


def step_bytes(threads: int) -> int:
    """How many bytes of words so many threads take in one call."""
    return PIECE_BYTES * (MAX_PIECES if threads > 1 else 1)


class BlobWriter:
    """Writes a blob from a tensor's bytes, in any number of pieces.

    Parameters
    ----------
    plan : TensorPlan
        How to store it.
    sink : ByteSink
        Where it goes.
    offset : int
        Where in the sink.
    threads : int
        How many threads encode.
    background : Executor, optional
        Where a piece is written while the next one is encoded.
    """

    def __init__(
        self, plan: TensorPlan, sink: ByteSink, offset: int, threads: int, background: Executor | None = None
    ) -> None:
        self._header, self._section = plan.header, plan.section
        self._sink, self._offset, self._threads = sink, offset, threads
        chunks = codec_of(plan.header).chunks
        assert chunks is not None  # `write_constant` writes others
        self._chunks = chunks(plan.header, plan.section, True)
        self._at = plan.header.chunks_at  # of the next chunk
        self._next = 0  # its number
        self._index: list[Bytes] = []
        self._max_chunk = self._max_stream = 0
        self._pending = np.empty(0, np.uint8)  # words of a chunk that is not complete
        self._background = background
        self._out = np.empty(0, np.uint8)
        self._writing: tuple[Future[None], Bytes] | None = None  # and the buffer that it needs

    def write(self, data: Bytes) -> None:
        """Take the tensor's next bytes."""
        b, step = self._header.word_bytes, step_bytes(self._threads)
        for at in range(0, data.size, step):
            piece = data[at : at + step]
            if self._pending.size:
                piece = np.concatenate([self._pending, piece])
            begin = self._header.chunk_range(self._next, self._next)[0]
            end = begin + piece.size // b
            # Whole chunks only: the last of them is the one before that which holds word `end`.
            last = self._header.chunks if end == self._header.words else self._header.chunk_of(end)
            if last > self._next:
                stop = self._header.chunk_range(last - 1, last - 1)[1]
                self._encode(piece[: (stop - begin) * b], last - self._next)
                piece = piece[(stop - begin) * b :]
            self._pending = piece.copy()

    def _encode(self, words: Bytes, count: int) -> None:
        need = self._chunks.bound(words.size // self._header.word_bytes, count)
        # A sink in memory is written directly.
        out = self._sink.room(self._offset + self._at, need)
        if out is None and self._out.size < need:
            self._out = np.empty(need, np.uint8)
        target = self._out if out is None else out
        made: EncodedChunks = self._chunks.encode(words, self._next, count, self._at, target, self._threads)
        if out is not None or self._background is None:
            self._sink.write(self._offset + self._at, [made.data])
        else:  # the two buffers take turns
            future = self._background.submit(self._sink.write, self._offset + self._at, [made.data])
            last, self._writing = self._writing, (future, self._out)
            self._out = np.empty(0, np.uint8)
            if last is not None:
                last[0].result()
                self._out = last[1]
        self._index.append(made.records)
        self._at += made.data.size
        self._next += count
        self._max_chunk = max(self._max_chunk, made.max_chunk)
        self._max_stream = max(self._max_stream, made.max_stream)

    def finish(self, digest: bytes) -> int:
        """Write the header and the index map; returns the blob's size in bytes.

        Parameters
        ----------
        digest : bytes
            XXH3-128 of the tensor's bytes.
        """
        if self._next != self._header.chunks or self._pending.size:
            raise ValueError("the tensor is not complete")
        if self._writing is not None:
            self._writing[0].result()
            self._writing = None
        header = with_results(
            self._header,
            blob_bytes=self._at,
            max_chunk=self._max_chunk,
            max_stream=self._max_stream,
            digest=digest,
        )
        index = b"".join(piece.tobytes() for piece in self._index)
        self._sink.write(self._offset, [header.write(self._section, index)])
        return self._at


def write_constant(spec: TensorSpec, word: bytes, digest: bytes, sink: ByteSink, offset: int) -> int:
    """Write the blob of a tensor whose words are all equal; returns its size in bytes."""
    header = base_header(spec, CONSTANT.number)
    header = BlobHeader(
        spec=spec,
        codec=CONSTANT.number,
        segment_words=header.segment_words,
        chunk_words=header.chunk_words,
        hash=digest,
        constant=word.ljust(8, b"\0"),
        blob_bytes=header.chunks_at,
    )
    blob = header.write(b"", b"")
    sink.write(offset, [blob])
    return len(blob)


class BlobReader:
    """Reads a packed tensor: header, tables and index map at once, chunks when asked.

    Parameters
    ----------
    source : ByteSource
        What holds the blob.
    offset, size : int
        Where in it, in bytes.

    Raises
    ------
    Truncated, UnsupportedVersion, Corrupt
        If header, tables or index map are not valid.

    Attributes
    ----------
    header : BlobHeader
        The blob's.
    section : bytes
        Its tables.
    index : ndarray of uint8
        The index map.
    offsets : ndarray of int64
        Where in the blob each chunk starts, and where the last one ends.
    """

    def __init__(self, source: ByteSource, offset: int, size: int) -> None:
        self._source, self._offset = source, offset
        head = read(source, offset, min(size, MAX_FIXED_BYTES))
        self.header = header = parse_blob_header(head, size)
        meta = read(source, offset, header.chunks_at)
        header.check_meta(meta)
        self.section = section = meta[header.tables_at : header.index_at]
        self.index = np.frombuffer(
            meta, np.uint8, RECORD_BYTES * header.chunks, header.index_at if header.chunks else 0
        )
        chunks = codec_of(header).chunks
        if chunks is not None:
            core_chunks.index_check(
                core_layout(header),
                self.index,
                header.chunks_at,
                header.blob_bytes,
                header.max_chunk_bytes,
            )
        self._chunks = None if chunks is None else chunks(header, section, False)
        starts = self.index.view(RECORD)["offset"].astype(np.int64) << header.unit_log2
        self.offsets = np.append(starts, header.blob_bytes)

    @property
    def records(self) -> npt.NDArray[np.void]:
        """The index map as a structured array: offset, checksum, modes, table, fill."""
        return self.index.view(RECORD)

    def decode(
        self, first: int, last: int, out: Bytes, threads: int = 1, scratch: Bytes | None = None
    ) -> None:
        """Decode chunks `first` to `last` into exactly their words.

        Parameters
        ----------
        first, last : int
            Numbers of chunks.
        out : ndarray of uint8
            Exactly their words.
        threads : int
            How many threads decode.
        scratch : ndarray of uint8, optional
            A buffer for the chunks' bytes, at least `stored(first, last)` of them.

        Raises
        ------
        Corrupt
            Naming the chunk that is damaged.
        """
        begin, end = int(self.offsets[first]), int(self.offsets[last + 1])
        at, size = self._offset + begin, end - begin
        view = self._source.view(at, size)
        if view is not None:
            data = np.frombuffer(view, np.uint8)
        else:
            data = np.empty(size, np.uint8) if scratch is None else scratch[:size]
            self._source.read_into(at, data.data)
        self.decode_bytes(first, last, data, out, threads)

    def decode_bytes(self, first: int, last: int, data: Bytes, out: Bytes, threads: int = 1) -> None:
        """Decode chunks `first` to `last` from their bytes into exactly their words: see `decode`."""
        assert self._chunks is not None
        begin, end = int(self.offsets[first]), int(self.offsets[last + 1])
        index = self.index[RECORD_BYTES * first : RECORD_BYTES * (last + 1)]
        self._chunks.decode(index, first, data, begin, end, out, threads)

    def read(self, begin: int, end: int, out: Bytes, threads: int = 1) -> None:
        """Decode the tensor's bytes from `begin` to `end` into `out`, touching only their chunks.

        Memory beyond `out` is bounded by about eight pieces of 8 MiB. A whole tensor that is in memory is
        decoded in one call, so that threads wait for each other once.
        """
        header, b = self.header, self.header.word_bytes
        if self._chunks is None:
            word = np.frombuffer(header.constant[:b], np.uint8)
            repeat_word(np.roll(word, -(begin % b)), out)
            return
        if begin == 0 and end == header.spec.nbytes > 0 and self._source.view(self._offset, 0) is not None:
            self.decode(0, header.chunks - 1, out, threads)
            return
        pieces = list(self._pieces(begin, end, step_bytes(threads)))
        # One buffer for all: fresh memory for each would cost a quarter of the time in page faults.
        scratch = np.empty(max((self.stored(*piece) for piece in pieces), default=0), np.uint8)
        for first, last in pieces:
            w0, w1 = header.chunk_range(first, last)
            lo, hi = max(w0 * b, begin), min(w1 * b, end)
            target = out[lo - begin : hi - begin]
            if (lo, hi) == (w0 * b, w1 * b):
                self.decode(first, last, target, threads, scratch)
            else:
                words = np.empty((w1 - w0) * b, np.uint8)
                self.decode(first, last, words, threads, scratch)
                target[:] = words[lo - w0 * b : hi - w0 * b]

    def _pieces(self, begin: int, end: int, step: int = PIECE_BYTES) -> Iterator[tuple[int, int]]:
        """Runs of chunks of at most `step` bytes of words that cover a range of bytes.

        A chunk of which only a part is in the range is a run by itself, since it is decoded beside `out`.
        """
        if begin >= end:
            return
        b = self.header.word_bytes
        first, stop = self.header.chunk_of(begin // b), self.header.chunk_of((end - 1) // b)
        run = max(1, step // (self.header.chunk_words * b))
        whole = self.header.chunk_range(stop, stop)[1] * b <= end  # the last chunk
        if self.header.chunk_range(first, first)[0] * b < begin and first < stop:
            yield first, first
            first += 1
        while first <= stop:
            last = min(first + run - 1, stop if whole else max(first, stop - 1))
            yield first, last
            first = last + 1

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Byte ranges that cover the tensor and are read well one after the other."""
        nbytes, b = self.header.spec.nbytes, self.header.word_bytes
        if self._chunks is None:
            for at in range(0, nbytes, PIECE_BYTES):
                yield at, min(at + PIECE_BYTES, nbytes)
            return
        for first, last in self._pieces(0, nbytes):
            w0, w1 = self.header.chunk_range(first, last)
            yield w0 * b, w1 * b

    def stored(self, first: int, last: int) -> int:
        """Bytes that the chunks `first` to `last` take."""
        return int(self.offsets[last + 1] - self.offsets[first])

    def damaged_chunks(self, first: int, last: int) -> Iterator[Corrupt]:
        """Decode chunks one by one, and tell which are damaged."""
        for number in range(first, last + 1):
            begin, end = self.header.chunk_range(number, number)
            out = np.empty((end - begin) * self.header.word_bytes, np.uint8)
            try:
                self.decode(number, number, out)
            except Corrupt as error:
                yield error


def digest(data: Buffer) -> bytes:
    """XXH3-128 of some bytes, as docs/format.md 2 stores it."""
    return xxhash.xxh3_128_digest(byte_view(data))
