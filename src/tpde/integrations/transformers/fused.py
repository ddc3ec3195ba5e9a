"""Loading weights into the window layout, a few at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress

import torch
from torch import nn

from tpde.integrations.transformers.internals import tied_weights
from tpde.loading.checkpoint_files import GROUP_BYTES, Checkpoint, Stored, in_groups
from tpde.loading.runs import Run
from tpde.nn.kernels import MOST_SHARE, can_fuse, taken_by_others
from tpde.weights.pack_tensor import hold_raw, pack_tensor
from tpde.weights.packed_tensor import PackedTensor
from tpde.weights.resident import Resident
from tpde.weights.source import Source
from tpde.weights.windowed import Windowed

SHARE = 0.72  # of a plain weight's bytes: what it takes in the window layout, with many escapes and padding
_TYPICAL = 0.703  # and mostly: 11.25 bits of 16


def fused_names(model: nn.Module, runs: Mapping[str, Run[Stored]]) -> set[str]:
    """Which parameters go to the window layout.

    Those are bf16 matrices that are tensors of the files by themselves, of linear layers; and embeddings that
    are tied to one.
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

    def goes(name: str, run: Run[Stored]) -> bool:
        modules = [model.get_submodule(it.rpartition(".")[0]) for it in (name, *tied.get(name, ()))]
        return (
            run.dtype is torch.bfloat16
            and name not in also
            and run.whole
            and len(run.parts) == 1
            and uses[run.parts[0]] == 1
            and all(can_fuse(it) and it not in taken for it in modules)
            and any(isinstance(it, nn.Linear) for it in modules)
        )

    return {name for name, run in runs.items() if goes(name, run)}


def open_some_fused(
    checkpoint: Checkpoint,
    runs: Mapping[str, Run[Stored]],
    where: Mapping[str, torch.device],
    fused: Collection[str],
) -> dict[str, PackedTensor]:
    """Read the blobs of some parameters, each to its device, and put some of them in the window layout.

    Beside what stays, about 256 MiB of these are in memory as the files have them at a time, and one weight
    plain.
    """
    there: dict[torch.device, list[str]] = {}
    for name in sorted(fused, key=lambda name: -runs[name].nbytes):  # the largest while there is most room
        there.setdefault(where[name], []).append(name)
    parts: dict[str, PackedTensor] = {}
    for device, names in there.items():
        if device.type == "cuda":
            _reserve(sum(runs[name].nbytes for name in names), device)
        groups = in_groups(names, lambda name: runs[name].nbytes)
        parts |= checkpoint.open_in_turn(groups, runs, device, _windowed)
    return parts | checkpoint.open({name: run for name, run in runs.items() if name not in fused}, where)


def _windowed(part: Stored, data: torch.Tensor) -> Source:
    """A weight in the window layout, or packed where that would be too large."""
    if part.is_plain:
        plain = part.plain(data)
        made = Windowed.of_plain(plain, part.name, MOST_SHARE)
        if made is not None:
            return made
        packed = pack_tensor(plain, part.name) or hold_raw(plain, part.name)
        return packed.sources[0]
    source = part.checked(Resident(data, part.name))
    return Windowed.of(source, MOST_SHARE) or source


def _reserve(nbytes: int, device: torch.device) -> None:
    """Have PyTorch take memory in one piece for weights of so many bytes, which it then cuts up.

    Weight by weight it would ask the driver for multiples of 2 MiB, and what one group leaves would not fit
    the next: 6 % more for an 8 B model.
    """
    with suppress(torch.cuda.OutOfMemoryError):  # memory in pieces may do
        room = int(_TYPICAL * nbytes) + min(nbytes, GROUP_BYTES)
        torch.empty(room, dtype=torch.uint8, device=device)
