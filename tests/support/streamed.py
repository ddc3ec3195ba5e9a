"""Turning packed models into streamed ones: their blobs go to a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tpde.io.sources import Extent, FileSource
from tpde.nn import PackedParameter, PackedTensor, finish, packed_modules, replace_parameter
from tpde.streaming.streamed_source import Streamed
from tpde.streaming.streamer import Streamer


def write_blobs(model: Any, path: Path) -> tuple[FileSource, dict[int, Extent]]:
    """Write the blobs of a packed model to a file; gives their extents by the ids of the sources."""
    places: dict[int, tuple[int, int, str]] = {}
    with path.open("wb") as file:
        for _, module in packed_modules(model):
            for slot in module.tpde_slots.values():
                for it in slot.packed.sources:
                    if id(it) in places:
                        continue
                    at = -(-file.tell() // 256) * 256
                    file.seek(at)
                    file.write(it.blob.cpu().numpy().tobytes())
                    places[id(it)] = (at, it.packed_bytes, it.name)
    source = FileSource(path)
    return source, {key: Extent(source, *place) for key, place in places.items()}


def stream_model(
    model: Any,
    extents: dict[int, Extent],
    streamer: Streamer,
    feed: Any,
    device: torch.device,
    prepare: Callable[[Any], None] = lambda model: None,
) -> Any:
    """Replace the packed weights of a model by streamed ones, prepare it, and finish."""
    weights: dict[int, PackedParameter] = {}
    for path, module in list(packed_modules(model)):
        for name, slot in list(module.tpde_slots.items()):
            packed = slot.packed
            if id(packed) not in weights:
                sources = [Streamed(extents[id(it)], streamer, device, feed) for it in packed.sources]
                made = PackedTensor(sources, packed.shape)
                weights[id(packed)] = PackedParameter(made, slot.parameter.plain_requires_grad)
            replace_parameter(model, f"{path}.{name}".lstrip("."), weights[id(packed)])
    prepare(model)
    return finish(model)
