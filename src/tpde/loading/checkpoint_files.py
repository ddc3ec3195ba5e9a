"""The packed tensors of a checkpoint's files: where they lie, and reading them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch
import xxhash

from tpde.codec.selection import MIN_BYTES
from tpde.cuda import prefix_kernels
from tpde.errors import Corrupt, NotPacked, NotSafetensors
from tpde.files.checked_reads import check_plain
from tpde.files.file_kinds import PICKLES
from tpde.files.packed_state import MAKE_PLAIN
from tpde.files.reader import PackedFile
from tpde.format.constants import SUFFIX
from tpde.format.container import TensorSpec
from tpde.frameworks import to_torch, torch_dtype, torch_shape
from tpde.io.sources import Extent
from tpde.loading.reading import read_extents, read_in_turn
from tpde.loading.runs import Run, decoded
from tpde.streaming.streamed_source import Streamed
from tpde.weights.pack_source import hold_raw, pack_sources
from tpde.weights.packed_tensor import PackedTensor
from tpde.weights.resident import Resident
from tpde.weights.source import Source

P = TypeVar("P", bound=Source)
T = TypeVar("T")

BF16_SHARE, OTHER_SHARE = 0.7, 0.9  # of plain bytes: what packed ones are taken to be before it is known
GROUP_BYTES = 256 << 20  # of plain tensors, that are there at a time
_PACK_IT = "run `tpde pack` on the directory, and name what that writes"
SMALL_BYTES = 1 << 20  # plain: reading and decoding on a GPU takes 2 ms whatever the size, the CPU less then


class Stored:
    """A tensor in a file that is packed, there or as it comes.

    Attributes
    ----------
    name : str
        As in the source, without the suffix.
    spec : TensorSpec
        Of the tensor.
    extent : Extent
        Where its blob lies, or its bytes.
    is_plain : bool
        It is plain in the file.
    """

    def __init__(self, file: PackedFile, name: str) -> None:
        self.name, self.spec, self._file = name, file.specs[name], file
        self.is_plain = name in file.container.entries
        entry = file.container.entries[name if self.is_plain else name + SUFFIX]
        at = file.container.data_start + entry.begin
        self.extent = Extent(file.source, at, entry.end - entry.begin, name)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, plain."""
        return self.spec.nbytes

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor."""
        return torch_dtype(self.spec.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        return torch_shape(self.spec)

    @property
    def run(self) -> Run[Stored]:
        """The tensor, as conversions take it."""
        return Run(self.shape, self.dtype, [self])

    @property
    def packed_bytes(self) -> int:
        """Bytes that it takes packed; an estimate if it is plain in the file."""
        if not self.is_plain:
            return self.extent.size
        return int(self.nbytes * (BF16_SHARE if self.dtype is torch.bfloat16 else OTHER_SHARE))

    @property
    def digest(self) -> bytes | None:
        """Hash of the tensor's bytes."""
        if self.is_plain:
            return xxhash.xxh3_128_digest(self._file.read(self.name).data)
        return self._file.tensor(self.name).digest

    def plain(self, data: torch.Tensor) -> torch.Tensor:
        """The tensor that bytes are which were read, if it is plain in the file."""
        return data.view(self.dtype).view(self.shape)

    def checked(self, packed: P) -> P:
        """The tensor itself, opened, if it is what the file's header says.

        Raises
        ------
        Corrupt
            If it is not.
        """
        found = packed.header.spec
        if found != self.spec:
            raise Corrupt(
                f"tensor `{self.name}` is {found.dtype} {list(found.shape)}, but {self.spec.dtype} "
                f"{list(self.spec.shape)} in the header of `{self.extent.source.name}`",
                hint="the file is damaged, fetch it again",
                where=self.extent.source.name,
                tensor=self.name,
            )
        return packed


