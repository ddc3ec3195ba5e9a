"""A tensor of a safetensors file, read whether it is packed or stored as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import xxhash

from tpde.codec.blob import PIECE_BYTES, BlobReader
from tpde.codec.native import Bytes
from tpde.errors import Corrupt, Truncated, UnsupportedVersion
from tpde.format.container import Entry
from tpde.io.sources import ByteSource


def check_digest(name: str, digest: bytes | None, found: bytes) -> None:
    """Raise `Corrupt` if a tensor's bytes are not those that were packed."""
    if digest is not None and found != digest:
        raise Corrupt(
            f"tensor `{name}`: the bytes hash to {found.hex()}, {digest.hex()} was packed",
            hint="the file is damaged, fetch it again",
            tensor=name,
            found=found.hex(),
            needed=digest.hex(),
        )


class PlainTensor:
    """A tensor stored as it is."""

    __slots__ = ("_offset", "_source", "digest", "name", "spec", "stored_bytes")

    def __init__(
        self, name: str, source: ByteSource, offset: int, entry: Entry, digest: bytes | None
    ) -> None:
        self.name, self._source, self._offset = name, source, offset
        self.spec, self.stored_bytes, self.digest = entry.spec, entry.end - entry.begin, digest

    def read(self, begin: int, end: int, out: Bytes, threads: int = 1) -> None:
        """Read the tensor's bytes from `begin` to `end` into `out`."""
        self._source.read_into(self._offset + begin, out.data)

    def read_all(self, threads: int = 1) -> Bytes:
        """Read all of the tensor's bytes, which must be those that were packed."""
        out = np.empty(self.spec.nbytes, np.uint8)
        self.read(0, out.size, out)
        if self.digest is not None:
            check_digest(self.name, self.digest, xxhash.xxh3_128_digest(out.data))
        return out

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Byte ranges that cover the tensor."""
        for at in range(0, self.spec.nbytes, PIECE_BYTES):
            yield at, min(at + PIECE_BYTES, self.spec.nbytes)


class BlobTensor:
    """A packed tensor: a `BlobReader` whose errors name the tensor."""

    def __init__(self, name: str, source: ByteSource, offset: int, size: int) -> None:
        self.name, self.stored_bytes = name, size
        with self._named():
            self.blob = BlobReader(source, offset, size)
        self.spec, self.digest = self.blob.header.spec, self.blob.header.hash

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except (Corrupt, Truncated, UnsupportedVersion) as error:
            raise error.of_tensor(self.name) from None

    def read(self, begin: int, end: int, out: Bytes, threads: int = 1) -> None:
        """Decode the tensor's bytes from `begin` to `end` into `out`."""
        with self._named():
            self.blob.read(begin, end, out, threads)

    def read_all(self, threads: int = 1) -> Bytes:
        """Decode all of the tensor's bytes."""
        out = np.empty(self.spec.nbytes, np.uint8)
        self.read(0, out.size, out, threads)
        return out

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Byte ranges that cover the tensor."""
        return self.blob.pieces()


StoredTensor = BlobTensor | PlainTensor
