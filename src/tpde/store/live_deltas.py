"""Deltas of live tensors: what changed between two states in memory, as bytes, and applied where they lie."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tpde.codec.delta import Listed, Sparse
from tpde.codec.fingerprints import fingerprint
from tpde.codec.native import Bytes
from tpde.errors import Corrupt, InvalidInput, NativeError
from tpde.files.single_file import Progress, no_progress
from tpde.files.writer import check_threads
from tpde.format.container import TensorSpec
from tpde.format.delta_head import SAME, SPARSE, WITH_BASE, TensorEntry
from tpde.frameworks import refuse_expanded, to_torch, torch_bytes, torch_spec
from tpde.io.sinks import ValueSink
from tpde.store.delta_state import DeltaFile, open_state, other_base
from tpde.store.delta_writer import Comparer, HostComparer, write_delta
from tpde.store.device_deltas import fingerprints, has_words, is_resident
from tpde.store.device_diff import DeviceComparer
from tpde.store.device_update import FoundState, SparseChange, SparseChanges
from tpde.store.states import MEMORY, BaseTensors, FilesState, MemoryState, State

if TYPE_CHECKING:
    import torch

    Live = torch.nn.Module | Mapping[str, torch.Tensor]

__all__ = ["Update", "make_delta", "plain_tensors"]


class Tensors(NamedTuple):
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


def plain_tensors(state: Live, what: str) -> Tensors:
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
    return Tensors(dict(found), specs)


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
    count, after = check_threads(threads), plain_tensors(new, "`new`")
    sink = ValueSink()
    base: State
    target = after.state()
    before: Mapping[str, torch.Tensor] = {}
    if isinstance(old, (str, os.PathLike)):
        base = open_state(Path(old))
    elif isinstance(old, bytes):
        base = FilesState(old)
    else:
        held = plain_tensors(old, "`old`")
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
    return sink.value()


def _comparer(host: HostComparer, before: Mapping[str, torch.Tensor], after: Tensors) -> Comparer:
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


class _InPlace(NamedTuple):
    """A tensor in host memory, and the words of it that are written where they lie."""

    tensor: torch.Tensor
    changes: Listed


class Update:
    """What a delta makes of live tensors: all of it made and checked, none of it written.

    Parameters
    ----------
    file : DeltaFile
        The delta.
    state : Tensors
        What holds the base.
    entries : sequence of TensorEntry
        What of the delta they become.
    threads : int
        How many decode.
    whole : bool
        Whether all words of tensors are checked: see `check` of `tpde.apply_delta`.
    progress : callable
        Called with a number of bytes of the target when they are done.

    Raises
    ------
    MissingBase, InvalidInput, Truncated, Corrupt
        As `tpde.apply_delta`.

    Notes
    -----
    Tensors that lie on a GPU are checked there, if `tpde[cuda]` is installed, and sparse changes of
    contiguous ones that share their memory with no other are made there; what else there is passes through
    the CPU.
    """

    def __init__(
        self,
        file: DeltaFile,
        state: Tensors,
        entries: Sequence[TensorEntry],
        threads: int,
        whole: bool,
        progress: Progress,
    ) -> None:
        tensors = state.tensors
        _require_places(entries, state)
        alone = _alone(entries, tensors)
        resident = {name: it for name, it in alone.items() if is_resident(it)}
        self._in_place: dict[str, _InPlace] = {}
        self._sparse: list[SparseChanges] = []
        decoded: dict[str, FoundState] = {}
        prints: dict[str, bytes] = {}
        if not whole:
            prints = {it.name: it.target for it in entries if it.codec == SAME}
            plain = [it for it in entries if it.codec == SPARSE and file.models[it.model].classes == 1]
            self._decode(file, plain, resident, decoded, whole=False)
            own = {name: it for name, it in alone.items() if name not in resident}
            self._in_place = dict(_in_place(file, plain, own, threads))
        left = [it for it in entries if it.name not in decoded]
        self._decode(file, left, resident, decoded, whole=True)
        known = prints.keys() | decoded.keys()
        prints |= fingerprints({name: it for name, it in resident.items() if name not in known})
        prints |= {name: it.fingerprint for name, it in decoded.items()}
        ready = set(_ready(file, entries, tensors, decoded, threads))
        chosen = (it.choose(ready & it.found.keys()) for it in self._sparse)
        self._done = set(self._in_place).union(*chosen)
        found = list(_changes(file, entries, tensors, prints, self._done, threads, progress))
        _refuse_conflicts([it for it in found if it.entry.name not in alone], file.name)
        self._changes = [it for it in found if it.data is not None]

    def _decode(
        self,
        file: DeltaFile,
        entries: Sequence[TensorEntry],
        resident: Mapping[str, torch.Tensor],
        decoded: dict[str, FoundState],
        *,
        whole: bool,
    ) -> None:
        """Decode sparse changes of tensors on GPUs."""
        made = _decoding(file, entries, resident, whole)
        self._sparse += made
        for changes in made:
            decoded.update(changes.found)

    def write(self) -> int:
        """Write it where the tensors lie; gives how many were written."""
        for it in self._changes:
            _write(it.tensor, it)
        for place in self._in_place.values():
            _write_words(place)
        for group in self._sparse:
            group.write()
        return len(self._changes) + len(self._done)


def _require_places(entries: Sequence[TensorEntry], state: Tensors) -> None:
    """Check that there is a tensor for each of a delta, which can be written."""
    bases = BaseTensors({("", name): spec for name, spec in state.specs.items()}, MEMORY)
    for it in entries:
        bases.need(("", it.name), it.spec)
        _require_writable(it.name, state.tensors[it.name])


def _alone(entries: Sequence[TensorEntry], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a delta that are each in memory of its own."""
    mine = {it.name: tensors[it.name] for it in entries}
    places = {name: (it.device, it.untyped_storage().data_ptr()) for name, it in mine.items() if it.numel()}
    users = Counter(places.values())
    return {name: mine[name] for name, place in places.items() if users[place] == 1}


