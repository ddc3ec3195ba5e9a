"""A delta file without its base: what it says, and what its payloads make of a tensor."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash
import zstandard

from tpde.codec.delta import CHUNK_WORDS, ChangeModel, Sparse
from tpde.codec.fingerprints import fingerprint
from tpde.codec.native import Bytes
from tpde.errors import Corrupt, InvalidInput, TpdeError
from tpde.files.documents import is_inside
from tpde.format.constants import DTYPES
from tpde.format.delta_head import (
    DENSE,
    FULL,
    SPARSE,
    WITH_BASE,
    Head,
    OtherEntry,
    Payload,
    TensorEntry,
    WeightsEntry,
    payloads,
)
from tpde.format.delta_reader import is_delta, read_head
from tpde.io.paths import given_path
from tpde.io.sources import ByteSource, BytesSource, FileSource
from tpde.store.payloads import add_differences, difference_spec, read_blob

MAX_OTHER_BYTES = 1 << 32  # of a file that holds no weights, which is read as a whole


def refuse_too_large(name: str, size: int) -> None:
    """Refuse to write a file into a delta that `DeltaFile.other` would refuse to read.

    Raises
    ------
    InvalidInput
        If it is one.
    """
    if size > MAX_OTHER_BYTES:
        raise InvalidInput(
            f"a delta cannot hold `{name}`: it has {size} bytes, a file without weights at most "
            f"{MAX_OTHER_BYTES}",
            hint="take the delta of a directory without it",
            where=name,
            found=size,
            needed=MAX_OTHER_BYTES,
        )


class DeltaFile:
    """A delta file without its base.

    Parameters
    ----------
    source : ByteSource
        The file, or its bytes in memory. It is closed with this, or if this fails.

    Attributes
    ----------
    head : Head
        What it is.
    models : list of Model
        The models of its sparse changes.

    Raises
    ------
    Truncated, Corrupt, UnsupportedVersion, UnsupportedDtype, InvalidInput
        If it cannot be read.
    """

    def __init__(self, source: ByteSource) -> None:
        self.name = source.name
        self._source = source
        try:
            self.head: Head = read_head(self._source)
            self._check_names()
            self.models = [self._model(data) for data in self.head.models]
        except BaseException:
            self.close()
            raise
        self._places = {id(it): place for it, place in payloads(self.head)}

    def _model(self, data: bytes) -> ChangeModel:
        try:
            return ChangeModel(data)
        except Corrupt as error:
            raise error.prefixed(f"`{self.name}`", where=self.name) from None

    def _check_names(self) -> None:
        """Check that files can be where they say, and that models suit their tensors."""
        names = {file.name for file in self.head.files}
        for name in names:
            parents = Path(name).parents if name else []
            if not (is_inside(name) or names == {""}) or any(p.as_posix() in names for p in parents):
                raise Corrupt(
                    f"`{self.name}` names {name[:200]!a}, which is no file of a directory",
                    hint="it cannot be trusted",
                    where=self.name,
                )
        for it in self.head.tensors:
            facts = DTYPES[it.spec.dtype]
            if it.codec == SPARSE and tuple(self.head.models[it.model][:2]) != (
                facts.word_bytes,
                facts.rotate,
            ):
                raise Corrupt(
                    f"`{self.name}`: tensor `{it.name}` is under a model of other words",
                    hint="the file is damaged, fetch it again",
                    where=self.name,
                    tensor=it.name,
                )

    def by_name(self) -> dict[str, TensorEntry]:
        """Its tensors by their names, for what has no files.

        Raises
        ------
        InvalidInput
            If two files have one of the same name.
        """
        found: dict[str, TensorEntry] = {}
        for it in self.head.tensors:
            if found.setdefault(it.name, it) is not it:
                raise InvalidInput(
                    f"`{self.name}` has `{it.name}` in two files; live tensors have no files",
                    hint="take a delta of one model's files alone",
                    where=it.name,
                )
        return found

    @property
    def needs_base(self) -> bool:
        """Whether it has anything from a base."""
        weights = [it for it in self.head.files if isinstance(it, WeightsEntry)]
        return any(it.header is None for it in weights) or any(
            it.codec in WITH_BASE for it in self.head.tensors
        )

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._source.size

    def payload(self, it: TensorEntry | OtherEntry) -> Bytes:
        """Read a payload, and check its hash.

        Raises
        ------
        Corrupt
            Naming the tensor or the file that it is of.
        """
        place: Payload = self._places[id(it)]
        out = np.empty(place.size, np.uint8)
        self._source.read_into(place.offset, out.data)
        found = xxhash.xxh3_64_intdigest(out.data)
        if place.size and found != place.hash:
            what = "tensor" if isinstance(it, TensorEntry) else "file"
            raise Corrupt(
                f"`{self.name}`: {what} `{it.name}`: its bytes hash to {found:016x}, {place.hash:016x} was "
                "written",
                hint="the file is damaged, fetch it again",
                tensor=it.name if what == "tensor" else None,
                where=self.name,
                found=found,
                needed=place.hash,
            )
        return out

    def read_payloads(self, entries: Sequence[TensorEntry], out: Bytes) -> None:
        """Read payloads to where they lie one after the other. Their hashes are not compared."""
        at = 0
        for offset, size in _joined(self._places[id(it)] for it in entries):
            self._source.read_into(offset, out[at : at + size].data)
            at += size

    def other(self, it: OtherEntry) -> bytes:
        """Read a file that the delta holds in full."""
        frame = self.payload(it).tobytes()
        try:
            size = zstandard.frame_content_size(frame)
            if not 0 <= size <= MAX_OTHER_BYTES:
                raise ValueError(f"it claims {size} bytes")
            content = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size)
        except (ValueError, zstandard.ZstdError) as error:
            raise Corrupt(f"`{self.name}`: file `{it.name}` is damaged ({error})", where=self.name) from None
        return content

    def target_of(self, it: TensorEntry, old: Bytes | None, threads: int) -> Bytes:
        """Make a tensor of the target. `old`, which has the base's words, may become it."""
        try:
            new = self._target_of(it, old, threads)
        except TpdeError as error:
            raise error.of_tensor(it.name).prefixed(f"`{self.name}`", where=self.name) from None
        found = fingerprint(new)
        if found != it.target:
            raise Corrupt(
                f"`{self.name}`: tensor `{it.name}` comes out with the fingerprint {found.hex()}, "
                f"{it.target.hex()} was written",
                hint="the file is damaged, fetch it again",
                tensor=it.name,
                where=self.name,
                found=found.hex(),
                needed=it.target.hex(),
            )
        return new

    def _target_of(self, it: TensorEntry, old: Bytes | None, threads: int) -> Bytes:
        data = self.payload(it)
        if it.codec == SPARSE and old is not None:
            self.models[it.model].apply(Sparse(data, it.changes, it.sizes), old, threads)
            return old
        if it.codec in (DENSE, FULL):
            return self._decoded(it, old, (BytesSource(data), 0), (0, it.spec.nbytes), threads)
        return data if old is None else old

    def _decoded(
        self,
        it: TensorEntry,
        old: Bytes | None,
        blob: tuple[ByteSource, int],
        part: tuple[int, int],
        threads: int,
    ) -> Bytes:
        """Some bytes of a tensor from its blob, and of its base's, which become the tensor's."""
        spec = it.spec if old is None else difference_spec(it.spec)
        found = read_blob(spec, *blob, it.size, part, threads)
        if old is None:
            return found
        add_differences(old, found, it.spec)
        return old

    def part_of(self, it: TensorEntry, old: Bytes | None, begin: int, end: int, threads: int) -> Bytes:
        """Make some bytes of a tensor, of whole chunks, of its base's; no hash is compared."""
        try:
            at = self._places[id(it)].offset
            if it.codec == SPARSE and old is not None:
                return self._sparse_part(it, old, begin, end, threads)
            if it.codec in (DENSE, FULL):
                return self._decoded(it, old, (self._source, at), (begin, end), threads)
            if old is None:
                old = np.empty(end - begin, np.uint8)
                self._source.read_into(at + begin, old.data)
            return old
        except TpdeError as error:
            raise error.of_tensor(it.name).prefixed(f"`{self.name}`", where=self.name) from None

    def _sparse_part(self, it: TensorEntry, old: Bytes, begin: int, end: int, threads: int) -> Bytes:
        chunk = CHUNK_WORDS * DTYPES[it.spec.dtype].word_bytes
        own = slice(begin // chunk, -(-end // chunk))
        first, size = (int(it.sizes[part].sum(dtype=np.uint64)) for part in (slice(own.start), own))
        if first + size > it.size:
            raise Corrupt(f"chunks of {first + size} bytes, of {it.size}", tensor=it.name)
        data = np.empty(size, np.uint8)
        self._source.read_into(self._places[id(it)].offset + first, data.data)
        self.models[it.model].apply(Sparse(data, it.changes[own], it.sizes[own]), old, threads)
        return old

    def close(self) -> None:
        """Close the file."""
        self._source.close()


def _joined(places: Iterable[Payload]) -> Iterator[tuple[int, int]]:
    """Where payloads lie, and their size: neighbours as one."""
    offset = size = 0
    for it in places:
        if it.offset != offset + size:
            yield offset, size
            offset, size = it.offset, 0
        size += it.size
    yield offset, size


def is_delta_file(path: Path) -> bool:
    """Whether a path is a delta file."""
    if not path.is_file():
        return False
    source = FileSource(path)
    try:
        return is_delta(source)
    finally:
        source.close()


def existing_delta(path: str | os.PathLike[str]) -> Path:
    """A path, at which there is a delta.

    Raises
    ------
    InvalidInput
        If there is none.
    """
    found = given_path(path)
    if not found.exists():
        raise InvalidInput(f"`{found}` does not exist", hint="check the path", where=str(found))
    if not is_delta_file(found):
        raise InvalidInput(
            f"`{found}` is no delta", hint="name a file that `tpde diff` wrote", where=str(found)
        )
    return found
