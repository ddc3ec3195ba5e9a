"""The packed tensors of a checkpoint's files: where they lie, and reading them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch

from tpde.errors import Corrupt, NotPacked, NotSafetensors
from tpde.format.constants import SUFFIX
from tpde.format.container import TensorSpec
from tpde.format.source import Extent
from tpde.frameworks import to_torch, torch_dtype, torch_shape
from tpde.integrations.reading import read_extents, read_in_turn
from tpde.integrations.runs import Run, decoded
from tpde.packing.names import PICKLES
from tpde.packing.reader import PackedFile
from tpde.packing.weights import MAKE_PLAIN
from tpde.streaming.tensor import Streamed
from tpde.weights.resident import Resident
from tpde.weights.source import Source
from tpde.weights.tensor import PackedTensor

P = TypeVar("P", bound=Source)

SMALL_BYTES = 1 << 20  # plain: reading and decoding on a GPU takes 2 ms whatever the size, the CPU less then


class Stored:
    """A packed tensor in a file.

    Attributes
    ----------
    name : str
        As in the source, without the suffix.
    spec : TensorSpec
        Of the tensor.
    extent : Extent
        Where its blob lies.
    """

    def __init__(self, file: PackedFile, name: str) -> None:
        self.name, self.spec, self._file = name, file.specs[name], file
        entry = file.container.entries[name + SUFFIX]
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
    def digest(self) -> bytes | None:
        """Hash of the tensor's bytes."""
        return self._file.tensor(self.name).digest

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


class Checkpoint:
    """The files of a checkpoint, some of whose tensors are packed.

    Parameters
    ----------
    files : iterable of path-like
        Safetensors files.

    Attributes
    ----------
    packed : dict of str to Stored
        Packed tensors by their names in the source.
    plain : dict of str to TensorSpec
        The other tensors.

    Raises
    ------
    NotPacked
        If no tensor is packed.
    Truncated, Corrupt, UnsupportedVersion, InvalidInput
        If a file cannot be read.
    """

    def __init__(self, files: Iterable[str | os.PathLike[str]]) -> None:
        self._files: list[PackedFile] = []
        self.packed: dict[str, Stored] = {}
        self.plain: dict[str, TensorSpec] = {}
        self.is_packed = False
        try:
            for path in files:
                self._open(os.fspath(path))
        except BaseException:
            self.close()
            raise

    def _open(self, path: str) -> None:
        try:
            file = PackedFile(path)
        except NotSafetensors as error:
            raise NotPacked(
                error.message,
                hint=MAKE_PLAIN if Path(path).suffix in PICKLES else "fetch it again",
                where=error.where,
            ) from None
        self._files.append(file)
        self.is_packed |= file.is_packed
        stored = {name: Stored(file, name) for name in file.packed_names()}
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
        opened: dict[int, Source] = {}

        def use(i: int, blob: torch.Tensor) -> None:
            opened[i] = stored[i].checked(Resident(blob, stored[i].name))

        read_extents([it.extent for it in stored], device, use)
        return [opened[i] for i in range(len(stored))]

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
        groups: Iterable[Sequence[str]],
        runs: Mapping[str, Run[Stored]],
        device: torch.device,
        settle: Callable[[PackedTensor], None],
    ) -> dict[str, PackedTensor]:
        """Read the blobs of parameters that are made of one each, group by group, to one device.

        Parameters
        ----------
        groups : iterable of sequence of str
            Names of parameters. Blobs are there for one group at a time, where `settle` has no more of them.
        runs : mapping of str to Run
            Their runs.
        device : torch.device
            Where they go.
        settle : callable
            Called with the packed weight of each, which it may give other sources.

        Raises
        ------
        Truncated, Corrupt, UnsupportedVersion, OutOfMemory
            As `read`.
        """
        made: dict[str, PackedTensor] = {}
        listed = [list(group) for group in groups]
        coming = iter(listed)

        def use(blobs: Sequence[torch.Tensor]) -> None:
            for name, blob in zip(next(coming), blobs, strict=True):
                part = runs[name].parts[0]
                made[name] = runs[name].opened({part.name: part.checked(Resident(blob, part.name))})
                settle(made[name])

        extents = ([runs[name].parts[0].extent for name in group] for group in listed)
        read_in_turn(extents, device, use)
        return made

    def decode(
        self, runs: Sequence[Run[Stored]], device: torch.device, dtype: torch.dtype | None = None
    ) -> list[torch.Tensor]:
        """Runs as plain tensors on a device: see `tpde.integrations.runs.decoded`.

        A large blob is read to a GPU, and decoded there; for the CPU, it is decoded as it is read.
        """

        def opened(stored: Stored) -> Source:
            if device.type == "cpu" or stored.nbytes <= SMALL_BYTES:
                return stored.checked(Streamed(stored.extent, None, torch.device("cpu"), None))
            return self.read([stored], device)[0]

        return decoded(runs, device, opened, dtype)

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
