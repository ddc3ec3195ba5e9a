"""A state of a model: a file or a directory, plain or packed, whose files' bytes are known."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from tpde.codec.native import Bytes
from tpde.errors import InvalidInput, MissingBase, NotSafetensors
from tpde.files.file_kinds import SAFETENSORS
from tpde.files.manifest import is_packed_directory, read_manifest
from tpde.files.reader import PackedFile
from tpde.files.single_file import check_digest
from tpde.files.walk import walk
from tpde.format.container import TensorSpec
from tpde.format.container_reader import parse_header
from tpde.format.container_writer import canonical_header

MEMORY = "<memory>"  # what messages call a state that lies there

Key = tuple[str, str]
"""A tensor: the name of its file and its own."""


class State(Protocol):
    """A model as it was at one time.

    Attributes
    ----------
    name : str
        What messages call it.
    """

    name: str

    @property
    def headers(self) -> Mapping[str, bytes]:
        """The headers of its weight files, by their relative paths; one file alone has an empty one."""

    @property
    def specs(self) -> Mapping[Key, TensorSpec]:
        """All tensors, in the order of their bytes."""

    @property
    def others(self) -> Mapping[str, Callable[[], bytes]]:
        """What reads each other file."""

    def read(self, key: Key, threads: int) -> Bytes:
        """Read a tensor. The bytes are the caller's, but for a `MemoryState`'s."""

    def read_parts(self, key: Key, ranges: list[tuple[int, int]], threads: int) -> list[Bytes]:
        """Read a tensor's bytes, each from one chunk's start to one's end (delta.md 3.1).

        For what does not depend on them, such as the choice of a model: no hash of the tensor is compared.
        The bytes are the caller's.
        """

    def close(self) -> None:
        """Close all files."""


def _files_of(folder: Path) -> Mapping[str, Mapping[str, str]]:
    """The files of a plain directory; a link counts as the file that it leads to."""
    tree = walk(folder)
    missing = [(it.name, it.reason) for it in tree.left_out if not it.expected]
    missing += [(it, "a link to no file") for it in tree.links if not (folder / it).is_file()]
    for name, reason in missing:
        raise InvalidInput(
            f"a delta cannot hold `{name}` of `{folder}`: {reason}",
            hint="take the delta of a directory without it",
            where=name,
        )
    return {name: {} for name in sorted((*tree.files, *tree.links), key=lambda it: it.split("/"))}


class FilesState:
    """Files as they lie there, or one in memory.

    Parameters
    ----------
    path : Path or bytes
        A safetensors file or a model directory, packed or not; or the bytes of such a file.
    """

    def __init__(self, path: Path | bytes) -> None:
        self.name = "<bytes>" if isinstance(path, bytes) else str(path)
        self._open: dict[str, PackedFile] = {}
        self.headers: dict[str, bytes] = {}
        self.specs: dict[Key, TensorSpec] = {}
        self.others: dict[str, Callable[[], bytes]] = {}
        try:
            if isinstance(path, Path) and path.is_dir():
                self._directory(path)
            else:
                self._weights("", path)
        except BaseException:
            self.close()
            raise

    def _directory(self, folder: Path) -> None:
        files = read_manifest(folder).files if is_packed_directory(folder) else _files_of(folder)
        for name, info in files.items():
            if "original" in info:
                self.others[name] = info["original"].encode
            elif name.endswith(SAFETENSORS):
                self._weights(name, folder / name)
            else:
                self.others[name] = (folder / name).read_bytes
        if not self.headers:
            raise InvalidInput(
                f"`{folder}` has no `*.safetensors` file", hint="name another directory", where=self.name
            )

    def _weights(self, name: str, path: Path | bytes) -> None:
        try:
            file = self._open[name] = PackedFile(path)
        except NotSafetensors as error:
            error.hint = "deltas are taken between safetensors files, and directories of them"
            raise
        self.headers[name] = file.source_header() if file.is_packed else file.container.header
        container = parse_header(self.headers[name], f"`{file.source.name}`")
        self.specs.update({(name, tensor): spec for tensor, spec in container.specs.items()})

    def read(self, key: Key, threads: int) -> Bytes:
        """Read a tensor, and check its hash if it is packed."""
        tensor = self._open[key[0]].tensor(key[1])
        out = np.empty(tensor.spec.nbytes, np.uint8)
        tensor.read(0, out.size, out, threads)
        if tensor.digest is not None:
            check_digest(key[1], tensor.digest, xxhash.xxh3_128_digest(out.data))
        return out

    def read_parts(self, key: Key, ranges: list[tuple[int, int]], threads: int) -> list[Bytes]:
        """Read some bytes of a tensor; its hash is not compared."""
        tensor, parts = self._open[key[0]].tensor(key[1]), list[Bytes]()
        for begin, end in ranges:
            parts.append(np.empty(end - begin, np.uint8))
            tensor.read(begin, end, parts[-1], threads)
        return parts

    def close(self) -> None:
        """Close all files."""
        for file in self._open.values():
            file.close()


class MemoryState:
    """Tensors in memory as the one nameless file of a state.

    Parameters
    ----------
    specs : mapping of str to TensorSpec
        The tensors; none for a state of nothing, on which all is new.
    read : callable
        Gives a tensor's bytes by its name. They may be the tensor's own memory.
    metadata : mapping of str to str
        Of the file.
    name : str
        What messages call it.
    """

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        read: Callable[[str], Bytes],
        metadata: Mapping[str, str] | None = None,
        name: str = MEMORY,
    ) -> None:
        self.name, self._read = name, read
        header = canonical_header(specs, metadata or {})
        self.headers: Mapping[str, bytes] = {"": header}
        self.specs: Mapping[Key, TensorSpec] = {
            ("", name): spec for name, spec in parse_header(header, self.name).specs.items()
        }
        self.others: Mapping[str, Callable[[], bytes]] = {}

    def is_of(self, specs: Mapping[str, TensorSpec]) -> bool:
        """Whether it has these tensors."""
        return {key[1]: spec for key, spec in self.specs.items()} == specs

    def of(self, read: Callable[[str], Bytes]) -> MemoryState:
        """Another state of the same tensors, which `read` gives."""
        state = copy.copy(self)
        state._read = read
        return state

    def read(self, key: Key, threads: int) -> Bytes:
        """The bytes of a tensor."""
        return self._read(key[1])

    def read_parts(self, key: Key, ranges: list[tuple[int, int]], threads: int) -> list[Bytes]:
        """Copies of some bytes of a tensor."""
        whole = self._read(key[1])
        return [whole[begin:end].copy() for begin, end in ranges]

    def close(self) -> None:
        """None: it is the caller's."""


