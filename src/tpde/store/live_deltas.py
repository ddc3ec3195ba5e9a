"""Deltas between live tensors: what changed between two states in memory, as bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tpde.errors import InvalidInput
from tpde.files.progress import Progress, check_progress, no_progress
from tpde.files.thread_count import check_threads
from tpde.io.sinks import ValueSink
from tpde.store.comparer import Comparer, HostComparer
from tpde.store.delta_writer import write_delta
from tpde.store.device_deltas import is_resident
from tpde.store.device_diff import DeviceComparer
from tpde.store.files_state import FilesState
from tpde.store.live_tensors import LiveTensors, plain_tensors
from tpde.store.open_state import open_state
from tpde.store.states import State

if TYPE_CHECKING:
    import torch

    from tpde.store.live_tensors import Live

__all__ = ["make_delta"]


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
    check_progress(progress)
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


def _comparer(host: HostComparer, before: Mapping[str, torch.Tensor], after: LiveTensors) -> Comparer:
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
    """Refuse two states in the same memory: the delta would say that nothing changed."""
    both = [name for name in new if name in old and new[name].numel()]
    if both and all(old[name].data_ptr() == new[name].data_ptr() for name in both):
        raise InvalidInput(
            f"`old` and `new` have the same memory, such as that of `{both[0]}`: a change is in both",
            hint="clone the tensors before they change, or save them with `tpde.torch.save_file`",
            where=both[0],
        )