def _in_place(
    file: DeltaFile, entries: Sequence[TensorEntry], alone: Mapping[str, torch.Tensor], threads: int
) -> Iterator[tuple[str, _InPlace]]:
    """Sparse changes of tensors in host memory, which have the base's words where they change."""
    for it in entries:
        tensor, model = alone.get(it.name), file.models[it.model]
        if tensor is None or tensor.device.type != "cpu":
            continue
        if not (tensor.is_contiguous() and has_words(tensor)):
            continue
        sparse = Sparse(file.payload(it), it.changes, it.sizes)
        with contextlib.suppress(Corrupt):  # so it may be for another base, too
            listed = model.listed(sparse, torch_bytes(tensor), threads)
            if listed.check == it.check:
                yield it.name, _InPlace(tensor, listed)


def _write_words(it: _InPlace) -> None:
    """Write words where the tensor lies; PyTorch counts it as a change in place.

    As what they become, not by how much: a word that two tensors share, or two threads write, is right.
    """
    import torch

    if not it.tensor.is_inference():
        torch.autograd.graph.increment_version(it.tensor)
    words = torch_bytes(it.tensor).view(it.changes.targets.dtype)
    words[it.changes.positions] = it.changes.targets


def _decoding(
    file: DeltaFile, entries: Sequence[TensorEntry], resident: Mapping[str, torch.Tensor], whole: bool
) -> list[SparseChanges]:
    """The sparse changes of tensors on GPUs, on their way."""
    groups: dict[tuple[torch.device, int], list[SparseChange]] = {}
    for it in entries:
        if it.codec == SPARSE and it.name in resident:
            change = SparseChange(it, resident[it.name])
            groups.setdefault((change.tensor.device, it.model), []).append(change)
    return [
        SparseChanges(members, file.models[number], file.read_payloads, whole=whole)
        for (_, number), members in groups.items()
    ]


def _ready(
    file: DeltaFile,
    entries: Sequence[TensorEntry],
    tensors: Mapping[str, torch.Tensor],
    decoded: Mapping[str, FoundState],
    threads: int,
) -> Iterator[str]:
    """Names of the tensors that are bases of what was decoded, and can be written."""
    for it in entries:
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
    entries: Sequence[TensorEntry],
    tensors: Mapping[str, torch.Tensor],
    prints: Mapping[str, bytes],
    done: set[str],
    threads: int,
    progress: Progress,
) -> Iterator[_Change]:
    """All tensors of a delta, with what must be written beside what is `done`."""
    for it in entries:
        tensor, data, old = tensors[it.name], None, None
        found = it.base if it.name in done else prints.get(it.name)
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
