"""The state that files are: one, or a directory of them, plain or packed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import xxhash

from tpde.codec.native import Bytes
from tpde.errors import InvalidInput, NotSafetensors
from tpde.files.copying import Unchanged
from tpde.files.file_kinds import SAFETENSORS
from tpde.files.manifest import is_packed_directory, read_manifest
from tpde.files.reader import PackedFile
from tpde.files.tensor_reader import check_digest
from tpde.files.walk import follow, walk
from tpde.format.container import TensorSpec
from tpde.format.container_reader import parse_header
from tpde.store.states import Key

_NO_FILE = "a link to no file"


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
        self._plain: list[Unchanged] = []  # packed files have hashes
        self.headers: dict[str, bytes] = {}
        self.specs: dict[Key, TensorSpec] = {}
        self.others: dict[str, Callable[[], bytes]] = {}
        self.other_bytes: dict[str, int] = {}
        try:
            if isinstance(path, Path) and path.is_dir():
                self._directory(path)
            else:
                self._weights("", path)
        except BaseException:
            self.close()
            raise

    def _directory(self, folder: Path) -> None:
        files = _packed_files_of(folder) if is_packed_directory(folder) else _files_of(folder)
        for name, (end, info) in files.items():
            if "original" in info:
                self.others[name] = info["original"].encode
            elif name.endswith(SAFETENSORS):
                self._weights(name, folder / end)
            elif end.endswith(SAFETENSORS):
                self.others[name] = functools.partial(self._restored, end)
            else:
                self.others[name] = (folder / end).read_bytes
                self.other_bytes[name] = (folder / end).stat().st_size
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
        if isinstance(path, Path) and not file.is_packed:
            self._plain.append(Unchanged(path))
        container = parse_header(self.headers[name], f"`{file.source.name}`")
        self.specs.update({(name, tensor): spec for tensor, spec in container.specs.items()})

    def _restored(self, name: str) -> bytes:
        """The bytes of a plain safetensors file, for a link to it whose name is that of another file."""
        header = self.headers[name]
        tensors = [self.read((name, it), 1).data for it in parse_header(header, f"`{self.name}`").entries]
        return b"".join((len(header).to_bytes(8, "little"), header, *tensors))

    def read(self, key: Key, threads: int) -> Bytes:
        """Read a tensor, and check its hash if it is packed."""
        tensor = self._open[key[0]].tensor(key[1])
        try:
            out = np.empty(tensor.spec.nbytes, np.uint8)
        except MemoryError:
            raise MemoryError(
                f"tensor `{key[1]}` of `{self.name}` has {tensor.spec.nbytes} bytes, too many for memory"
            ) from None
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

    def require_unchanged(self) -> None:
        """Make sure that no plain file was changed since it was opened: what was read would be of two states.

        Raises
        ------
        InvalidInput
            If one was.
        """
        for file in self._plain:
            file.require_in_place()

    def close(self) -> None:
        """Close all files."""
        for file in self._open.values():
            file.close()


def _packed_files_of(folder: Path) -> dict[str, tuple[str, Mapping[str, str]]]:
    """The files of a packed directory, what each leads to, and what restores that.

    What lies at a link is the packed file, which is not always what the link leads to in the source.
    """
    manifest = read_manifest(folder)
    links, found = manifest.links(), dict[str, tuple[str, Mapping[str, str]]]()
    for name in manifest.files:
        end = follow(name, links)
        if end is None or end not in manifest.files:
            raise _refused(folder, name, _NO_FILE)
        found[name] = end, manifest.files[end]
    return found


def _files_of(folder: Path) -> dict[str, tuple[str, Mapping[str, str]]]:
    """The files of a plain directory; a link counts as the file that it leads to."""
    tree = walk(folder)
    missing = [(it.name, it.reason) for it in tree.left_out if not it.expected]
    missing += [(it, _NO_FILE) for it in tree.links if not (folder / it).is_file()]
    for name, reason in missing:
        raise _refused(folder, name, reason)
    return {name: (name, {}) for name in sorted((*tree.files, *tree.links), key=lambda it: it.split("/"))}


def _refused(folder: Path, name: str, reason: str) -> InvalidInput:
    return InvalidInput(
        f"a delta cannot hold `{name}` of `{folder}`: {reason}",
        hint="take the delta of a directory without it",
        where=name,
    )
