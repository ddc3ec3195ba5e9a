"""Mixture-of-experts modules whose experts are fetched as routed to, and the cache that this takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from tpde.format.blob_header import align
from tpde.loading.checkpoint_files import Stored
from tpde.loading.model_units import is_routed
from tpde.loading.runs import Run
from tpde.nn import PackedModule, packed_modules
from tpde.nn.routing import fused, routes
from tpde.streaming.experts import expert_room

SEGMENT = 2 << 20  # of the caching allocator: what large memory is rounded up to
PLACES = 2  # at least: one is copied to while the other is decoded
MARGIN = 16  # experts are larger than the mean by one part of so many, at most
ENDS = 64 << 10  # chunks of 16 KiB that experts share, at the ends of both weights


def cache_least(model: nn.Module, runs: Mapping[str, Run[Stored]], only: Collection[str] | None) -> int:
    """Bytes of device memory for the least cache of packed experts that is of use; 0 without experts.

    Only headers are read, which do not say how large an expert is: a little more than the mean.
    """
    sizes: dict[str, int] = {}  # of an expert, by modules
    for name, run in runs.items():
        if (only is None or name in only) and is_routed(model, runs, name):
            path = name.rpartition(".")[0]
            share = -(-sum(part.extent.size for part in run.parts) // run.shape[0])
            sizes[path] = sizes.get(path, 0) + share
    if not sizes:
        return 0
    largest = max(sizes.values())
    return align(PLACES * (largest + largest // MARGIN + ENDS), SEGMENT)


def routed_modules(model: nn.Module, streamer: Any) -> list[PackedModule]:
    """Modules whose experts can be fetched one by one, all of them lying in host memory.

    What is read ahead from files is not: its buffers are shared with the ring, which may hold all of them.
    """
    found = []
    for _, module in packed_modules(model):
        parts = [source for slot in fused(module) for source in slot.packed.sources]
        here = all(it.in_host_memory(streamer) for it in parts)
        if parts and here and routes(module.tpde_base):
            found.append(module)
    return found


def cache_size(modules: Sequence[PackedModule], piece: int, least: int, spare: int) -> tuple[int, int]:
    """How large the cache of some modules' experts is made, and each of its places.

    Parameters
    ----------
    modules : sequence of PackedModule
        All of the device.
    piece : int
        Bytes of a copy, at most.
    least, spare : int
        Bytes of device memory that were planned for it, and those that nothing else needs.

    Returns
    -------
    size, room : int
        Whole places, at most one for each expert.
    """
    room = max(expert_room(fused(module), piece) for module in modules)
    experts = sum(fused(module)[0].shape[0] for module in modules)
    places = (least + max(spare - SEGMENT, 0)) // room
    return min(places, experts) * room, room