def nothing() -> State:
    """A state without tensors: on it, all is new."""

    def read(name: str) -> Bytes:
        raise KeyError(name)

    return MemoryState({}, read, name="<nothing>")


class BaseTensors:
    """Where the tensors of a target have their base (delta.md 5.3)."""

    def __init__(self, specs: Mapping[Key, TensorSpec], name: str) -> None:
        self._specs, self._name = specs, name
        self._by_name: dict[str, list[Key]] = {}
        for key in specs:
            self._by_name.setdefault(key[1], []).append(key)

    def find(self, key: Key) -> Key | None:
        """The base's tensor for one of the target, or None."""
        if key in self._specs:
            return key
        found = self._by_name.get(key[1], [])
        return found[0] if len(found) == 1 else None

    def need(self, key: Key, spec: TensorSpec) -> Key:
        """The base's tensor, which must be there.

        Raises
        ------
        MissingBase
            If it is not, or has another dtype or shape.
        """
        found = self.find(key)
        if found is None:
            raise MissingBase(
                f"tensor `{key[1]}` is not in the base `{self._name}`",
                hint="name the base that the delta was made from",
                where=key[1],
            )
        has = self._specs[found]
        if has != spec:
            raise MissingBase(
                f"tensor `{key[1]}` is {has.dtype} {list(has.shape)} in the base `{self._name}`, the "
                f"delta needs {spec.dtype} {list(spec.shape)}",
                hint="name the base that the delta was made from",
                where=key[1],
                found=has,
                needed=spec,
            )
        return found
