"""Turning packed models into streamed ones: their blobs go to a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tpde.format.source import Extent, FileSource
from tpde.nn import finish, packed_modules
from tpde.streaming.stream import Streamer
from tpde.streaming.tensor import Streamed


def write_blobs(model: Any, path: Path) -> tuple[FileSource, dict[int, Extent]]:
    """Write the blobs of a packed model to a file; gives their extents by the ids of the packed tensors."""
    places: dict[int, tuple[int, int, str]] = {}
    with path.open("wb") as file:
        for _, module in packed_modules(model):
            for slot in module.tpde_slots.values():
                for packed, _ in slot.parts:
                    if id(packed) in places:
                        continue
                    at = -(-file.tell() // 256) * 256
                    file.seek(at)
                    file.write(packed.blob.cpu().numpy().tobytes())
                    places[id(packed)] = (at, packed.blob.numel(), packed.name)
    source = FileSource(path)
    return source, {key: Extent(source, *place) for key, place in places.items()}


def stream_model(
    model: Any,
    extents: dict[int, Extent],
    streamer: Streamer,
    supply: Any,
    device: torch.device,
    prepare: Callable[[Any], None] = lambda model: None,
) -> Any:
    """Replace the packed weights of a model by streamed ones, prepare it, and finish."""
    made: dict[int, Streamed] = {}
    for _, module in packed_modules(model):
        for slot in module.tpde_slots.values():
            parts = []
            for packed, at in slot.parts:
                if id(packed) not in made:
                    made[id(packed)] = Streamed(extents[id(packed)], streamer, device, supply)
                parts.append((made[id(packed)], at))
            slot.parts = parts
            slot.changed()
        module.tpde_sync()
    prepare(model)
    return finish(model)
