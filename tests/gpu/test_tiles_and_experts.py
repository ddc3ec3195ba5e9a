"""Layers larger than any buffer, and experts as routed to, on a CUDA device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models import assert_same_bits, make, outputs, torch
from support.simulated import MemoryFeed
from support.streamed import stream_model, write_blobs
from torch import nn

from tpde.io.sources import Extent
from tpde.nn import finish, pack_module, packed_modules, route_experts
from tpde.nn.routing import fused
from tpde.nn.tiles import row_tiles
from tpde.streaming.cuda_device import CudaDevice
from tpde.streaming.experts import ExpertStore, expert_room
from tpde.streaming.streamer import Streamer

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]
DEVICE = torch.device("cuda", 0)
ROOM, PLACES, CACHE = 256 << 10, 4, 16 << 20


class PinnedFeed(MemoryFeed):
    """Files' bytes in page-locked memory."""

    def whole(self, extent: Extent) -> np.ndarray:
        found = self._whole.get(extent.source.name)
        if found is None:
            memory = torch.empty(extent.source.size, dtype=torch.uint8, pin_memory=True)
            found = self._whole[extent.source.name] = memory.numpy()
            extent.source.read_into(0, found.data)
        return found


@contextmanager
def streamed(packed: Any, folder: Path, prepare: Any) -> Iterator[tuple[Any, Streamer]]:
    """Stream a packed model; `prepare` gets it and the device before its weights are grouped."""
    source, extents = write_blobs(packed, folder / "blobs")
    feed, device = PinnedFeed(), CudaDevice(DEVICE, PLACES * ROOM + CACHE)
    streamer = Streamer(device, PLACES, ROOM)
    streamer.own(feed, source)
    try:
        yield (
            stream_model(packed, extents, streamer, feed, DEVICE, lambda model: prepare(model, device)),
            streamer,
        )
    finally:
        torch.cuda.synchronize()
        streamer.close()


# Columns, rows, room: tiles at chunks' ends, and in the middle of chunks.
@pytest.mark.parametrize(("columns", "rows", "room"), [(2048, 5000, 4 << 20), (1003, 3000, 1 << 20)])
@pytest.mark.parametrize("where", ["packed", "streamed"])
def test_tiles(columns: int, rows: int, room: int, where: str, tmp_path: Path) -> None:
    torch.manual_seed(columns)
    plain = nn.Sequential(nn.Linear(columns, rows)).to("cuda", torch.bfloat16)
    tiles = row_tiles(rows, columns, 2, 8192, room)
    assert len(tiles) > 2
    parts = [(a, b, plain[0].weight[a:b].detach().clone()) for a, b in tiles]  # as round addresses as ours
    x, grad = (torch.randn(3, n, device="cuda").to(torch.bfloat16) for n in (columns, rows))
    expected = torch.cat([nn.functional.linear(x, w, plain[0].bias[a:b]) for a, b, w in parts], -1)
    total = torch.zeros_like(x)
    for i, (a, b, w) in enumerate(parts):
        part = grad[:, a:b].mm(w)
        total = total + part if i else part

    def mark(model: Any, _: object = None) -> None:
        model[0].weight.packed.tile_bytes = room

    def check(model: Any) -> None:
        for _ in range(3):
            with torch.no_grad():
                assert_same_bits(model(x), expected)
        took = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(model(took), took, grad)
        assert_same_bits(found, total)
        with torch.no_grad():
            assert_same_bits(torch.compile(model, backend="aot_eager", fullgraph=True)(x), expected)

    packed = pack_module(copy.deepcopy(plain), min_bytes=0)
    if where == "packed":
        mark(packed)
        check(finish(packed))
    else:
        with streamed(packed, tmp_path, mark) as (model, streamer):
            check(model)
            assert streamer.ring.copied_bytes


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("places", [2, 64])
def test_experts(name: str, implementation: str, places: int, tmp_path: Path) -> None:
    plain = make(name, device="cuda")
    plain.set_experts_implementation(implementation)
    stores: list[ExpertStore] = []

    def route(model: Any, device: CudaDevice) -> None:
        modules = [module for _, module in packed_modules(model) if fused(module)]
        room = max(expert_room(fused(module), ROOM) for module in modules)
        assert places * room <= CACHE
        stores.append(ExpertStore(device, PLACES * ROOM, places * room, room, ROOM))
        for module in modules:
            route_experts(module, stores[0].module(fused(module)))

    with torch.no_grad():
        expected = outputs(name, plain, 1, "cuda")
    packed = pack_module(copy.deepcopy(plain), min_bytes=1024)
    with streamed(packed, tmp_path, route) as (model, _), torch.no_grad():
        for run in range(3):
            for _, module in packed_modules(model):  # what is not fetched must not be read
                for slot in module.tpde_slots.values():
                    if slot.group is not None:
                        slot.group.workspace.buffer.fill_(0xFF)
            assert_same_bits(outputs(name, model, 1, "cuda"), expected, f"run {run}")
        stats = stores[0].stats()
        experts = sum(fused(module)[0].shape[0] for _, module in packed_modules(model) if fused(module))
        assert stats["expert_hits"] or places == 2
        assert (stats["expert_misses"] <= experts) == (places == 64)
