"""Weights that a plan keeps plain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate

import torch
from torch import nn

from tpde.format.blob import align
from tpde.format.constants import ALIGN_BLOB
from tpde.integrations.checkpoint import Stored
from tpde.integrations.place import place
from tpde.integrations.reading import fill
from tpde.integrations.runs import Run
from tpde.materialize import Materializer, PackedTensor
from tpde.memory import allocate

SCRATCH_LEAST = 20 << 20  # smaller memory shares a segment of the caching allocator, and does not go back


def decode_runs(
    model: nn.Module,
    runs: Mapping[str, Run[Stored]],
    device: torch.device,
    progress: Callable[[int], None] | None,
) -> None:
    """Put parameters into a model plain, one tensor of the files at a time.

    Raises
    ------
    Corrupt
        Naming tensor and chunk.
    OutOfMemory
        If one does not fit.
    """
    if not runs:
        return
    order = sorted(runs.items(), key=lambda item: -item[1].nbytes)
    left = [max(part.extent.size for part in run.parts) for _, run in order]
    left = list(accumulate(reversed(left), max))[::-1]  # the largest blob from each on
    # One buffer for all blobs, in a segment of its own that goes back whole. It shrinks with them: at the end
    # all plain weights are there, and maybe no more room than for these.
    scratch = torch.empty(0, dtype=torch.uint8, device=device)
    with torch.inference_mode(False):
        for largest, (name, run) in zip(left, order, strict=True):
            if scratch.numel() < largest or scratch.numel() >= max(2 * largest, SCRATCH_LEAST):
                scratch = blob = packed = None  # type: ignore[assignment]
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                scratch = allocate(largest, device, "the room that plain weights are decoded from")
            flat = allocate(align(max(run.nbytes, 1), ALIGN_BLOB), device, f"`{name}`, decoded,")
            at = 0
            for part in run.parts:
                blob = scratch[: part.extent.size]
                fill([blob], [part.extent])
                packed = part.checked(PackedTensor(blob, part.name))
                Materializer([(packed, at)], device)(flat)
                at += part.nbytes
                if progress is not None:
                    progress(part.extent.size)
            place(model, name, flat[: run.nbytes].view(run.dtype).view(run.shape))
        del scratch, blob, packed
    if device.type == "cuda":
        torch.cuda.empty_cache()
