"""What can be packed: safetensors files, PyTorch state dicts, model directories, hub ids."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tpde.codec.blob import PIECE_BYTES
from tpde.codec.native import Bytes
from tpde.codec.plan import sample_ranges
from tpde.errors import (
    AlreadyPacked,
    InvalidInput,
    MissingDependency,
    NotSafetensors,
    UnsafePickle,
)
from tpde.format.container import TensorSpec, canonical_header
from tpde.frameworks import torch_bytes, torch_spec
from tpde.packing.names import PICKLES
from tpde.packing.reader import PackedFile
from tpde.packing.tree import walk
from tpde.packing.weights import check_shards


class TensorSource(Protocol):
    """Tensors that can be read at any offset, and the header to restore."""

    name: str
    specs: Mapping[str, TensorSpec]
    header: bytes
    metadata: Mapping[str, str]

    def read(self, name: str, begin: int, end: int, out: Bytes) -> None:
        """Read a tensor's bytes from `begin` to `end` into `out`."""

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
                hint="unpack it with `tpde unpack`, or use it as it is",
                where=str(path),
            )
        self.name = str(path)
        self.specs: Mapping[str, TensorSpec] = self._file.container.specs
        self.header = self._file.container.header
        self.metadata: Mapping[str, str] = self._file.container.metadata

    def read(self, name: str, begin: int, end: int, out: Bytes) -> None:
        """Read a tensor's bytes from `begin` to `end` into `out`."""
        self._file.tensor(name).read(begin, end, out)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class StateDictSource:
    """A state dict that `torch.save` wrote, loaded with `weights_only=True`: code in it is never run.

    Raises
    ------
    UnsafePickle
        If the file holds anything but tensors and plain containers.
    InvalidInput
        If it is not a state dict, or has tensors that safetensors cannot hold.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._tensors = _load_state_dict(path)
        self._last = "", np.empty(0, np.uint8)
        self.specs: Mapping[str, TensorSpec] = {
            name: torch_spec(name, tensor) for name, tensor in self._tensors.items()
        }
        self.metadata: Mapping[str, str] = {"format": "pt"}
        self.header = canonical_header(self.specs, self.metadata)

    def read(self, name: str, begin: int, end: int, out: Bytes) -> None:
        """Read a tensor's bytes from `begin` to `end` into `out`."""
        if self._last[0] != name:  # kept, as one that is not contiguous is copied
            self._last = name, torch_bytes(self._tensors[name])
        out[:] = self._last[1][begin:end]

    def close(self) -> None:
        """Let go of the tensors."""
        self._tensors, self._last = {}, ("", np.empty(0, np.uint8))


def _load_state_dict(path: Path) -> dict[str, Any]:
    import pickle

    try:
        import torch
    except ImportError:
        raise MissingDependency(
            f"`{path}` is a PyTorch state dict, and reading it needs torch",
            hint='run `pip install "tpde[torch]"`, or convert the file to safetensors',
        ) from None
    if not path.is_file():
        raise InvalidInput(f"`{path}` does not exist", hint="check the path", where=str(path))
    try:
        with warnings.catch_warnings():  # of old pickle protocols, which are read all the same
            warnings.simplefilter("ignore")
            try:
                loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except (RuntimeError, ValueError, OSError):  # the format before 1.6 cannot be mapped
                loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"asks for `{wanted[1]}`" if wanted else "is no state dict"
        raise UnsafePickle(
            f"`{path}` is a pickle that {what}, and code from files is never run",
            hint="convert it to safetensors where you trust it, and pack that",
            where=str(path),
        ) from None
    except MemoryError:
        raise
    except Exception as error:  # torch's unpickler lets through whatever it stumbles over in a damaged file
        raise InvalidInput(
            f"`{path}` is not a PyTorch state dict, or is damaged ({type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]})",
            hint="fetch it again",
            where=str(path),
        ) from None
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict) or not loaded:
        what = "an empty state dict" if loaded == {} else f"a {type(loaded).__name__}, not a state dict"
        raise InvalidInput(
            f"`{path}` holds {what}", hint="name a file that maps names to tensors", where=str(path)
        )
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise InvalidInput(
                f"`{path}`: entry `{name}` is a {type(value).__name__}",
                hint="a state dict maps names to tensors",
                where=str(path),
            )
    return loaded


def open_source(path: Path) -> TensorSource:
    """Open a file that can be packed, by its ending."""
    if path.suffix in PICKLES:
        return StateDictSource(path)
    try:
        return SafetensorsSource(path)
    except NotSafetensors as error:
        error.hint = (
            f"`tpde` packs safetensors files, state dicts ({', '.join(PICKLES)}) and model directories"
        )
        raise


def read_sample(source: TensorSource, name: str) -> Bytes:
    """The bytes of a tensor from which its coding is chosen."""
    ranges = list(sample_ranges(source.specs[name]))
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


def resolve(source: str | os.PathLike[str]) -> Path:
    """Find a source: a path, or the id of a model on the Hugging Face hub, which is downloaded.

    Raises
    ------
    InvalidInput
        If there is no such path, and it cannot be a hub id.
    MissingDependency
        If it may be a hub id, and `huggingface_hub` is not installed.
    """
    path = Path(source)
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
        return Path(snapshot_download(os.fspath(source)))
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
