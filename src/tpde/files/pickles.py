"""State dicts that `torch.save` wrote: what they hold is unpickled, the bytes are read from the file.

Files are never mapped: a mapping of a file that shrinks kills the process.
"""

from __future__ import annotations

import contextlib
import re
import struct
import sys
import traceback
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np

from tpde.codec.native import Bytes
from tpde.errors import InvalidInput, MissingDependency, UnsafePickle
from tpde.format.container import TensorSpec, check_texts
from tpde.format.container_reader import parse_header
from tpde.format.container_writer import canonical_header
from tpde.frameworks import not_dense, refuse_expanded, torch_bytes, torch_spec
from tpde.io.sources import FileSource

if TYPE_CHECKING:
    import torch

# Of a zip file's member: the lengths of its name and of what is extra.
_LOCAL_HEADER = struct.Struct("<26xHH")
# What PyTorch makes such tensors by, which it cannot without their bytes.
_NOT_DENSE = "_rebuild_qtensor", "_rebuild_nested_tensor"
_PACKED = "tpde.weights."  # where what makes packed weights of a pickle lies


class _InFile(NamedTuple):
    """A tensor whose bytes are in the file: what it looks like, and where its storage begins."""

    like: torch.Tensor
    offset: int


class StateDictSource:
    """A state dict that `torch.save` wrote, loaded with `weights_only=True`: code in it is never run.

    Files of PyTorch 1.6 and later stay where they are, and tensors are read from them; older ones are loaded.

    Raises
    ------
    UnsafePickle
        If the file holds anything but tensors and plain containers.
    InvalidInput
        If it is not a state dict, or has tensors that safetensors cannot hold.
    """

    def __init__(self, path: Path) -> None:
        self._file = FileSource(path)
        self.name, self.size = str(path), self._file.size
        self._last = "", np.empty(0, np.uint8)
        try:
            self._tensors = _load(path, self._file)
            self.specs: Mapping[str, TensorSpec] = {
                name: torch_spec(name, it.like if isinstance(it, _InFile) else it)
                for name, it in self._tensors.items()
            }
            metadata = {"format": "pt"}
            self.container = parse_header(canonical_header(self.specs, metadata), f"`{path}`")
        except BaseException:
            self._file.close()
            raise

    def read(self, name: str, begin: int, end: int, out: Bytes) -> None:
        """Read a tensor's bytes from `begin` to `end` into `out`."""
        tensor = self._tensors[name]
        if isinstance(tensor, _InFile) and _is_plain(tensor.like):
            self._file.read_into(tensor.offset + _first(tensor.like) + begin, out.data)
            return
        if self._last[0] != name:  # kept, since one that is not contiguous is copied
            self._last = "", np.empty(0, np.uint8)
            self._last = name, torch_bytes(self._real(tensor) if isinstance(tensor, _InFile) else tensor)
        out[:] = self._last[1][begin:end]

    def read_small(self, names: Sequence[str]) -> list[memoryview]:
        """Read all bytes of some small tensors, between which there are gaps in the file."""
        found = [np.empty(self.specs[name].nbytes, np.uint8) for name in names]
        for name, data in zip(names, found, strict=True):
            self.read(name, 0, data.size, data)
        return [data.data for data in found]

    def _real(self, stored: _InFile) -> torch.Tensor:
        """A tensor with its bytes: what lies between its first element and its last."""
        import torch

        like = stored.like
        data = bytearray(_reach(like))
        if not data:
            return torch.empty(like.shape, dtype=like.dtype, device="cpu")
        self._file.read_into(stored.offset + _first(like), memoryview(data))
        flat = torch.frombuffer(data, dtype=torch.uint8).view(like.dtype)
        tensor = flat.as_strided(like.shape, like.stride())
        if like.is_conj():
            tensor = tensor.conj()
        return tensor._neg_view() if like.is_neg() else tensor

    def close(self) -> None:
        """Let go of the tensors, and close the file."""
        self._tensors, self._last = {}, ("", np.empty(0, np.uint8))
        self._file.close()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes lie in its storage as they are, one after the other."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _first(tensor: torch.Tensor) -> int:
    """Where in its storage a tensor begins, in bytes."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _reach(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if not tensor.numel():
        return 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _load(path: Path, file: FileSource) -> Mapping[str, torch.Tensor | _InFile]:
    import pickle

    try:
        import torch
    except ImportError:
        raise MissingDependency(
            f"`{path}` is a PyTorch state dict, and reading it needs torch",
            hint='run `pip install "tpde[torch]"`, or convert the file to safetensors',
        ) from None
    try:
        with (
            file.stream() as stream,
            warnings.catch_warnings(),
        ):  # of old protocols, which are read all the same
            warnings.simplefilter("ignore")
            members = _members(stream)
            stream.seek(0)
            if members is None:
                tensors = _tensors(path, torch.load(stream, map_location="cpu", weights_only=True))
            else:
                from torch._subclasses.fake_tensor import FakeTensorMode

                with FakeTensorMode():
                    loaded = torch.load(stream, weights_only=True)
                tensors = _tensors(path, loaded)
                stored = _located(tensors, members)
                if stored is not None:
                    return stored
                stream.seek(0)
                tensors = _tensors(path, torch.load(stream, map_location="cpu", weights_only=True))
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"asks for `{wanted[1]}`" if wanted else "is no state dict"
        if wanted and wanted[1].startswith(_PACKED):
            raise _of_packed_weights(path) from None
        raise UnsafePickle(
            f"`{path}` is a pickle that {what}, and code from files is never run",
            hint="convert it to safetensors where you trust it, and pack that",
            where=str(path),
        ) from None
    except (MemoryError, InvalidInput, UnsafePickle):
        raise
    except Exception as error:  # torch's unpickler lets through whatever it stumbles over in a damaged file
        frames = [it for it, _ in traceback.walk_tb(error.__traceback__)]
        called = [(str(it.f_globals.get("__name__")), it.f_code.co_name) for it in frames]
        if any(it.startswith(_PACKED) for it, _ in called):  # torch knows them once `tpde.nn` is imported
            raise _of_packed_weights(path) from None
        if any(it in _NOT_DENSE for _, it in called):
            raise not_dense(f"`{path}` holds a tensor that is", str(path)) from None
        raise InvalidInput(
            f"`{path}` is not a PyTorch state dict, or is damaged ({type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]:.200})",
            hint="fetch it again",
            where=str(path),
        ) from None
    return tensors


def _of_packed_weights(path: Path) -> UnsafePickle:
    """The error for what `torch.save` makes of a packed model's state dict."""
    return UnsafePickle(
        f"`{path}` is the state dict of a packed model, which is more than tensors",
        hint="load it into the model (after `import tpde.nn`), and call "
        "`tpde.torch.save_file(tpde.nn.plain_state_dict(model), DST)`",
        where=str(path),
    )


