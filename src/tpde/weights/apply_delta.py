"""Deltas applied to live tensors, some of which may be packed: those become a base and what changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Literal, NamedTuple

from torch import nn

from tpde.errors import InvalidInput, PackedWeight
from tpde.files.progress import Progress, check_progress, no_progress
from tpde.files.thread_count import check_threads
from tpde.store.live_tensors import plain_tensors
from tpde.store.live_update import Update
from tpde.store.states import MEMORY
from tpde.weights.active_delta import ALWAYS, UNNAMED
from tpde.weights.changed import Changed, Variant, part_of
from tpde.weights.coded import CodedChange
from tpde.weights.delta_sources import SPARSE_SHARE, Delta, DeltaLike, entries_of, only_source, variants_of
from tpde.weights.pack_source import pack_source
from tpde.weights.packed_tensor import PackedTensor
from tpde.weights.parameter import PackedParameter
from tpde.weights.source import Source
from tpde.weights.windows_source import WindowSource

if TYPE_CHECKING:
    from tpde.store.live_tensors import Live

# Updates that are kept beside a base, one after the other, before the weight is packed anew: each takes a
# launch of its own whenever the weight is decoded.
_UPDATES = 8


def apply_delta(
    state: Live,
    delta: DeltaLike,
    *,
    check: Literal["all", "changed"] = "all",
    threads: int | None = None,
    progress: Progress = no_progress,
) -> int:
    """Turn live tensors from a delta's base into its target, where they lie.

    Everything is made and checked before the first tensor is written. A tensor that is the target's already
    is left as it is, so a delta may be applied twice, or again after Ctrl-C. Files of the delta that hold no
    weights are passed over.

    A packed weight becomes a base and what changed, as long as that is little; else it is packed anew.

    Parameters
    ----------
    state : nn.Module or mapping of str to torch.Tensor
        What holds the base. It may have more tensors than the delta.
    delta : bytes or path-like
        As `make_delta` gives it, or a file that `tpde diff` wrote.
    check : {"all", "changed"}
        What must be the base's: all of each tensor, or the words that change. With "changed" a delta that
        was made with `fast=True` takes time in proportion to what it changes, and no memory for copies; what
        is wrong elsewhere in the tensors stays unseen. Where these words are not the base's, all of the
        tensor is looked at, so that a second time anything wrong is seen; so it is with tensors that are
        packed, not contiguous, or share their memory, and with what is no sparse change. Other
        deltas read all words to find those that change, and check them all.
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
        If a tensor cannot be written where it lies, two tensors share memory and would differ, it is no
        delta, or `check` is something else.
    PackedWeight
        If a packed weight is streamed, made of several tensors, has named deltas, or was recorded in a CUDA
        graph; if most of it changes, and it would not shrink.
    Truncated, Corrupt, UnsupportedVersion
        If the delta is damaged, or newer than this version.

    Notes
    -----
    Tensors that lie on a GPU are checked there, if `tpde[cuda]` is installed, and sparse changes of
    contiguous ones that share their memory with no other are made there; what else there is passes through
    the CPU.

    Memory: what the changed tensors take, and one tensor more, on the device of packed ones that are in the
    window layout, which are encoded anew; where several share memory, that once more. Of
    packed ones what changed, as the delta has it, stays: after eight updates, or when it takes a quarter of
    the plain weight, the weight is packed anew on the CPU.

    No forward pass may be under way in another thread.
    """
    if check not in ("all", "changed"):
        raise InvalidInput(f"`check` is {check!r}", hint='say "all" or "changed"', found=check)
    check_progress(progress)
    count = check_threads(threads)
    found = state.state_dict(keep_vars=True) if isinstance(state, nn.Module) else state
    packed = {
        name: it
        for name, it in (found.items() if isinstance(found, Mapping) else ())
        if isinstance(it, PackedParameter)
    }
    rest = {name: it for name, it in found.items() if name not in packed} if packed else found
    plain = plain_tensors(rest, "`state`")
    with closing(Delta(delta)) as opened:
        entries = [it for it in opened.file.head.tensors if it.name not in packed]
        update = Update(opened.file, plain, entries, count, check == "all", progress)
        changes = _changes(packed, opened, progress)
    written = update.write()
    for it in changes:
        it.weight.replace({it.before: it.after})
        it.before.retire()
        written += it.names
    return written


class _Change(NamedTuple):
    """A packed weight, a source of it, what takes its place, and how many of a delta's tensors that is."""

    weight: PackedTensor
    before: Source
    after: Source
    names: int


def _changes(packed: Mapping[str, PackedParameter], delta: Delta, progress: Progress) -> list[_Change]:
    """What a delta makes of packed weights."""
    uses: dict[int, list[str]] = {}  # of tied ones, each is there once
    for name, parameter in packed.items():
        active_delta = parameter.packed.active_delta
        if active_delta not in (None, ALWAYS):
            raise PackedWeight(
                f"`{name}` has deltas that `use` chooses among; nothing was changed",
                hint="load the model without `deltas=`, or the target itself",
                where=name,
            )
        uses.setdefault(id(parameter.packed), []).append(name)
    changes = []
    for names in uses.values():
        own = [name for name in names if name in delta.entries]
        if not own:
            continue
        weight = packed[own[0]].packed
        source = _updatable(weight, own[0])
        entries = entries_of(own, source.header.spec, {UNNAMED: delta}, MEMORY)
        for variant in variants_of(source, entries, {UNNAMED: delta}, MEMORY).values():
            changes.append(_Change(weight, source, _updated(source, variant), len(own)))
        progress(len(own) * weight.nbytes)
    return changes


def _updatable(weight: PackedTensor, name: str) -> Source:
    """The source of a packed weight that may become another.

    Raises
    ------
    PackedWeight
        If it may not.
    """
    source = only_source(weight, name)
    why = None
    if not weight.settled:
        why = "is streamed under a VRAM budget, and stays in its file", "load the model without `vram=`"
    elif any(user.recorded for user in weight.users()):
        why = "was recorded in a CUDA graph, which would go on with its values", "load the model again"
    if why is not None:
        raise PackedWeight(f"`{name}` {why[0]}; nothing was changed", hint=why[1], where=name)
    return source


def _updated(source: Source, variant: Variant) -> Source:
    """A source with one more change."""
    if isinstance(source, WindowSource):
        return source.anew(part_of(variant, 0, source.nbytes).view(source.dtype).view(source.shape))
    if variant.start is not source:
        return variant.start
    before = source.now() if isinstance(source, Changed) else Variant(source)
    now = Variant(before.start, before.changes + variant.changes)
    if len(now.changes) > _UPDATES or _bytes(now.changes) > SPARSE_SHARE * source.nbytes:
        plain = part_of(now, 0, source.nbytes).view(source.dtype).view(source.shape)
        made = pack_source(plain.cpu(), source.name)
        if made is not None:
            made.apply(lambda blob: blob.to(source.device))
            return made
    return Changed(now.start, {UNNAMED: now}, ALWAYS)


def _bytes(changes: Sequence[CodedChange]) -> int:
    return sum(it.nbytes for it in changes)
