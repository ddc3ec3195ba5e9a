"""What a delta makes of live tensors, all of it made and checked before any is written."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tpde.codec.delta import Sparse
from tpde.codec.fingerprints import fingerprint
from tpde.errors import Corrupt, NativeError
from tpde.files.progress import Progress
from tpde.format.delta_head import SAME, SPARSE, WITH_BASE, TensorEntry
from tpde.frameworks import has_words, torch_bytes
from tpde.store.delta_file import DeltaFile
from tpde.store.delta_state import other_base
from tpde.store.device_deltas import fingerprints, is_resident
from tpde.store.device_update import FoundTensor, SparseChange, SparseChanges
from tpde.store.live_tensors import LiveTensors
from tpde.store.live_writes import (
    Change,
    InPlace,
    memories,
    refuse_conflicts,
    require_writable,
    write_change,
    write_words,
)
from tpde.store.states import MEMORY, BaseTensors

if TYPE_CHECKING:
    import torch


class Update:
    """What a delta makes of live tensors: all of it made and checked, none of it written.

    Parameters
    ----------
    file : DeltaFile
        The delta.
    state : LiveTensors
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
        state: LiveTensors,
        entries: Sequence[TensorEntry],
        threads: int,
        whole: bool,
        progress: Progress,
    ) -> None:
        tensors = state.tensors
        _require_places(entries, state)
        alone = _alone(entries, tensors)
        resident = {name: it for name, it in alone.items() if is_resident(it)}
        self._in_place: dict[str, InPlace] = {}
        self._sparse: list[SparseChanges] = []
        decoded: dict[str, FoundTensor] = {}
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
        refuse_conflicts([it for it in found if it.entry.name not in alone], file.name)
        self._changes = [it for it in found if it.data is not None]

    def _decode(
        self,
        file: DeltaFile,
        entries: Sequence[TensorEntry],
        resident: Mapping[str, torch.Tensor],
        decoded: dict[str, FoundTensor],
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
            write_change(it.tensor, it)
        for place in self._in_place.values():
            write_words(place)
        for group in self._sparse:
            group.write()
        return len(self._changes) + len(self._done)


def _require_places(entries: Sequence[TensorEntry], state: LiveTensors) -> None:
    """Check that there is a tensor for each of a delta, which can be written."""
    bases = BaseTensors({("", name): spec for name, spec in state.specs.items()}, MEMORY)
    for it in entries:
        bases.need(("", it.name), it.spec)
        require_writable(it.name, state.tensors[it.name])


def _alone(entries: Sequence[TensorEntry], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a delta that are each in memory of its own."""
    mine = {it.name: tensors[it.name] for it in entries}
    places = memories(mine)
    users = Counter(places.values())
    return {name: it for name, it in mine.items() if name in places and users[places[name]] == 1}


def _in_place(
    file: DeltaFile, entries: Sequence[TensorEntry], alone: Mapping[str, torch.Tensor], threads: int
) -> Iterator[tuple[str, InPlace]]:
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
                yield it.name, InPlace(tensor, listed)


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
    decoded: Mapping[str, FoundTensor],
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
) -> Iterator[Change]:
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
        yield Change(it, tensor, data)
