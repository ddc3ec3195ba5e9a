"""Deltas of live tensors: what changed between two states in memory, as bytes, and applied where they lie."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from tpde.codec.delta import fingerprint
from tpde.codec.native import Bytes
from tpde.errors import InvalidInput, NativeError
from tpde.format.container import TensorSpec
from tpde.format.delta import SPARSE, WITH_BASE, TensorEntry
from tpde.format.sink import PiecesSink
from tpde.format.source import BytesSource, FileSource
from tpde.frameworks import refuse_expanded, to_torch, torch_bytes, torch_spec
from tpde.packing.files import Progress, no_progress
from tpde.packing.writer import check_threads
from tpde.store.delta import DeltaFile, open_state, other_base
from tpde.store.device import (
    Decoded,
    DeviceComparer,
    SparseChange,
    SparseChanges,
    fingerprints,
    is_resident,
)
from tpde.store.diff import Comparer, HostComparer, write_delta
from tpde.store.states import MEMORY, BaseTensors, FilesState, MemoryState, State

if TYPE_CHECKING:
    import torch

    Live = torch.nn.Module | Mapping[str, torch.Tensor]

__all__ = ["apply_delta", "make_delta"]


class _Tensors(NamedTuple):
    """Live tensors by name, and what they are."""

    tensors: dict[str, torch.Tensor]
    specs: dict[str, TensorSpec]

    def read(self, name: str) -> Bytes:
        """The bytes of a tensor."""
        return torch_bytes(self.tensors[name])

    def state(self, like: MemoryState | None = None) -> MemoryState:
        """They as a state. `like` is one that may be of the same names, dtypes and shapes."""
        if like is not None and like.is_of(self.specs):
            return like.of(self.read)
        return MemoryState(self.specs, self.read)


def _tensors(state: Live, what: str) -> _Tensors:
    """The tensors of a module or a state dict; none of them packed."""
    import torch

    found: Any = state.state_dict(keep_vars=True) if isinstance(state, torch.nn.Module) else state
    if not isinstance(found, Mapping):
        raise InvalidInput(
            f"{what} is a {type(found).__name__}", hint="pass a module, or a mapping of names to tensors"
        )
    specs = {}
    for name, tensor in found.items():
        specs[name] = spec = torch_spec(name, tensor)
        if not _has_bytes(tensor):
            raise InvalidInput(
                f"`{name}` is a {type(tensor).__name__}, which has no plain bytes in memory",
                hint="call `tpde.unpack_module(model)` first if it is packed",
                where=name,
            )
        refuse_expanded(name, spec.nbytes, tensor.untyped_storage().nbytes())
    return _Tensors(dict(found), specs)


def _has_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of PyTorch's own: subclasses may hold anything."""
    import torch

    return type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def make_delta(
    old: Live | bytes | str | os.PathLike[str],
    new: Live,
    *,
    fast: bool = False,
    threads: int | None = None,
    progress: Progress = no_progress,
) -> bytes:
    """Tell what changed between two states of a model's tensors.

    Tensors that lie on a GPU in both states are compared there, if `tpde[cuda]` is installed, and few changes
    of floats are coded there; others are copied to the CPU one by one. The delta does not depend on it.

    Parameters
    ----------
    old : nn.Module, mapping of str to torch.Tensor, bytes, or path-like
        The base, which must not be the same memory: clones, or what `tpde.torch.save` returned or
        `tpde.torch.save_file` wrote of them, which is smaller.
    new : nn.Module or mapping of str to torch.Tensor
        The target. It may hold a part of the tensors: the delta is of that part.
    fast : bool
        Code positions without the base's exponents: the delta is larger, and faster to make and to apply.
    threads : int, optional
        By default one for each processor. The delta does not depend on it.
    progress : callable
        Called with a number of bytes of the target when they are done.

    Returns
    -------
    bytes
        A delta file (docs/delta.md) of one nameless file of the target's tensors.

    Raises
    ------
    InvalidInput
        If a state cannot be read, a tensor is packed, or both states are the same memory.
    UnsupportedDtype
        If safetensors has no name for a dtype.

    Examples
    --------
    >>> import torch
    >>> from tpde import apply_delta, make_delta
    >>> old = {"weight": torch.zeros(1000)}
    >>> new = {"weight": torch.zeros(1000).index_fill_(0, torch.tensor([7]), 1.0)}
    >>> delta = make_delta(old, new)
    >>> apply_delta(old, delta)
    1
    >>> torch.equal(old["weight"], new["weight"])
    True
    """
    count, after = check_threads(threads), _tensors(new, "`new`")
    sink = PiecesSink()
    base: State
    target = after.state()
    before: Mapping[str, torch.Tensor] = {}
    if isinstance(old, (str, os.PathLike)):
        base = open_state(Path(old))
    elif isinstance(old, bytes):
        base = FilesState(old)
    else:
        held = _tensors(old, "`old`")
        before = held.tensors
        _refuse_one_memory(before, after.tensors)
        base = held.state(target)
    try:
        comparer = _comparer(HostComparer(base, target, count), before, after)
        write_delta(
            base, target, sink, hint=None, fast=fast, comparer=comparer, threads=count, progress=progress
        )
    finally:
        base.close()
    return sink.join()