def in_groups(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Things one after the other, of up to 256 MiB of plain bytes together, or one."""
    group: list[T] = []
    size = 0
    for it in items:
        if group and size + size_of(it) > GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(it)
        size += size_of(it)
    if group:
        yield group


def _may_pack(spec: TensorSpec) -> bool:
    return spec.nbytes >= MIN_BYTES and torch_dtype(spec.dtype).is_floating_point


class Checkpoint:
    """The files of a checkpoint, some of whose tensors are packed.

    Parameters
    ----------
    files : iterable of path-like
        Safetensors files.
    pack : bool
        Pack plain tensors as they come: those of floating point, unless they are small. Where any file is
        packed, this does nothing: plain tensors stay plain.

    Attributes
    ----------
    packed : dict of str to Stored
        Tensors by their names in the source that are packed, or become so.
    plain : dict of str to TensorSpec
        The other tensors.
    is_packed : bool
        A file is packed: all of `packed` are packed there. Else all of them are plain there.

    Raises
    ------
    NotPacked, NotSafetensors
        If a file is no safetensors file; the latter with `pack`.
    Truncated, Corrupt, UnsupportedVersion, InvalidInput
        If a file cannot be read.
    """

    def __init__(self, files: Iterable[str | os.PathLike[str]], *, pack: bool = False) -> None:
        self._files: list[PackedFile] = []
        self._pack = pack
        self.packed: dict[str, Stored] = {}
        self.plain: dict[str, TensorSpec] = {}
        self.is_packed = False
        try:
            for path in files:
                self._files.append(self._open(os.fspath(path)))
            self.is_packed = any(file.is_packed for file in self._files)
            for file in self._files:
                self._list(file)
        except BaseException:
            self.close()
            raise

    def _open(self, path: str) -> PackedFile:
        try:
            return PackedFile(path)
        except NotSafetensors as error:
            kind, hint = (NotSafetensors, _PACK_IT) if self._pack else (NotPacked, MAKE_PLAIN)
            if Path(path).suffix not in PICKLES:
                hint = "fetch it again"
            raise kind(error.message, hint=hint, where=error.where) from None

    def _list(self, file: PackedFile) -> None:
        names, path = file.packed_names(), file.source.name
        if self._pack and not self.is_packed:
            names = [name for name, spec in file.specs.items() if _may_pack(spec)]
        stored = {name: Stored(file, name) for name in names}
        plain = {name: spec for name, spec in file.specs.items() if name not in stored}
        for name in (*stored, *plain):
            if name in self.packed or name in self.plain:
                raise Corrupt(
                    f"`{path}`: tensor `{name}` is in another file too",
                    hint="fetch the model again",
                    where=path,
                    tensor=name,
                )
        self.packed.update(stored)
        self.plain.update(plain)

    def read(self, stored: Sequence[Stored], device: torch.device) -> list[Source]:
        """Read blobs to a device.

        Raises
        ------
        Truncated, Corrupt, UnsupportedVersion
            If a blob's header, tables or index map are damaged. Chunks are checked when they are decoded.
        OutOfMemory
            If they do not fit.
        """
        opened: dict[Stored, Source] = {}
        packed = [it for it in stored if not it.is_plain]
        if device.type == "cuda":
            number = torch.cuda.current_device() if device.index is None else device.index
            for dtype, packing in {(it.spec.dtype, it.is_plain) for it in stored}:
                prefix_kernels.compile_ahead(dtype, number, packing=packing)

        def use(i: int, blob: torch.Tensor) -> None:
            opened[packed[i]] = packed[i].checked(Resident(blob, packed[i].name))

        read_extents([it.extent for it in packed], device, use)
        self._read_plain([it for it in stored if it.is_plain], device, opened)
        return [opened[it] for it in stored]

    def _read_plain(
        self, stored: Sequence[Stored], device: torch.device, opened: dict[Stored, Source]
    ) -> None:
        """Read plain tensors, some at a time, and pack them."""
        groups = list(in_groups(stored, lambda it: it.nbytes))
        coming = iter(groups)

        def use(read: Sequence[torch.Tensor]) -> None:
            group = next(coming)
            tensors = [(it.name, it.plain(data)) for it, data in zip(group, read, strict=True)]
            for it, (name, tensor), made in zip(group, tensors, pack_sources(tensors), strict=True):
                opened[it] = hold_raw(tensor, name) if made is None else made

        read_in_turn(([it.extent for it in group] for group in groups), device, use)

    def open(
        self, runs: Mapping[str, Run[Stored]], where: Mapping[str, torch.device]
    ) -> dict[str, PackedTensor]:
        """Read the blobs of some parameters, each to its device: gives the packed weight of each.

        Raises
        ------
        Truncated, Corrupt, UnsupportedVersion, OutOfMemory
            As `read`.
        """
        wanted: dict[torch.device, dict[str, Stored]] = {}
        for name, run in runs.items():
            wanted.setdefault(where[name], {}).update({part.name: part for part in run.parts})
        found = {
            device: dict(zip(stored, self.read(list(stored.values()), device), strict=True))
            for device, stored in wanted.items()
        }
        return {name: run.opened(found[where[name]]) for name, run in runs.items()}

    def open_in_turn(
        self,
        groups: Iterable[Sequence[Stored]],
        device: torch.device,
        make: Callable[[Sequence[Stored], Sequence[torch.Tensor]], Sequence[Source]],
    ) -> dict[str, Source]:
        """Read tensors, group by group, to one device.

        Parameters
        ----------
        groups : iterable of sequence of Stored
            What is read is there for one group at a time, where `make` keeps nothing.
        device : torch.device
            Where they go.
        make : callable
            Called with a group and the bytes that were read of each; gives their sources.

        Returns
        -------
        dict of str to Source
            By their names.

        Raises
        ------
        Truncated, Corrupt, UnsupportedVersion, OutOfMemory
            As `read`.
        """
        made: dict[str, Source] = {}
        listed = [list(group) for group in groups]
        coming = iter(listed)

        def use(read: Sequence[torch.Tensor]) -> None:
            group = next(coming)
            made.update(zip((it.name for it in group), make(group, read), strict=True))

        read_in_turn(([it.extent for it in group] for group in listed), device, use)
        return made

    def decode(
        self, runs: Sequence[Run[Stored]], device: torch.device, dtype: torch.dtype | None = None
    ) -> list[torch.Tensor]:
        """Runs as plain tensors on a device: see `tpde.loading.runs.decoded`.

        A large blob is read to a GPU, and decoded there; for the CPU, it is decoded as it is read.
        """

        def opened(stored: Stored) -> Source:
            if device.type == "cpu" or stored.nbytes <= SMALL_BYTES:
                return stored.checked(Streamed(stored.extent, None, torch.device("cpu"), None))
            return self.read([stored], device)[0]

        return decoded(runs, device, opened, dtype)

    def check_plain(self, names: Iterable[str]) -> None:
        """Check tensors that are stored plain, which the library that loads the model reads by itself.

        Raises
        ------
        Corrupt
            Naming the first that is not what was packed.
        """
        wanted = set(names)
        for file in self._files:
            check_plain(file, wanted.intersection(file.specs))

    def plain_tensor(self, name: str, device: torch.device) -> torch.Tensor:
        """Read a tensor that is stored plain to a device."""
        file = next(it for it in self._files if name in it.specs)
        return to_torch(file.read(name), self.plain[name]).to(device)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()
        self._files = []

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
