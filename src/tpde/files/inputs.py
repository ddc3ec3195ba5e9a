"""What can be packed: safetensors files, PyTorch state dicts, model directories, hub ids."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

import numpy as np

from tpde.codec.blob import PIECE_BYTES
from tpde.codec.native import Bytes
from tpde.codec.selection import sample_ranges
from tpde.errors import AlreadyPacked, InvalidInput, MissingDependency, NotSafetensors
from tpde.files.file_kinds import PICKLES
from tpde.files.pickles import StateDictSource
from tpde.files.reader import PackedFile
from tpde.files.walk import walk
from tpde.files.weight_files import check_shards
from tpde.format.container import Container, TensorSpec
from tpde.io.paths import given_path


class TensorSource(Protocol):
    """Tensors that can be read at any offset, and the header to restore."""

    name: str
    size: int
    specs: Mapping[str, TensorSpec]
    container: Container

    def read(self, name: str, begin: int, end: int, out: Bytes) -> None:
        """Read a tensor's bytes from `begin` to `end` into `out`."""

    def read_small(self, names: Sequence[str]) -> list[memoryview]:
        """Read all bytes of some small tensors."""

    def close(self) -> None:
        """Release what is held."""


class SafetensorsSource:
    """A plain safetensors file.

    Raises
    ------
    AlreadyPacked
        If the file was packed by tpde.
    """

    def __init__(self, path: Path) -> None:
        self._file = PackedFile(path)
        if self._file.is_packed:
            self._file.close()
            raise AlreadyPacked(
                f"`{path}` is packed already",
                hint=(
                    f"restore the plain file with `tpde unpack {path} {path.stem}-plain{path.suffix}`, or "
                    "read it as it is with `tpde.safe_open`"
                ),
                where=str(path),
            )
        self.name, self.size = str(path), self._file.source.size
        self.container = self._file.container
        self.specs: Mapping[str, TensorSpec] = self.container.specs

    def read(self, name: str, begin: int, end: int, out: Bytes) -> None:
        """Read a tensor's bytes from `begin` to `end` into `out`."""
        at = self.container.data_start + self.container.entries[name].begin
        self._file.source.read_into(at + begin, out.data)

    def read_small(self, names: Sequence[str]) -> list[memoryview]:
        """Read all bytes of some small tensors."""
        return self._file.read_plain(names)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def open_source(path: Path) -> TensorSource:
    """Open a file that can be packed, by its ending."""
    if path.suffix in PICKLES:
        return StateDictSource(path)
    try:
        return SafetensorsSource(path)
    except NotSafetensors as error:
        if error.hint is None:
            error.hint = (
                f"`tpde` packs safetensors files, state dicts ({', '.join(PICKLES)}) and model directories"
            )
        raise


def read_sample(source: TensorSource, name: str) -> Bytes:
    """The bytes of a tensor from which its coding is chosen."""
    ranges = sample_ranges(source.specs[name])
    out, at = np.empty(sum(end - begin for begin, end in ranges), np.uint8), 0
    for begin, end in ranges:
        source.read(name, begin, end, out[at : at + end - begin])
        at += end - begin
    return out


def read_pieces(source: TensorSource, name: str) -> Iterator[Bytes]:
    """A tensor's bytes, a piece at a time; a piece is valid until the next is asked for."""
    nbytes = source.specs[name].nbytes
    buffer = np.empty(min(nbytes, PIECE_BYTES), np.uint8)
    for begin in range(0, nbytes, PIECE_BYTES):
        piece = buffer[: min(PIECE_BYTES, nbytes - begin)]
        source.read(name, begin, begin + piece.size, piece)
        yield piece


class _Download(Protocol):
    def __call__(self, repo_id: str, /, **options: object) -> str: ...


def resolve(source: str | os.PathLike[str], **hub: object) -> Path:
    """Find a source: a path, or the id of a model on the Hugging Face hub, which is downloaded.

    Parameters
    ----------
    source : path-like
        The path or id.
    **hub
        For `huggingface_hub.snapshot_download`, such as `revision`.

    Raises
    ------
    InvalidInput
        If there is no such path, and it cannot be a hub id.
    MissingDependency
        If it may be a hub id, and `huggingface_hub` is not installed.
    """
    path = given_path(source)
    if path.exists():
        return path
    parts = os.fspath(source).split("/")
    if len(parts) != 2 or not all(parts) or parts[0][0] in ".~" or path.suffix in (".safetensors", *PICKLES):
        raise InvalidInput(f"`{path}` does not exist", hint="check the path", where=str(path))
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise MissingDependency(
            f"`{path}` is no path here",
            hint='if it is a model on the Hugging Face hub, run `pip install "tpde[hub]"` first',
        ) from None
    try:
        download = cast(_Download, snapshot_download)  # which says itself what it does not take
        return Path(download(os.fspath(source), **hub))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        raise InvalidInput(
            f"`{path}` is neither a path here nor a model that the hub gives: {first}",
            hint="check the name, and the connection to the hub",
            where=str(path),
        ) from None


def shards(folder: Path) -> list[Path]:
    """The safetensors files of a model directory, in order; links that lead out of it are not followed.

    Raises
    ------
    MissingShard
        If an index names a file that is not there.
    InvalidInput
        If there are none, or an index is none.
    """
    return [folder / name for name in check_shards(walk(folder, outside=False))]


def safetensors_files(path: Path) -> Iterator[Path]:
    """The file itself, or the safetensors files below a directory, in order.

    Raises
    ------
    InvalidInput
        If there is none.
    """
    if not path.is_dir():
        yield path
        return
    found = [path / name for name in walk(path).files if name.endswith(".safetensors")]
    if not found:
        raise InvalidInput(
            f"`{path}` has no `*.safetensors` file", hint="name a file, or another directory", where=str(path)
        )
    yield from found
