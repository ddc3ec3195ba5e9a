"""Reading a safetensors file whose tensors may be packed."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence
from functools import cached_property
from typing import cast

import numpy as np

from tpde.codec.native import Bytes
from tpde.errors import Corrupt, UnknownTensor, UnsupportedVersion
from tpde.files.source_header import original_header
from tpde.files.tensor_reader import BlobTensor, PlainTensor, StoredTensor
from tpde.format.constants import KEY_PLAIN, KEY_VERSION, KEYS, MAGIC, SUFFIX, VERSION
from tpde.format.container import Container, Entry, TensorSpec
from tpde.format.container_reader import read_container
from tpde.format.container_writer import canonical_header
from tpde.io.paths import given_path
from tpde.io.small_reads import read_together
from tpde.io.sources import ByteSource, BytesSource, FileSource, read

_DIGITS = re.compile("[0-9a-fA-F]*")  # `bytes.fromhex` passes over white space
_HASH = struct.Struct("16s")


class PackedFile:
    """A safetensors file, packed or not, or the bytes of one.

    Parameters
    ----------
    source : path-like or bytes-like or ByteSource
        The file.

    Attributes
    ----------
    container : Container
        The file's own header.
    specs : dict of str to TensorSpec
        The source's tensors, packed or not, by their names there.
    is_packed : bool
        Whether the file has a packed tensor, or says that it was written by tpde.

    Raises
    ------
    Truncated, NotSafetensors, Corrupt, UnsupportedVersion, UnsupportedDtype, InvalidInput
        If it cannot be read.
    """

    def __init__(
        self, source: str | os.PathLike[str] | bytes | bytearray | memoryview | Bytes | ByteSource
    ) -> None:
        if isinstance(source, (bytes, bytearray, memoryview, np.ndarray)):
            self.source: ByteSource = BytesSource(source)
        elif hasattr(source, "read_into"):
            self.source = cast(ByteSource, source)
        else:
            given_path(source)
            self.source = FileSource(source)  # by its name as it was given
        try:
            self.container: Container = read_container(self.source)
            self._open()
        except BaseException:
            self.source.close()
            raise

    def _open(self) -> None:
        metadata, where = self.container.metadata, f"`{self.source.name}`"
        version = metadata.get(KEY_VERSION)
        if version is not None and version != str(VERSION):
            raise UnsupportedVersion(
                f"{where} has format version {version[:20]}; this tpde reads version {VERSION}",
                hint="upgrade tpde",
                where=self.source.name,
                found=version[:20],
                needed=str(VERSION),
            )
        kept = [key for key in KEYS if key in metadata]
        if version is None and kept:
            raise Corrupt(
                f"{where}: the metadata has `{kept[0]}`, but no `{KEY_VERSION}`, the version of the format",
                hint="the file is damaged, fetch it again",
                where=self.source.name,
            )
        # The source's header, or None where another tool dropped it: format.md 1.2, 1.3.
        self.original = original_header(self.container, self.source.name) if version is not None else None
        entries = self.container.entries
        if self.original is not None:
            candidates = [n for n in self.original.entries if n not in entries and n + SUFFIX in entries]
        else:
            stored = [n for n in entries if n.endswith(SUFFIX) and self._has_magic(entries[n])]
            candidates = [n[: -len(SUFFIX)] for n in stored]
        self._packed = {name: name + SUFFIX for name in candidates}
        self.is_packed = bool(self._packed) or version is not None
        # Texts compare by code points, in the order of their UTF-8 bytes (1.3).
        blobs = set(self._packed.values())
        plain = {name: entry.spec for name, entry in entries.items() if name not in blobs}
        self._plain = sorted(plain)
        collision = next((n for n in self._plain if n in self._packed), None)
        if collision is not None:
            raise Corrupt(f"{where}: tensor `{collision}` is there both plain and packed", tensor=collision)
        if self.original is not None:
            self.specs = self.original.specs
            self._compare(plain)
            self._hashes = self._plain_hashes()
        else:
            self._hashes = b""
            self.specs = {n: plain[n] for n in self._plain}
            if self._packed:
                found = self.specs | {n: self.tensor(n).spec for n in self._packed}
                self.specs = {n: found[n] for n in sorted(found)}

    def _has_magic(self, entry: Entry) -> bool:
        if entry.spec.dtype != "U8" or len(entry.spec.shape) != 1 or entry.spec.nbytes < len(MAGIC):
            return False
        return read(self.source, self.container.data_start + entry.begin, len(MAGIC)) == MAGIC

    def _plain_hashes(self) -> bytes:
        """The hashes of the tensors stored as they are, in the order of their names."""
        text = self.container.metadata.get(KEY_PLAIN)
        if text is None:
            if self._plain:
                raise Corrupt(
                    f"`{self.source.name}`: `{KEY_PLAIN}` is missing from the metadata",
                    hint="the file is damaged, fetch it again",
                    where=self.source.name,
                )
            return b""
        data = bytes.fromhex(text) if _DIGITS.fullmatch(text) and len(text) % 2 == 0 else b""
        if len(data) != 16 * len(self._plain) or len(text) != 2 * len(data):
            raise Corrupt(
                f"`{self.source.name}`: `{KEY_PLAIN}` should hold {len(self._plain)} hashes of 32 digits, "
                f"it has {len(text)} characters",
                hint="the file is damaged, fetch it again",
                where=self.source.name,
                found=len(text),
                needed=32 * len(self._plain),
            )
        return data

    @cached_property
    def _digests(self) -> dict[str, bytes]:
        """The hash of each tensor stored as it is; none where another tool dropped them."""
        return dict(zip(self._plain, [digest for (digest,) in _HASH.iter_unpack(self._hashes)], strict=False))

    def _compare(self, plain: dict[str, TensorSpec]) -> None:
        """Check that names, dtypes and shapes agree with the source's header (format.md 1.4)."""
        if plain == {name: spec for name, spec in self.specs.items() if name not in self._packed}:
            return
        for name in sorted(self.specs.keys() ^ {*plain, *self._packed}):
            missing = name in self.specs
            raise Corrupt(
                f"`{self.source.name}`: tensor `{name}` is {'missing' if missing else 'not in the source'}",
                hint="the file is damaged, fetch it again",
                where=self.source.name,
                tensor=name,
            )
        name = next(name for name in self._plain if plain[name] != self.specs[name])
        raise self._other_spec(name, plain[name])

    def _other_spec(self, name: str, found: TensorSpec) -> Corrupt:
        return Corrupt(
            f"tensor `{name}` is {found.dtype} {list(found.shape)}, but {self.specs[name].dtype} "
            f"{list(self.specs[name].shape)} in the source's header",
            hint="the file is damaged, fetch it again",
            tensor=name,
        )

    def tensor(self, name: str) -> StoredTensor:
        """Open a tensor: its header, tables and index map are read and checked.

        Raises
        ------
        UnknownTensor
            If there is no such tensor.
        Corrupt, Truncated, UnsupportedVersion
            If it is damaged.
        """
        if not isinstance(name, str):
            raise UnknownTensor(
                f"`{self.source.name}` has no tensor `{name!s:.50}`, a {type(name).__name__}",
                hint="pass the name of one, a text",
                where=self.source.name,
            )
        if name in self._packed:
            entry = self.container.entries[self._packed[name]]
            at = self.container.data_start + entry.begin
            packed = BlobTensor(name, self.source, at, entry.end - entry.begin)
            if self.original is not None and packed.spec != self.specs[name]:
                raise self._other_spec(name, packed.spec)
            return packed
        if name not in self.specs:
            raise UnknownTensor(f"no tensor `{name}` in `{self.source.name}`", where=self.source.name)
        entry = self.container.entries[name]
        at = self.container.data_start + entry.begin
        return PlainTensor(name, self.source, at, entry, self.digest(name))

    def is_plain(self, name: str) -> bool:
        """Whether a tensor is stored as it is."""
        return name not in self._packed

    def read_plain(self, names: Sequence[str]) -> list[memoryview]:
        """Read all bytes of some tensors that are stored as they are, those side by side at once."""
        return read_together(self.source, self.container.places(names))

    def digest(self, name: str) -> bytes | None:
        """The hash of a tensor that is stored as it is; None where another tool dropped it."""
        return self._digests.get(name)

    def offset_names(self) -> list[str]:
        """Names of all tensors, in the order of their bytes: in the source or, where it is unknown, here."""
        if self.original is not None:
            return list(self.specs)
        source = {stored: name for name, stored in self._packed.items()}
        return [source.get(stored, stored) for stored in self.container.entries]

    def packed_names(self) -> list[str]:
        """Names of the tensors that are packed."""
        return list(self._packed)

    def read(self, name: str, threads: int = 1) -> Bytes:
        """Read all bytes of a tensor.

        Of one that is packed, every chunk's checksum is checked; its hash is `verify`'s business. Of one that
        is stored as it is, the hash is.
        """
        return self.tensor(name).read_all(threads)

    def source_header(self) -> bytes:
        """The header of the source file, or a canonical one if the file was saved by another tool."""
        if self.original is not None:
            return self.original.header
        return canonical_header(self.specs, self.container.metadata)

    def metadata(self) -> dict[str, str]:
        """The source's `__metadata__`."""
        if self.original is not None:
            return dict(self.original.metadata)
        return dict(self.container.metadata)

    def close(self) -> None:
        """Close the file."""
        self.source.close()

    def __enter__(self) -> PackedFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