def _comparer(host: HostComparer, before: Mapping[str, torch.Tensor], after: _Tensors) -> Comparer:
    """What compares two states: on the GPU what lies there in both."""
    pairs = {
        name: (before[name], new)
        for name, new in after.tensors.items()
        if name in before
        and (before[name].device, before[name].dtype, before[name].shape)
        == (new.device, new.dtype, new.shape)
        and is_resident(before[name])
        and is_resident(new)
    }
    return DeviceComparer(host, pairs, after.specs) if pairs else host


def _refuse_one_memory(old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> None:
    """Refuse two states that are the same tensors: the delta would say that nothing changed."""
    both = [name for name in new if name in old and new[name].numel()]
    if both and all(old[name].data_ptr() == new[name].data_ptr() for name in both):
        raise InvalidInput(
            f"`old` and `new` are the same tensors, such as `{both[0]}`: nothing would have changed",
            hint="clone the tensors before they change, or save them with `tpde.torch.save_file`",
            where=both[0],
        )


class _Change(NamedTuple):
    """A tensor of a delta, where it lies, and the target's bytes if they must be written."""

    entry: TensorEntry
    tensor: torch.Tensor
    data: Bytes | None


def apply_delta(
    state: Live,
    delta: bytes | str | os.PathLike[str],
    *,
    threads: int | None = None,
    progress: Progress = no_progress,
) -> int:
    """Turn live tensors from a delta's base into its target, where they lie.

    Everything is made and checked before the first tensor is written. A tensor that is the target's already
    is left as it is, so a delta may be applied twice, or again after Ctrl-C. Files of the delta that hold no
    weights are passed over.

    Parameters
    ----------
    state : nn.Module or mapping of str to torch.Tensor
        What holds the base. It may have more tensors than the delta.
    delta : bytes or path-like
        As `make_delta` gives it, or a file that `tpde diff` wrote.
    threads : int, optional
        By default one for each processor.
    progress : callable
        Called with a number of bytes of the target when they are done.

    Returns
    -------
    int
        How many tensors were written.

    Raises
    ------
    MissingBase
        If a tensor is neither the base's nor the target's, or not there: it is named, nothing was changed.
    InvalidInput
        If a tensor cannot be written where it lies, two tensors share memory and would differ, or it is no
        delta.
    Truncated, Corrupt, UnsupportedVersion
        If the delta is damaged, or newer than this version.

    Notes
    -----
    Tensors that lie on a GPU are checked there, if `tpde[cuda]` is installed, and sparse changes of
    contiguous ones that share their memory with no other are made there; what else there is passes through
    the CPU.

    Memory: what the changed tensors take, and one tensor more; where several share memory, that once more.
    """
    count, (tensors, specs) = check_threads(threads), _tensors(state, "`state`")
    source = BytesSource(delta, "<delta>") if isinstance(delta, (bytes, bytearray, memoryview)) else None
    file = DeltaFile(source or FileSource(cast("Any", delta)))
    try:
        _require_places(file, tensors, specs)
        resident = _resident(file, tensors)
        sparse = _decoding(file, resident)
        decoded = {name: it for changes in sparse for name, it in changes.found.items()}
        prints = fingerprints({name: it for name, it in resident.items() if name not in decoded})
        prints |= {name: it.fingerprint for name, it in decoded.items()}
        done = set(_ready(file, tensors, decoded, count))
        found = list(_changes(file, tensors, prints, done, count, progress))
    finally:
        file.close()
    _refuse_conflicts(found, file.name)
    changes = [it for it in found if it.data is not None]
    for it in changes:
        _write(it.tensor, it)
    for group in sparse:
        group.write(done)
    return len(changes) + len(done)


def _require_places(
    file: DeltaFile, tensors: Mapping[str, torch.Tensor], specs: Mapping[str, TensorSpec]
) -> None:
    """Check that there is a tensor for each of a delta, which can be written."""
    names: set[str] = set()
    bases = BaseTensors({("", name): spec for name, spec in specs.items()}, MEMORY)
    for it in file.head.tensors:
        if it.name in names:
            raise InvalidInput(
                f"`{file.name}` has `{it.name}` in two files; live tensors have no files",
                hint="take a delta of one model's files alone",
                where=it.name,
            )
        names.add(it.name)
        bases.need(("", it.name), it.spec)
        _require_writable(it.name, tensors[it.name])


def _resident(file: DeltaFile, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a delta that lie on a GPU, each in memory of its own."""
    mine = {it.name: tensors[it.name] for it in file.head.tensors}
    users = Counter((it.device, it.untyped_storage().data_ptr()) for it in mine.values() if it.numel())
    return {
        name: it
        for name, it in mine.items()
        if is_resident(it) and users[it.device, it.untyped_storage().data_ptr()] == 1
    }


def _decoding(file: DeltaFile, resident: Mapping[str, torch.Tensor]) -> list[SparseChanges]:
    """The sparse changes of tensors on GPUs, on their way."""
    groups: dict[tuple[torch.device, int], list[SparseChange]] = {}
    for it in file.head.tensors:
        if it.codec == SPARSE and it.name in resident:
            change = SparseChange(it, resident[it.name])
            groups.setdefault((change.tensor.device, it.model), []).append(change)
    return [
        SparseChanges(members, file.models[number], file.read_payloads)
        for (_, number), members in groups.items()
    ]


def _ready(
    file: DeltaFile, tensors: Mapping[str, torch.Tensor], decoded: Mapping[str, Decoded], threads: int
) -> Iterator[str]:
    """Names of the tensors that are bases of what was decoded, and can be written."""
    for it in file.head.tensors:
        found = decoded.get(it.name)
        if found is None or found.fingerprint == it.target:
            continue
        if found.fingerprint != it.base:
            raise other_base(it, MEMORY, file.name, found.fingerprint)
        if found.damaged:
            file.target_of(it, torch_bytes(tensors[it.name]).copy(), threads)  # which says what is wrong
            raise NativeError(f"the GPU has made another tensor `{it.name}` than the CPU")
        yield it.name


def _changes(
    file: DeltaFile,
    tensors: Mapping[str, torch.Tensor],
    prints: Mapping[str, bytes],
    done: set[str],
    threads: int,
    progress: Progress,
) -> Iterator[_Change]:
    """All tensors of a delta, with what must be written beside what is `done`."""
    for it in file.head.tensors:
        tensor, data, old = tensors[it.name], None, None
        found = prints.get(it.name)
        if found is None:
            old = torch_bytes(tensor)
            found = fingerprint(old)
        if found != it.target and it.name not in done:
            if it.codec in WITH_BASE and found != it.base:
                raise other_base(it, MEMORY, file.name, found)
            if it.codec in WITH_BASE:
                old = torch_bytes(tensor).copy() if old is None else old.copy()
            data = file.target_of(it, old if it.codec in WITH_BASE else None, threads)
        progress(it.spec.nbytes)
        yield _Change(it, tensor, data)


def _require_writable(name: str, tensor: torch.Tensor) -> None:
    """Refuse a view that cannot be written where it lies."""
    if tensor.is_contiguous():
        repeats = False
    else:
        repeats = any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    if repeats or tensor.is_conj() or tensor.is_neg():
        raise InvalidInput(
            f"tensor `{name}` is a view that cannot be written where it lies; nothing was changed",
            hint="`.clone()` it first",
            where=name,
        )


def _refuse_conflicts(changes: list[_Change], delta: str) -> None:
    """Refuse tensors that share memory and would miss their targets: tried in a copy of that memory."""
    import torch

    shared: dict[tuple[object, int], list[_Change]] = {}
    for it in changes:
        if it.tensor.numel():
            place = it.tensor.device, it.tensor.untyped_storage().data_ptr()
            shared.setdefault(place, []).append(it)
    for group in shared.values():
        if len(group) == 1 or all(it.data is None for it in group):
            continue
        storage = group[0].tensor.untyped_storage()
        own = torch.empty(0, dtype=torch.uint8, device=storage.device)
        with torch.inference_mode(False), torch.no_grad():
            copy = own.set_(storage).to("cpu", copy=True).untyped_storage()
            views = [
                torch.empty(0, dtype=it.tensor.dtype).set_(
                    copy, it.tensor.storage_offset(), it.tensor.shape, it.tensor.stride()
                )
                for it in group
            ]
        for view, it in zip(views, group, strict=True):
            _write(view, it)
        for view, it in zip(views, group, strict=True):
            if fingerprint(torch_bytes(view)) != it.entry.target:
                raise InvalidInput(
                    f"`{it.entry.name}` shares memory with other tensors, and `{delta}` makes them differ; "
                    "nothing was changed",
                    hint="untie them first",
                    where=it.entry.name,
                )


def _write(tensor: torch.Tensor, it: _Change) -> None:
    """Write a tensor's bytes where it lies; PyTorch counts it as a change in place."""
    import torch

    if it.data is None:
        return
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        own = tensor.detach()
        if own.is_contiguous():  # as bytes: whatever they are, they are not normalized
            own = own.as_strided((own.numel(),), (1,)).view(torch.uint8)
            own.copy_(torch.from_numpy(np.ascontiguousarray(it.data)))
        else:
            own.copy_(to_torch(it.data, it.entry.spec))
