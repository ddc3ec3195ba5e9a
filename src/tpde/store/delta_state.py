"""A delta file on its base: a state like any other, whose tensors are made when they are read."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash
import zstandard

from tpde.codec.delta import CHUNK_WORDS, ChangeModel, Sparse
from tpde.codec.fingerprints import fingerprint
from tpde.codec.native import Bytes
from tpde.errors import Corrupt, InvalidInput, MissingBase, TpdeError
from tpde.files.documents import is_inside
from tpde.format.constants import DTYPES
from tpde.format.container import TensorSpec
from tpde.format.delta_head import (
    DENSE,
    FULL,
    SAME,
    SPARSE,
    WITH_BASE,
    Head,
    OtherEntry,
    Payload,
    TensorEntry,
    WeightsEntry,
    payloads,
)
from tpde.format.delta_reader import check_header, is_delta, read_head
from tpde.io.sources import BytesSource, FileSource, Source
from tpde.store.payloads import add_differences, difference_spec, read_blob
from tpde.store.states import BaseTensors, FilesState, Key, State, nothing

MAX_OTHER_BYTES = 1 << 32  # of a file that holds no weights, which is read as a whole
MAX_CHAIN = 240  # files that are open at a time; some systems allow 256


def _joined(places: Iterable[Payload]) -> Iterator[tuple[int, int]]:
    """Where payloads lie, and their size: neighbours as one."""
    offset = size = 0
    for it in places:
        if it.offset != offset + size:
            yield offset, size
            offset, size = it.offset, 0
        size += it.size
    yield offset, size


class DeltaFile:
    """A delta file without its base.

    Parameters
    ----------
    source : Source
        The file, or its bytes in memory. It is closed with this, or if this fails.

    Attributes
    ----------
    head : Head
        What it is.
    models : list of ChangeModel
        The models of its sparse changes.

    Raises
    ------
    Truncated, Corrupt, UnsupportedVersion, UnsupportedDtype, InvalidInput
        If it cannot be read.
    """

    def __init__(self, source: Source) -> None:
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
        blob: tuple[Source, int],
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


def other_base(it: TensorEntry, base: str, delta: str, found: bytes) -> MissingBase:
    """The error for a base whose tensor has another fingerprint than the delta's had."""
    return MissingBase(
        f"tensor `{it.name}` of `{base}` is not what `{delta}` was made from: its fingerprint is "
        f"{found.hex()}, {it.base.hex()} is needed",
        hint="name the base that the delta was made from",
        where=it.name,
        found=found.hex(),
        needed=it.base.hex(),
    )


class DeltaState:
    """The state that a delta makes of its base.

    Parameters
    ----------
    file : DeltaFile
        The delta. It is closed with the state, or if this fails.
    base : State
        Its base, likewise.

    Raises
    ------
    MissingBase
        If the base lacks a file or a tensor, or has it with another dtype or shape.
    """

    def __init__(self, file: DeltaFile, base: State) -> None:
        self.name, self._base, self.file = file.name, base, file
        self.headers: dict[str, bytes] = {}
        self.specs: dict[Key, TensorSpec] = {}
        self.others: dict[str, Callable[[], bytes]] = {}
        self._tensors: dict[Key, TensorEntry] = {}
        self._bases: dict[Key, Key] = {}
        try:
            finder = BaseTensors(base.specs, base.name)
            for entry in file.head.files:
                if isinstance(entry, OtherEntry):
                    self.others[entry.name] = functools.partial(self._other, entry)
                else:
                    self._weights(entry, finder)
        except BaseException:
            self.close()
            raise

    def _weights(self, file: WeightsEntry, finder: BaseTensors) -> None:
        header = file.header
        if header is None:
            header = self._base.headers.get(file.name)
            if header is None:
                raise MissingBase(
                    f"`{file.name}` is not in the base `{self._base.name}`",
                    hint="name the base that the delta was made from",
                    where=file.name,
                )
        for it in file.tensors:
            key = file.name, it.name
            self._tensors[key], self.specs[key] = it, it.spec
            if it.codec in WITH_BASE:
                self._bases[key] = finder.need(key, it.spec)
        try:
            check_header(file, header, f"`{self._base.name}`")
        except Corrupt as error:
            raise MissingBase(error.message, hint="name the base that the delta was made from") from None
        self.headers[file.name] = header

    def _other(self, file: OtherEntry) -> bytes:
        if file.size:
            content = self.file.other(file)
        elif file.name in self._base.others:
            content = self._base.others[file.name]()
        else:
            content = b""
        found = xxhash.xxh3_128_hexdigest(content)
        if found != file.hash:
            kind = Corrupt if file.size else MissingBase
            raise kind(
                f"file `{file.name}` of `{self.name if file.size else self._base.name}` hashes to {found}, "
                f"{file.hash} is needed",
                hint="fetch it again" if file.size else "name the base that the delta was made from",
                where=file.name,
                found=found,
                needed=file.hash,
            )
        return content

    def read(self, key: Key, threads: int) -> Bytes:
        """Make a tensor.

        Raises
        ------
        MissingBase
            If the base's has another fingerprint.
        Corrupt
            If the delta is damaged.
        """
        it, old = self._tensors[key], None
        if key in self._bases:
            old = self._base.read(self._bases[key], threads)
            found = fingerprint(old)
            if found != it.base:
                raise other_base(it, self._base.name, self.name, found)
            if it.codec == SAME:
                return old
        return self.file.target_of(it, old, threads)

    def read_parts(self, key: Key, ranges: list[tuple[int, int]], threads: int) -> list[Bytes]:
        """Make some bytes of a tensor; no fingerprint is compared."""
        it, olds = self._tensors[key], list[Bytes | None]([None] * len(ranges))
        if key in self._bases:
            olds = list(self._base.read_parts(self._bases[key], ranges, threads))
        return [self.file.part_of(it, old, *part, threads) for old, part in zip(olds, ranges, strict=True)]

    def close(self) -> None:
        """Close the delta and its base."""
        try:
            self.file.close()
        finally:
            self._base.close()


