"""Writing one tensor from pieces of any size: plain, packed or constant, whichever its bytes turn out to be.

What is written depends on the bytes alone, never on how they were cut into pieces.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future
from typing import NamedTuple

import numpy as np
import xxhash

from tpde.codec.blob import PIECE_BYTES, BlobWriter, repeat_word, step_bytes, write_constant
from tpde.codec.native import Bytes
from tpde.codec.selection import (
    MIN_BYTES,
    PREFIX_CHUNK_WORDS,
    CodecName,
    TensorPlan,
    plan_tensor,
    sample_ranges,
)
from tpde.format.constants import DTYPES
from tpde.format.container import TensorSpec
from tpde.io.sinks import ByteSink

HASH_APART = 1 << 20  # bytes from which hashing on a thread of its own pays
_BLOCK = 64 << 10  # bytes that are compared at a time


def repeats(data: Bytes, word: Bytes) -> int:
    """How many of some bytes are one word again and again, from its first byte on."""
    b = word.size
    end = min(b, data.size)
    other = np.flatnonzero(data[:end] != word[:end])
    while not other.size and end < data.size:  # most tensors show in the first block that they are not
        begin, end = end, min(end + _BLOCK, data.size)
        other = begin + np.flatnonzero(data[begin:end] != data[begin - b : end - b])
    return int(other[0]) if other.size else data.size


def _repeat(word: Bytes, begin: int, end: int) -> Bytes:
    """The bytes from `begin` to `end` of a word repeated for ever."""
    out = np.empty(end - begin, np.uint8)
    repeat_word(np.roll(word, -(begin % word.size)), out)
    return out


class WrittenTensor(NamedTuple):
    """How a tensor ended up: its size as stored, whether it is packed, and XXH3-128 of its bytes."""

    size: int
    packed: bool
    digest: bytes


class _Plain:
    """A tensor stored as it is."""

    def __init__(self, sink: ByteSink, offset: int) -> None:
        self._sink, self._offset, self._size = sink, offset, 0

    def write(self, data: Bytes) -> None:
        self._sink.write(self._offset + self._size, [data])
        self._size += data.size

    def finish(self, digest: bytes) -> int:
        return self._size


class TensorWriter:
    """Writes one tensor.

    Parameters
    ----------
    spec : TensorSpec
        What it is.
    sink : ByteSink
        Where it goes.
    offset : int
        Where in the sink.
    threads : int
        How many threads encode.
    codec : {"auto", "prefix", "zstd"}
        Which codec to use if it shrinks.
    may_pack : bool
        False if it must stay plain.
    background : Executor, optional
        Where pieces are hashed and written while others are encoded.
    """

    def __init__(
        self,
        spec: TensorSpec,
        sink: ByteSink,
        offset: int,
        *,
        threads: int,
        codec: CodecName,
        may_pack: bool,
        background: Executor | None,
    ) -> None:
        self.spec, self.offset, self.size = spec, offset, 0
        self._sink, self._threads, self._codec, self._background = sink, threads, codec, background
        self._hasher = xxhash.xxh3_128()
        self._store: _Plain | BlobWriter | None = None
        # Until there is enough for a sample: `_word` again and again up to `_origin`, then `_held`.
        self._word, self._origin, self._held = np.empty(0, np.uint8), 0, list[Bytes]()
        self._constant = True
        self._sample = 0
        if not may_pack or spec.nbytes < MIN_BYTES:
            self.decide(None)
        else:
            self._sample = sum(end - begin for begin, end in sample_ranges(spec))

    def decide(self, plan: TensorPlan | None) -> None:
        """Fix how the tensor is stored: by a plan, or plain for None."""
        self._store = (
            _Plain(self._sink, self.offset)
            if plan is None
            else BlobWriter(plan, self._sink, self.offset, self._threads, self._background)
        )

    def write(self, piece: Bytes) -> None:
        """Take the tensor's next bytes."""
        beside = self._background if piece.size >= HASH_APART else None
        hashed: Future[None] | None = None
        step = step_bytes(self._threads)
        try:
            for at in range(0, piece.size, step):
                part = piece[at : at + step]
                if beside is None:
                    self._hasher.update(part.data)
                else:
                    hashed = beside.submit(self._hasher.update, part.data)
                self._take(part)
        finally:
            if hashed is not None:
                hashed.result()  # and so are the parts before, which the same thread took

    def _take(self, piece: Bytes) -> None:
        begin, self.size = self.size, self.size + piece.size
        if self._store is not None:
            self._store.write(piece)
            return
        if self._constant:
            piece = self._while_constant(begin, piece)
        held = self.size - self._origin
        complete = self.size == self.spec.nbytes
        if self._constant or not (complete or held >= self._sample):
            if piece.size:
                self._held.append(piece.copy())  # the caller may use its memory again
        else:
            data = np.concatenate([*self._held, piece]) if self._held else piece
            self._held = []
            b = DTYPES[self.spec.dtype].word_bytes
            sample = data[: self._sample]
            self.decide(plan_tensor(self.spec, sample[: sample.size // b * b], self._codec))
            assert self._store is not None
            for at in range(0, self._origin, PIECE_BYTES):
                self._store.write(_repeat(self._word, at, min(at + PIECE_BYTES, self._origin)))
            self._store.write(data)

    def _while_constant(self, begin: int, piece: Bytes) -> Bytes:
        """Take bytes that repeat the first word; returns what must be held once one does not."""
        b = DTYPES[self.spec.dtype].word_bytes
        if self._word.size < b:
            self._word = np.concatenate([self._word, piece[: b - self._word.size]])
        word = self._word
        same = repeats(piece, np.roll(word, -(begin % word.size)))
        if same == piece.size:
            self._origin = self.size
            return piece[:0]
        self._constant = False
        first = begin + same
        # The sample starts with the chunk that breaks the run, wherever pieces were cut.
        chunk = PREFIX_CHUNK_WORDS * b
        self._origin = first // chunk * chunk
        if self._origin >= begin:
            return piece[self._origin - begin :]
        return np.concatenate([_repeat(word, self._origin, begin), piece])

    def finish(self) -> WrittenTensor:
        """Complete the tensor, all of whose bytes have been written."""
        digest = self._hasher.digest()
        if self._store is not None:
            size = self._store.finish(digest)
            return WrittenTensor(size, isinstance(self._store, BlobWriter), digest)
        size = write_constant(self.spec, self._word.tobytes(), digest, self._sink, self.offset)
        return WrittenTensor(size, True, digest)
