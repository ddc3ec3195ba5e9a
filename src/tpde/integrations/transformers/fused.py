"""Loading weights into the window layout, a few at a time."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from tpde.cuda import window_experts, window_products
from tpde.integrations.transformers.internals import tied_weights
from tpde.loading.checkpoint_files import GROUP_BYTES, Checkpoint, Stored, in_groups
from tpde.loading.runs import Run
from tpde.nn.kernels import MOST_SHARE, TOO_LARGE, can_fuse, taken_by_others, tell_experts, why_no_experts
from tpde.weights.experts_in_windows import parts_in_windows
from tpde.weights.pack_source import hold_raw, pack_source
from tpde.weights.packed_tensor import PackedTensor
from tpde.weights.resident import Resident
from tpde.weights.source import Source, decoded
from tpde.weights.windowed import Windowed
from tpde.weights.windowed_experts import WindowedExperts

SHARE = 0.72  # of a plain weight's bytes: what it takes in the window layout, with many escapes and padding
_TYPICAL = 0.703  # and mostly: 11.25 bits of 16


def fused_names(model: nn.Module, runs: Mapping[str, Run[Stored]], *, experts: bool = True) -> set[str]:
    """Which parameters go to the window layout.

    Those are bf16 matrices that are tensors of the files by themselves, of linear layers; embeddings that
    are tied to one; and, if asked for, weights of experts, also where experts are tensors by themselves, both
    of a module.
    """
    tied: dict[str, list[str]] = {}
    for target, source in tied_weights(model).items():
        tied.setdefault(source, []).append(target)
    also = {target for targets in tied.values() for target in targets}
    taken = taken_by_others(model)
    uses: dict[Stored, int] = {}
    for run in runs.values():
        for span in run.spans:
            uses[span.tensor] = uses.get(span.tensor, 0) + 1

    def can(name: str, run: Run[Stored]) -> bool:
        own = run.dtype is torch.bfloat16 and name not in also and run.whole
        return own and all(uses[part] == 1 for part in run.parts)

    def goes(name: str, run: Run[Stored]) -> bool:
        modules = [model.get_submodule(it.rpartition(".")[0]) for it in (name, *tied.get(name, ()))]
        return (
            len(run.parts) == 1
            and all(can_fuse(it) and it not in taken for it in modules)
            and any(isinstance(it, nn.Linear) for it in modules)
        )

    possible = {name: run for name, run in runs.items() if can(name, run)}
    found = {name for name, run in possible.items() if goes(name, run)}
    if experts:
        found |= _experts(model, {name: run for name, run in possible.items() if name not in tied})
    return found


def _experts(model: nn.Module, runs: Mapping[str, Run[Stored]]) -> set[str]:
    """Names of weights of experts that go to the window layout; the logger is told of others."""
    held: dict[str, dict[str, Run[Stored]]] = {}
    for name, run in runs.items():
        if len(run.shape) == 3:
            path, _, leaf = name.rpartition(".")
            held.setdefault(path, {})[leaf] = run
    found: set[str] = set()
    told: dict[str, str] = {}
    for path, weights in held.items():
        module = model.get_submodule(path)
        parts = {leaf: (run.shape, [it.shape for it in run.parts]) for leaf, run in weights.items()}
        why = why_no_experts(module, parts)
        if why is None:
            found.update(f"{path}.{leaf}" for leaf in weights)
        else:
            told.setdefault(type(module).__name__, why)
    tell_experts(told)
    return found


def open_some_fused(
    model: nn.Module,
    checkpoint: Checkpoint,
    runs: Mapping[str, Run[Stored]],
    where: Mapping[str, torch.device],
    fused: Collection[str],
) -> dict[str, PackedTensor]:
    """Read the blobs of some parameters, each to its device, and put some of them in the window layout.

    Beside what stays, about 256 MiB of these are in memory as the files have them at a time, and one weight
    plain; of experts that are tensors by themselves, 256 MiB of them.
    """
    there: dict[torch.device, list[str]] = {}
    for name in sorted(fused, key=lambda name: -runs[name].nbytes):  # the largest while there is most room
        there.setdefault(where[name], []).append(name)
    parts: dict[str, PackedTensor] = {}
    for device, names in there.items():
        if device.type == "cuda":
            _reserve(sum(runs[name].nbytes for name in names), device)
            number = torch.cuda.current_device() if device.index is None else device.index
            for shape, exchanged in {(runs[name].shape, _is_turned(model, name)) for name in names}:
                _compile_ahead(shape, exchanged, number)
        alone = [name for name in names if len(runs[name].parts) == 1]
        turned = {runs[name].parts[0].name for name in alone if _is_turned(model, name)}
        groups = in_groups((runs[name].parts[0] for name in alone), lambda part: part.nbytes)
        make = functools.partial(_one_by_one, turned)
        sources = checkpoint.open_in_turn(groups, device, make)
        for name in names:
            if name not in alone:
                groups = in_groups(runs[name].parts, lambda part: part.nbytes)
                sources |= checkpoint.open_in_turn(groups, device, _together)
        parts |= {name: runs[name].opened(sources) for name in names}
    _settle(model, parts)
    return parts | checkpoint.open({name: run for name, run in runs.items() if name not in fused}, where)


def _compile_ahead(shape: Sequence[int], turned: bool, device: int) -> None:
    """Compile kernels for a matrix, or for experts, while weights are read."""
    if len(shape) == 2:
        rows, columns = shape
        window_products.compile_ahead(rows, columns, device)
    elif len(shape) == 3:
        experts, rows, columns = shape
        window_experts.compile_ahead(experts, *((columns, rows) if turned else (rows, columns)), device)


def _is_turned(model: nn.Module, name: str) -> bool:
    """Whether a parameter is a weight of experts that is multiplied from the left."""
    module = model.get_submodule(name.rpartition(".")[0])
    return bool(getattr(module, "is_transposed", False)) and not isinstance(module, nn.Linear)


def _one_by_one(turned: Collection[str], parts: Sequence[Stored], read: Sequence[Tensor]) -> list[Source]:
    return [_windowed(part, data, part.name in turned) for part, data in zip(parts, read, strict=True)]


def _windowed(part: Stored, data: Tensor, turned: bool) -> Source:
    """A weight in the window layout, or packed where that would be too large."""
    if part.is_plain:
        plain = part.plain(data)
        return _in_windows(plain, part.name, turned) or _packed(plain, part.name)
    source = part.checked(Resident(data, part.name))
    return _in_windows(decoded(source), part.name, turned) or source


def _in_windows(plain: Tensor, name: str, turned: bool) -> Source | None:
    if plain.dim() == 2:
        return Windowed.of_plain(plain, name, MOST_SHARE)
    return WindowedExperts.of_plain(plain, name, MOST_SHARE, turned)


def _packed(plain: Tensor, name: str) -> Source:
    return pack_source(plain, name) or hold_raw(plain, name)


def _together(parts: Sequence[Stored], read: Sequence[Tensor]) -> list[Source]:
    """Experts in the window layout, whatever that takes."""
    plain = [
        part.plain(data) if part.is_plain else decoded(part.checked(Resident(data, part.name)))
        for part, data in zip(parts, read, strict=True)
    ]
    names = [part.name for part in parts]
    made = parts_in_windows(plain, names)
    if made is not None:
        return list(made)
    return [_packed(it, name) for it, name in zip(plain, names, strict=True)]


def _settle(model: nn.Module, parts: Mapping[str, PackedTensor]) -> None:
    """Put weights of experts back in prefix codes where windows are too large for one of a module's."""
    told: dict[str, str] = {}
    held: dict[str, list[PackedTensor]] = {}
    for name, packed in parts.items():
        if len(packed.shape) == 3:
            held.setdefault(name.rpartition(".")[0], []).append(packed)
    for path, weights in held.items():
        if all(it.multiplies and it.packed_bytes <= MOST_SHARE * it.nbytes for it in weights):
            continue
        told.setdefault(type(model.get_submodule(path)).__name__, TOO_LARGE)
        for packed in weights:
            wide = [it for it in packed.sources if it.multiplies]
            packed.replace({it: _packed(decoded(it), it.name) for it in wide})
    tell_experts(told)


def _reserve(nbytes: int, device: torch.device) -> None:
    """Have PyTorch take memory in one piece for weights of so many bytes, which it then cuts up.

    Weight by weight it would ask the driver for multiples of 2 MiB, and what one group leaves would not fit
    the next: 6 % more for an 8 B model.
    """
    with suppress(torch.cuda.OutOfMemoryError):  # memory in pieces may do
        room = int(_TYPICAL * nbytes) + min(nbytes, GROUP_BYTES)
        torch.empty(room, dtype=torch.uint8, device=device)