def is_delta_file(path: Path) -> bool:
    """Whether a path is a delta file."""
    if not path.is_file():
        return False
    source = FileSource(path)
    try:
        return is_delta(source)
    finally:
        source.close()


def base_path(delta: DeltaFile) -> Path:
    """Where a delta's base was when it was made.

    Raises
    ------
    MissingBase
        If the delta does not say, or there is nothing any longer.
    """
    hint = delta.head.base
    found = Path(delta.name).parent / hint if hint else None
    if found is None or Path(hint or "").is_absolute() or "\0" in (hint or "") or not found.exists():
        raise MissingBase(
            f"`{delta.name}` has its base at {f'`{hint}`' if hint else 'an unknown place'}, where nothing is",
            hint="put the base there, or name it",
            where=delta.name,
        )
    return found


def open_state(path: Path) -> State:
    """Open a state: files as they are, or a delta with the chain of its bases.

    Parameters
    ----------
    path : Path
        A safetensors file, a model directory, either packed or not, or a delta.

    Raises
    ------
    InvalidInput
        If there is nothing, it is no state, or the chain is too long; `MissingBase` if the base of a delta is
        not where it was.
    Corrupt
        If a chain comes back to a delta of it.
    """
    if not path.exists():
        raise InvalidInput(f"`{path}` does not exist", hint="check the path", where=str(path))
    links: list[DeltaFile] = []
    seen: list[Path] = []
    try:
        while is_delta_file(path):
            place = path.resolve()
            if place in seen:
                chain = " -> ".join(f"`{it.name}`" for it in (*seen, place))
                raise Corrupt(
                    f"the base of `{path}` is in the end itself: {chain}",
                    hint="one of them is not what it was, fetch it again",
                    where=str(path),
                )
            if len(seen) == MAX_CHAIN:
                raise InvalidInput(
                    f"`{links[0].name}` stands on more than {MAX_CHAIN} deltas",
                    hint="restore one of these with `tpde patch`, and go on from there",
                    where=links[0].name,
                    needed=MAX_CHAIN,
                )
            seen.append(place)
            links.append(DeltaFile(FileSource(path)))
            if links[-1].head.base is None and not links[-1].needs_base:
                break
            path = base_path(links[-1])
        state = nothing() if links and links[-1].head.base is None else FilesState(path)
        while links:
            state = DeltaState(links.pop(), state)
        return state
    except BaseException:
        for link in links:
            link.close()
        raise


def same_place(one: Path, other: Path) -> bool:
    """Whether two paths are one file or folder."""
    return one.exists() and other.exists() and os.path.samefile(one, other)
