"""Tensors of a packed file read whole, and compared with the hashes of what was packed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import xxhash

from tpde.codec.native import Bytes
from tpde.codec.selection import MIN_BYTES
from tpde.files.reader import PackedFile
from tpde.files.tensor_reader import StoredTensor, check_digest


def stream(tensor: StoredTensor, threads: int, take: Callable[[int, Bytes], None]) -> bytes:
    """Read a tensor piece by piece, handing each with its offset to `take`; returns its XXH3-128.

    The piece is valid only during the call.
    """
    hasher, buffer = xxhash.xxh3_128(), np.empty(0, np.uint8)
    for begin, end in tensor.pieces():  # not listed: an exbibyte of equal words has 2^37
        if end - begin > buffer.size:
            buffer = np.empty(end - begin, np.uint8)
        piece = buffer[: end - begin]
        tensor.read(begin, end, piece, threads)
        hasher.update(piece.data)
        take(begin, piece)
    return hasher.digest()


def check_plain(packed: PackedFile, names: Iterable[str]) -> None:
    """Check tensors that are stored as they are, which something else reads from the file.

    Raises
    ------
    Corrupt
        Naming the first that is not what was packed.
    """
    for name in names:
        digest = packed.digest(name)
        if digest is not None:
            check_digest(name, digest, stream(packed.tensor(name), 1, lambda *_: None))


def is_small(packed: PackedFile, name: str) -> bool:
    """Whether a tensor is one of those that are read many at a time: no writer packs a smaller one."""
    return packed.specs[name].nbytes < MIN_BYTES and packed.is_plain(name)


def read_small(packed: PackedFile, names: list[str]) -> bytes:
    """The bytes of small tensors, one after the other, which must be those that were packed."""
    pieces = packed.read_plain(names)
    for name, piece in zip(names, pieces, strict=True):
        check_digest(name, packed.digest(name), xxhash.xxh3_128_digest(piece))
    return b"".join(pieces)