def _tensors(path: Path, loaded: object) -> dict[str, torch.Tensor]:
    """The tensors of what a file held, checked to be a state dict."""
    import torch

    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        other = next((it for it in loaded if it != "state_dict"), None)
        if other is not None:
            raise InvalidInput(
                f"`{path}` holds `{other!s:.200}` beside `state_dict`, and a packed file has tensors only",
                hint='save the weights alone, `torch.load(PATH)["state_dict"]`, and pack those; '
                "`tpde.CheckpointStore` keeps whole checkpoints",
                where=str(path),
            )
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict) or not loaded:
        kind = "tensor" if isinstance(loaded, torch.Tensor) else type(loaded).__name__  # not FakeTensor
        what = f"a {kind}, not a state dict" if not isinstance(loaded, dict) else "an empty state dict"
        raise InvalidInput(
            f"`{path}` holds {what}", hint="name a file that maps names to tensors", where=str(path)
        )
    try:
        check_texts(loaded, {})
    except ValueError as error:
        raise InvalidInput(
            f"`{path}`: {error}", hint="rename it; safetensors cannot hold it", where=str(path)
        ) from None
    for name, value in loaded.items():
        if not isinstance(value, torch.Tensor):
            raise InvalidInput(
                f"`{path}`: entry `{name!s:.200}` is a {type(value).__name__}",
                hint="a state dict maps names to tensors",
                where=str(path),
            )
        # Of old files tensors are made before their bytes come: of what the memory held, packed weights even.
        if type(value).__module__.startswith(_PACKED):
            raise _of_packed_weights(path)
        if value.layout is torch.strided and not value.is_nested:
            refuse_expanded(name, value.numel() * value.element_size(), _reach(value))
    return dict(loaded)


def _members(stream: BinaryIO) -> dict[int, int] | None:
    """Where a zip file's members lie, and their sizes; None if they are not the bytes as in memory.

    That is the case before PyTorch 1.6, of compressed members, and of numbers in another byte order.
    """
    found = dict[int, int]()
    try:
        with zipfile.ZipFile(stream) as archive:
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                    return None
                order = info.filename.rpartition("/")[2] == "byteorder"
                if order and archive.read(info) != sys.byteorder.encode():
                    return None
                stream.seek(info.header_offset)
                name, extra = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
                found[info.header_offset + _LOCAL_HEADER.size + name + extra] = info.file_size
    except (zipfile.BadZipFile, struct.error, NotImplementedError, ValueError):
        return None
    return found


def _located(tensors: dict[str, torch.Tensor], members: dict[int, int]) -> dict[str, _InFile] | None:
    """The tensors with the places of their bytes; None if one lies in no member, or not within."""
    stored = dict[str, _InFile]()
    for name, tensor in tensors.items():
        with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError):
            storage = tensor.untyped_storage()
            at = storage._checkpoint_offset
            if at is None:
                continue
            if _first(tensor) + _reach(tensor) <= min(storage.nbytes(), members.get(at, -1)):
                stored[name] = _InFile(tensor, at)
    return stored if len(stored) == len(tensors) else None
