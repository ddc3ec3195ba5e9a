"""What deltas make of packed weights: checked against the bases at hand, and brought to their devices."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from tpde.codec.delta import Sparse
from tpde.codec.fingerprints import fingerprint
from tpde.codec.native import Bytes
from tpde.errors import InvalidArgument, InvalidInput, MissingBase, PackedWeight
from tpde.files.thread_count import default_threads
from tpde.format.container import TensorSpec
from tpde.format.delta_head import SPARSE, WITH_BASE, TensorEntry
from tpde.frameworks import to_torch, torch_bytes, torch_dtype
from tpde.io.sources import BytesSource, FileSource
from tpde.store.delta_file import DeltaFile, existing_delta
from tpde.store.delta_state import other_base
from tpde.store.device_deltas import is_resident
from tpde.store.device_update import SparseChange, SparseChanges
from tpde.weights.changed import Variant
from tpde.weights.coded import CodedChange, Coding
from tpde.weights.pack_source import pack_source
from tpde.weights.packed_tensor import PackedTensor
from tpde.weights.source import Source, decoded

# Of a tensor's bytes, what a sparse change may take: with more, some 30 % of words of bf16, the weight as a
# whole, at 0.67, is decoded in far less time than what changed.
SPARSE_SHARE = 1 / 4

DeltaLike = bytes | str | os.PathLike[str]


class Delta:
    """A delta whose tensors become variants of a model's.

    Parameters
    ----------
    data : bytes or path-like
        The delta: as `tpde.make_delta` gives it, or a file that `tpde diff` wrote.

    Raises
    ------
    InvalidInput
        If it is no delta (`InvalidArgument` where it can be none), or has two tensors of one name.
    Truncated, Corrupt, UnsupportedVersion
        If it is damaged, or newer than this version.

    Attributes
    ----------
    file : DeltaFile
        What is in it.
    entries : dict of str to TensorEntry
        Its tensors by their names.
    """

    def __init__(self, data: DeltaLike) -> None:
        if isinstance(data, (bytes, bytearray, memoryview)):
            self.file = DeltaFile(BytesSource(data, "<delta>"))
        elif isinstance(data, (str, os.PathLike)):
            self.file = DeltaFile(FileSource(existing_delta(data)))
        else:
            raise InvalidArgument(
                f"a delta is bytes or the path of a file, not a `{type(data).__name__}`",
                hint="pass what `tpde.make_delta(old, new)` gives, or a file that `tpde diff` wrote",
                where="delta",
            )
        try:
            self.entries: dict[str, TensorEntry] = self.file.by_name()
        except InvalidInput:
            self.close()
            raise
        self._codings = [Coding(it) for it in self.file.models]

    @property
    def name(self) -> str:
        """What errors call it."""
        return self.file.name

    def entry(self, name: str, spec: TensorSpec, base: str) -> TensorEntry | None:
        """What it has of a tensor of `base`, of this dtype and shape; None if it has none of that name.

        Raises
        ------
        MissingBase
            If it has one of another dtype or shape.
        """
        found = self.entries.get(name)
        if found is not None and found.spec != spec:
            raise MissingBase(
                f"tensor `{name}` is {spec.dtype} {list(spec.shape)} in `{base}`, and {found.spec.dtype} "
                f"{list(found.spec.shape)} in `{self.name}`",
                hint="name a delta of a model of the same shapes",
                where=name,
                found=spec,
                needed=found.spec,
            )
        return found

    def target(self, it: TensorEntry, old: Bytes, base: str) -> Bytes | None:
        """A tensor's bytes as the delta has them, checked; None if that is what they are.

        Raises
        ------
        MissingBase
            If `old`, of the tensor in `base`, is not what the delta was made from.
        Corrupt
            If the delta is damaged.
        """
        found = fingerprint(old)
        self._require(it, found, base)
        if found == it.target:
            return None
        return self.file.target_of(it, old.copy() if it.codec in WITH_BASE else None, default_threads())

    def _require(self, it: TensorEntry, found: bytes, base: str) -> None:
        if it.codec in WITH_BASE and found not in (it.base, it.target):
            raise other_base(it, base, self.name, found)

    def variant(self, it: TensorEntry, source: Source, plain: Tensor, base: str) -> Variant | None:
        """What the delta makes of a source; None if nothing changes.

        Parameters
        ----------
        it : TensorEntry
            What it has of it.
        source : Source
            The source.
        plain : torch.Tensor
            The source, decoded on its device: uint8, in memory of its own.
        base : str
            What errors call that which has the source.

        Raises
        ------
        MissingBase, Corrupt
            As `target`.
        PackedWeight
            If most of it changes, and what it becomes does not shrink.
        """
        if it.codec == SPARSE and it.size <= it.spec.nbytes * SPARSE_SHARE:
            data = self.file.payload(it)
            if self._checked_there(it, plain, data, base) or self._checked_here(it, plain, base):
                change = CodedChange.on(
                    plain.device, self._codings[it.model], Sparse(data, it.changes, it.sizes)
                )
                return Variant(source, (change,))
            return None
        new = self.target(it, _on_host(plain), base)
        if new is None:
            return None
        made = pack_source(to_torch(new, it.spec), source.name)
        if made is None:
            raise PackedWeight(
                f"`{source.name}` becomes another in `{self.name}`, which does not shrink: it cannot be kept "
                "beside its base",
                hint="write it with `tpde patch`, pack it, and load it as a model of its own",
                where=source.name,
            )
        made.apply(lambda blob: blob.to(plain.device))
        return Variant(made)

    def _checked_there(self, it: TensorEntry, plain: Tensor, data: Bytes, base: str) -> bool:
        """Whether a change is one, checked by kernels; False also where there are none."""
        if not is_resident(plain):
            return False
        change = SparseChange(it, plain.view(torch_dtype(it.spec.dtype)))
        model = self.file.models[it.model]
        made = SparseChanges([change], model, lambda _, out: np.copyto(out, data))
        found = made.found.get(it.name)
        if found is None:
            return False
        self._require(it, found.fingerprint, base)
        return found.fingerprint == it.base and not found.damaged

    def _checked_here(self, it: TensorEntry, plain: Tensor, base: str) -> bool:
        """The same, checked by the core."""
        return self.target(it, _on_host(plain), base) is not None

    def close(self) -> None:
        """Close its file."""
        self.file.close()


def _on_host(plain: Tensor) -> Bytes:
    return cast(Bytes, plain.cpu().numpy())


def entries_of(
    names: Sequence[str], spec: TensorSpec, deltas: Mapping[str, Delta], base: str
) -> dict[str, TensorEntry]:
    """What deltas have of one tensor of `base`, by the deltas' names.

    Parameters
    ----------
    names : sequence of str
        All that the tensor is called, if it is tied.
    spec : TensorSpec
        Its dtype and shape.
    deltas : mapping of str to Delta
        By their names.
    base : str
        What errors call that which has the tensor.

    Raises
    ------
    MissingBase
        If one has it with another dtype or shape.
    InvalidInput
        If one makes different tensors of what is tied.
    """
    found: dict[str, TensorEntry] = {}
    for name, delta in deltas.items():
        for it in (delta.entry(called, spec, base) for called in names):
            if it is not None and found.setdefault(name, it).target != it.target:
                raise InvalidInput(
                    f"`{found[name].name}` and `{it.name}` are one weight of the model, and two in "
                    f"`{delta.name}`",
                    hint="untie them in the base first",
                    where=it.name,
                )
    return found


def variants_of(
    source: Source, entries: Mapping[str, TensorEntry], deltas: Mapping[str, Delta], base: str
) -> dict[str, Variant]:
    """What deltas make of a source, by their names; those that leave it as it is are not among them.

    Parameters
    ----------
    source : Source
        The base.
    entries : mapping of str to TensorEntry
        What deltas have of it, by their names.
    deltas : mapping of str to Delta
        By their names.
    base : str
        What errors call that which has the source.

    Raises
    ------
    MissingBase, Corrupt, PackedWeight
        See `Delta.variant`.
    """
    if not entries:
        return {}
    plain = decoded(source).view(-1).view(torch.uint8)
    made = {name: deltas[name].variant(it, source, plain, base) for name, it in entries.items()}
    return {name: it for name, it in made.items() if it is not None}


def values_of(
    tensor: Tensor, entries: Mapping[str, TensorEntry], deltas: Mapping[str, Delta], base: str
) -> dict[str, Tensor]:
    """What deltas make of a plain tensor, on its device: as `variants_of`."""
    if not entries:
        return {}
    old = torch_bytes(tensor.detach())
    made = {name: (it, deltas[name].target(it, old, base)) for name, it in entries.items()}
    return {
        name: to_torch(new, it.spec).to(tensor.device) for name, (it, new) in made.items() if new is not None
    }


def only_source(packed: PackedTensor, name: str) -> Source:
    """The source of a weight that is made of one, as deltas of live tensors take it.

    Raises
    ------
    PackedWeight
        If it is made of several.
    """
    if len(packed.parts) > 1:
        raise PackedWeight(
            f"`{name}` is made of {len(packed.parts)} tensors, and a delta has it as one",
            hint="give deltas of the files that the model is loaded from to `tpde.from_pretrained`",
            where=name,
        )
    return packed.sources[0]
