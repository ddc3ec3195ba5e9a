"""Weights that a plan keeps plain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

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
BATCH_BYTES = 512 << 20  # read at a time, where there is room: a read takes 7 ms beside its bytes


class _Wanted(NamedTuple):
    """A blob, and where in its parameter it goes."""

    name: str
    part: Stored
    at: int
    last: bool  # of its parameter

    @property
    def room(self) -> int:
        return align(self.part.extent.size, ALIGN_BLOB)


def _batches(runs: Mapping[str, Run[Stored]], room: int) -> Iterator[list[_Wanted]]:
    """Blobs to be read at a time, of the largest parameters first; several only if they fit into `room`."""
    batch: list[_Wanted] = []
    for name, run in sorted(runs.items(), key=lambda item: -item[1].nbytes):
        at = 0
        for i, part in enumerate(run.parts):
            wanted = _Wanted(name, part, at, i + 1 == len(run.parts))
            at += part.nbytes
            if batch and sum(it.room for it in batch) + wanted.room > room:
                yield batch
                batch = []
            batch.append(wanted)
    if batch:
        yield batch


def decode_runs(
    model: nn.Module,
    runs: Mapping[str, Run[Stored]],
    device: torch.device,
    progress: Callable[[int], None] | None,
    room: int = BATCH_BYTES,
) -> None:
    """Put parameters into a model plain, a few tensors of the files at a time.

    Parameters
    ----------
    model : nn.Module
        Whose parameters they are.
    runs : mapping of str to Run
        The parameters, as runs of `Stored`.
    device : torch.device
        Where they go.
    progress : callable, optional
        Called with numbers of bytes read.
    room : int
        Bytes of device memory beside the parameters, for what is packed. More are taken for a blob that is
        larger, one at a time.

    Raises
    ------
    Corrupt
        Naming tensor and chunk.
    OutOfMemory
        If one does not fit.
    """
    if not runs:
        return
    batches = list(_batches(runs, min(room, BATCH_BYTES)))
    sizes = [sum(it.room for it in batch) for batch in batches]
    left = list(accumulate(reversed(sizes), max))[::-1]  # the most that is needed from each on
    # One buffer for all blobs, in a segment of its own that goes back whole. It shrinks with them: at the end
    # all plain weights are there, and maybe no more room than for these.
    scratch = flat = torch.empty(0, dtype=torch.uint8, device=device)
    with torch.inference_mode(False):
        for largest, batch in zip(left, batches, strict=True):
            if scratch.numel() < largest or scratch.numel() >= max(2 * largest, SCRATCH_LEAST):
                scratch = blobs = blob = packed = None  # type: ignore[assignment]
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                scratch = allocate(largest, device, "the room that plain weights are decoded from")
            starts = accumulate((it.room for it in batch), initial=0)
            blobs = [scratch[at : at + it.part.extent.size] for at, it in zip(starts, batch, strict=False)]
            fill(blobs, [it.part.extent for it in batch])
            for blob, it in zip(blobs, batch, strict=True):
                run = runs[it.name]
                if not it.at:
                    flat = allocate(align(max(run.nbytes, 1), ALIGN_BLOB), device, f"`{it.name}`, decoded,")
                packed = it.part.checked(PackedTensor(blob, it.part.name))
                Materializer([(packed, it.at)], device)(flat)
                if progress is not None:
                    progress(it.part.extent.size)
                if it.last:
                    place(model, it.name, flat[: run.nbytes].view(run.dtype).view(run.shape))
        del scratch, blobs, blob, packed
    if device.type == "cuda":
        torch.cuda.empty_cache()
