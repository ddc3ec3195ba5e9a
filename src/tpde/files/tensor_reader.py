"""A tensor of a safetensors file, read whether it is packed or stored as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tpde.codec.blob import PIECE_BYTES, BlobReader
from tpde.codec.native import Bytes
from tpde.errors import Corrupt, Truncated, UnsupportedVersion
from tpde.format.container import Entry
from tpde.io.sources import ByteSource


class PlainTensor:
    """A tensor stored as it is."""

    __slots__ = ("_offset", "_source", "digest", "spec", "stored_bytes")

    def __init__(self, source: ByteSource, offset: int, entry: Entry, digest: bytes | None) -> None:
        self._source, self._offset = source, offset
        self.spec, self.stored_bytes, self.digest = entry.spec, entry.end - entry.begin, digest

    def read(self, begin: int, end: int, out: Bytes, threads: int = 1) -> None:
        """Read the tensor's bytes from `begin` to `end` into `out`."""
        self._source.read_into(self._offset + begin, out.data)

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

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Byte ranges that cover the tensor."""
        return self.blob.pieces()


StoredTensor = BlobTensor | PlainTensor
