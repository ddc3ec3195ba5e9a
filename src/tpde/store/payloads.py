"""One tensor as a delta holds it: the smallest of its codecs, and back (docs/delta.md 5.3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from tpde.codec.blob import BlobReader
from tpde.codec.delta import ChangeModel, Sparse
from tpde.codec.native import Bytes
from tpde.errors import Corrupt
from tpde.files.tensor_writer import TensorWriter, repeats
from tpde.format.constants import DTYPES
from tpde.format.container import TensorSpec
from tpde.format.delta_head import DENSE, FULL, PLAIN, SPARSE
from tpde.io.sinks import BytesSink
from tpde.io.sources import ByteSource

# Sparse changes of less than this share of a tensor of floats are taken without a look at the other codecs,
# which have never done better there.
_CLEAR = 1 / 16
# What a base must save: without one a tensor is read alone, and decoded several times as fast.
_WORTH = 0.98
_PIECE = 1 << 18  # bytes, of whole words: what is computed of them stays in a processor's cache
_HELD = 8 << 20  # bytes of differences that are in memory at a time


class TensorPayload(NamedTuple):
    """A payload, its codec, and the records of its chunks if it is sparse."""

    codec: str
    data: Bytes
    sparse: Sparse | None = None


def difference_spec(spec: TensorSpec) -> TensorSpec:
    """What the differences of a dense payload are (delta.md 5.3)."""
    b = DTYPES[spec.dtype].word_bytes
    return TensorSpec(f"U{8 * b}", (spec.nbytes // b,))


def _ordered(words: Bytes, spec: TensorSpec) -> Any:
    """The words as numbers in the order of the values, if they are signed in magnitude."""
    b = DTYPES[spec.dtype].word_bytes
    x = words.view(f"<u{b}")
    if not DTYPES[spec.dtype].rotate:
        return x
    signs = (x.view(f"<i{b}") >> (8 * b - 1)).view(x.dtype)
    return x ^ (signs & x.dtype.type((1 << (8 * b - 1)) - 1))


def differences(old: Bytes, new: Bytes, spec: TensorSpec) -> Bytes:
    """The differences of two states, small ones of either sign as small numbers (delta.md 5.3)."""
    stored: Bytes = np.empty(new.size, np.uint8)
    for part in _pieces(new.size):
        d = _ordered(new[part], spec) - _ordered(old[part], spec)
        signs = (d.view(d.dtype.str.replace("u", "i")) >> (8 * d.itemsize - 1)).view(d.dtype)
        stored[part] = ((d << d.dtype.type(1)) ^ signs).view(np.uint8)
    return stored


def add_differences(words: Bytes, stored: Bytes, spec: TensorSpec) -> None:
    """Invert `differences`: the base's words become the target's."""
    for part in _pieces(words.size):
        z = stored[part].view(f"<u{DTYPES[spec.dtype].word_bytes}")
        one = z.dtype.type(1)
        d = (z >> one) ^ (~(z & one) + one)
        words[part] = _ordered((_ordered(words[part], spec) + d).view(np.uint8), spec).view(np.uint8)


def are_equal(old: Bytes, new: Bytes) -> bool:
    """Whether two states of a tensor are the same: without as many truths as they have bytes."""
    return all(np.array_equal(old[part], new[part]) for part in _pieces(old.size))


def _pieces(size: int) -> Iterator[slice]:
    """Parts of a tensor's bytes, so that what is computed on the way is no copy of all of it."""
    return (slice(at, min(at + _PIECE, size)) for at in range(0, size, _PIECE))


def _blob(spec: TensorSpec, pieces: Iterable[Bytes], threads: int) -> Bytes | None:
    """A blob of a tensor (format.md 2), whose bytes come in pieces, or None if it does not shrink."""
    sink = BytesSink(spec.nbytes)  # of which what is not used costs address space only
    writer = TensorWriter(spec, sink, 0, threads=threads, codec="auto", may_pack=True, background=None)
    if not spec.nbytes:
        return None
    for piece in pieces:
        writer.write(piece)
    stored = writer.finish()
    return np.frombuffer(sink.data, np.uint8)[: stored.size] if stored.packed else None


def store_whole(spec: TensorSpec, data: Bytes, threads: int) -> TensorPayload:
    """Store a tensor without a base."""
    blob = _blob(spec, [data], threads)
    return TensorPayload(PLAIN, data) if blob is None else TensorPayload(FULL, blob)


def is_clear(spec: TensorSpec, sparse: Sparse) -> bool:
    """Whether sparse changes are taken without a look at the other codecs, unless the target is constant."""
    return bool(DTYPES[spec.dtype].rotate) and sparse.data.size < spec.nbytes * _CLEAR


def _is_constant(words: Bytes, b: int) -> bool:
    """Whether all words of so many bytes are one."""
    second = words[b : 2 * b].tobytes()  # most tensors show here that they are not
    return second in (b"", words[:b].tobytes()) and repeats(words, words[:b]) == words.size


def store_change(spec: TensorSpec, model: ChangeModel, old: Bytes, new: Bytes, threads: int) -> TensorPayload:
    """Store what changed, as whatever takes the fewest bytes."""
    sparse = model.encode(old, new, threads)
    b = DTYPES[spec.dtype].word_bytes
    if sparse is not None and is_clear(spec, sparse) and not _is_constant(new, b):
        return TensorPayload(SPARSE, sparse.data, sparse)
    found = [] if sparse is None else [TensorPayload(SPARSE, sparse.data, sparse)]
    parts = (slice(at, at + _HELD) for at in range(0, new.size, _HELD))
    pieces = (differences(old[part], new[part], spec) for part in parts)
    blob = _blob(difference_spec(spec), pieces, threads)
    if blob is not None:
        found.append(TensorPayload(DENSE, blob))
    whole = store_whole(spec, new, threads)
    best = min(found, key=_bytes, default=whole)
    return best if _bytes(best) < _bytes(whole) * _WORTH else whole


def _bytes(stored: TensorPayload) -> int:
    """What a payload takes, with the records of its chunks: some 2 bytes each, as they are in the file."""
    return stored.data.size + (2 * stored.sparse.sizes.size if stored.sparse is not None else 0)


def read_blob(
    spec: TensorSpec, source: ByteSource, offset: int, size: int, part: tuple[int, int], threads: int
) -> Bytes:
    """Decode some bytes of a blob that must hold a tensor of this dtype and shape.

    Parameters
    ----------
    spec : TensorSpec
        What it must hold.
    source : ByteSource
        What has the blob.
    offset, size : int
        Where in it.
    part : (int, int)
        The first byte of the tensor, and the one after the last.
    threads : int
        How many threads decode.

    Raises
    ------
    Corrupt, Truncated
        If it is damaged, or holds another.
    """
    reader = BlobReader(source, offset, size)
    if reader.header.spec != spec:
        found = reader.header.spec
        raise Corrupt(
            f"a blob of {found.dtype} {list(found.shape)}, {spec.dtype} {list(spec.shape)} is needed",
            found=found,
            needed=spec,
        )
    begin, end = part
    out = np.empty(end - begin, np.uint8)
    reader.read(begin, end, out, threads)
    return out
