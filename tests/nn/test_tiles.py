"""Layers larger than any buffer: `F.linear` of the plain weight over the same tiles, bit for bit."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from support.models import assert_same_bits, torch
from support.simulated import MemoryFeed, SimulatedDevice
from support.small import Model
from support.streamed import stream_model, write_blobs
from torch import nn

from tpde.codec import reference
from tpde.errors import OutOfMemory, PackedWeight
from tpde.nn import (
    PackedTensor,
    Resident,
    finish,
    pack_module,
    pack_tensor,
    packed_modules,
    plain_state_dict,
    unpack_module,
)
from tpde.nn.tiles import RowTiles, row_tiles
from tpde.nn.workspace import Workspace
from tpde.streaming.streamer import Streamer

CHUNK = 8192
# Columns, rows, room: tiles at chunks' ends; in the middle of chunks; of one row; a chunk of many rows.
SHAPES = [(1024, 100, 128 << 10), (1000, 90, 150_000), (9000, 12, 70_000), (64, 700, 32 << 10)]


def tile(model: Any, room: int, *names: str) -> Any:
    """Mark linear layers as too large, as a loader does."""
    for name, module in packed_modules(model):
        for slot in module.tpde_slots.values():
            if name in names:
                slot.packed.tile_bytes = room
    return finish(model)


def by_tiles(layer: nn.Linear, x: Any, room: int) -> Any:
    """What a plain layer gives, its rows taken tile by tile."""
    rows, columns = layer.weight.shape
    tiles = row_tiles(rows, columns, layer.weight.element_size(), CHUNK, room)
    assert len(tiles) > 1
    parts = [
        nn.functional.linear(x, layer.weight[a:b], None if layer.bias is None else layer.bias[a:b])
        for a, b in tiles
    ]
    return torch.cat(parts, -1)


def grad_by_tiles(layer: nn.Linear, grad: Any, room: int) -> Any:
    rows, columns = layer.weight.shape
    flat, total = grad.reshape(-1, rows), None
    for a, b in row_tiles(rows, columns, layer.weight.element_size(), CHUNK, room):
        part = flat[:, a:b].mm(layer.weight[a:b])
        total = part if total is None else total + part
    return total.view(*grad.shape[:-1], columns)


def make(columns: int, rows: int, *, bias: bool = True, dtype: Any = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(rows)
    return nn.Sequential(nn.Linear(columns, rows, bias=bias)).to(dtype)


def draw(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize(("columns", "rows", "room"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_forward_and_backward(columns: int, rows: int, room: int, bias: bool) -> None:
    plain = make(columns, rows, bias=bias)
    ours = tile(pack_module(copy.deepcopy(plain), min_bytes=0), room, "0")
    x = draw(2, 3, columns)
    with torch.no_grad():
        assert_same_bits(ours(x), by_tiles(plain[0], x, room))
        assert_same_bits(ours[0](input=x), by_tiles(plain[0], x, room), "by name")
    x.requires_grad_()
    grad = draw(2, 3, rows)
    found = ours(x)
    inputs = (x, ours[0].bias) if bias else (x,)
    got = torch.autograd.grad(found, inputs, grad)
    assert_same_bits(got[0], grad_by_tiles(plain[0], grad, room))
    if bias:
        (expected,) = torch.autograd.grad(plain(x.detach()), plain[0].bias, grad)
        assert_same_bits(got[1], expected)


def _in_parts(data: Any, *rows: int) -> PackedTensor:
    """A matrix made up of several, whose chunks start anew with each."""
    parts = [pack_tensor(it.clone(), f"part {n}") for n, it in enumerate(data.split(rows))]
    return PackedTensor([it.sources[0] for it in parts if it is not None], data.shape)


def _in_segments(data: Any, rows: int) -> PackedTensor:
    """A matrix of one tensor, whose chunks start anew after so many rows, as those of experts do."""
    plain, words = data.view(torch.uint8).numpy().tobytes(), rows * data.shape[1]
    blob = reference.encode_blob(plain, "BF16", tuple(data.shape), segment_words=words)
    return PackedTensor(Resident(torch.frombuffer(bytearray(blob), dtype=torch.uint8), "w"))


@pytest.mark.parametrize(
    "make",
    [
        lambda data: _in_parts(data, 100),
        lambda data: _in_parts(data, 30, 20, 50),
        lambda data: _in_parts(data, 3, 97),
        lambda data: _in_segments(data, 100),
        lambda data: _in_segments(data, 30),
        lambda data: _in_segments(data, 7),
    ],
)
@pytest.mark.parametrize("room", [36 << 10, 50_000, 64 << 10, 128 << 10])
def test_tiles_of_matrices_in_parts(room: int, make: Any) -> None:
    """Wherever chunks start, a tile and the rest of its chunks have room."""
    data, seen = draw(100, 1024), 0
    packed = make(data)
    packed.tile_bytes = room
    for begin, end, rows in RowTiles(packed)(torch.empty(room, dtype=torch.uint8)):
        assert begin == seen < end
        assert rows.storage_offset() * rows.element_size() % 512 == 0
        assert_same_bits(rows, data[begin:end])
        seen = end
    assert seen == 100


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(compiled: bool) -> None:
    plain = make(1024, 100, dtype=torch.float32)
    ours = tile(pack_module(copy.deepcopy(plain), min_bytes=0), 128 << 10, "0")
    x = draw(3, 1024, dtype=torch.float32).requires_grad_()
    torch.compiler.reset()
    run = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    with torch.autocast("cpu", torch.bfloat16):
        found = run(x)
        assert found.dtype is torch.bfloat16
        assert_same_bits(found, by_tiles(plain[0], x, 128 << 10))
    (grad,) = torch.autograd.grad(found.float().sum(), x)
    assert grad.dtype is torch.float32
    low = copy.deepcopy(plain).to(torch.bfloat16)
    ones = torch.ones(3, 100, dtype=torch.bfloat16)
    tiles = row_tiles(100, 1024, 4, CHUNK, 128 << 10)
    total = sum(ones[:, a:b].mm(low[0].weight[a:b]) for a, b in tiles)
    assert_same_bits(grad, total.float())


@pytest.mark.parametrize("bias", [False, True])
def test_doubles_are_not_cast(bias: bool) -> None:
    """As autocast leaves them."""
    plain = make(1024, 20, bias=bias, dtype=torch.float64)
    ours = tile(pack_module(copy.deepcopy(plain), min_bytes=0), 128 << 10, "0")
    x = draw(3, 1024, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(ours(x), by_tiles(plain[0], x, 128 << 10))
        low = x.float()
        single = tile(pack_module(copy.deepcopy(plain).float(), min_bytes=0), 64 << 10, "0")
        found = single(low)
        assert found.dtype is torch.bfloat16
        assert_same_bits(found, by_tiles(plain[0].float(), low, 64 << 10))


def test_no_more_memory_than_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    room, reserved = 128 << 10, []
    before = Workspace.reserve
    monkeypatch.setattr(Workspace, "reserve", lambda self, n: (reserved.append(n), before(self, n))[1])
    ours = tile(pack_module(make(1024, 1000), min_bytes=0), room, "0")
    reserved.clear()
    finish(ours)
    with torch.no_grad():
        ours(draw(2, 1024))
    assert reserved
    assert max(reserved) == room


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 700), nn.Linear(700, width)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.relu(self.up(x)))


def model_of_blocks() -> Any:
    """Whose first layers and head are large."""
    return Model(64, 400, 2, Block).to(torch.bfloat16)


ROOM = 32 << 10
IDS = torch.arange(10).reshape(2, 5)


@pytest.fixture
def pair() -> tuple[Any, Any]:
    """A plain model whose large layers multiply by tiles, and a packed one that must do so."""
    torch.manual_seed(2)
    model = model_of_blocks()
    packed = pack_module(copy.deepcopy(model), min_bytes=0)
    for layer in (*(block.up for block in model.blocks), model.head):
        layer.forward = lambda x, layer=layer: by_tiles(layer, x, ROOM)
    return model, tile(packed, ROOM, "blocks.0.up", "blocks.1.up", "head")


def test_inside_blocks(pair: tuple[Any, Any]) -> None:
    plain, ours = pair
    with torch.no_grad():
        for _ in range(2):
            assert_same_bits(ours(IDS), plain(IDS))
        assert_same_bits(ours.blocks[0].up(draw(3, 64)), plain.blocks[0].up(draw(3, 64)), "called alone")


def test_gradients_through_blocks(pair: tuple[Any, Any]) -> None:
    plain, ours = pair
    (found,) = torch.autograd.grad(ours(IDS).float().sum(), ours.blocks[0].down.bias)
    grads = []
    for layer in (*(block.up for block in plain.blocks), plain.head):
        layer.forward = lambda x, layer=layer: _ByTiles.apply(x, layer)
        grads.append(layer)
    (expected,) = torch.autograd.grad(plain(IDS).float().sum(), plain.blocks[0].down.bias)
    assert_same_bits(found, expected)


class _ByTiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, layer: Any) -> Any:
        ctx.layer = layer
        return by_tiles(layer, x, ROOM)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad_by_tiles(ctx.layer, grad, ROOM), None


@pytest.mark.parametrize("grad", [False, True])
def test_compiled(pair: tuple[Any, Any], grad: bool) -> None:
    plain, ours = pair
    torch.compiler.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    with torch.set_grad_enabled(grad):
        assert_same_bits(compiled(IDS), plain(IDS))
    if grad:
        compiled(IDS).float().sum().backward()
        assert ours.blocks[0].down.bias.grad is not None


def test_what_is_refused(pair: tuple[Any, Any]) -> None:
    _, ours = pair
    layer = ours.blocks[0].up
    for read in (layer.weight.clone, lambda: plain_state_dict(ours), lambda: unpack_module(ours)):
        with pytest.raises(PackedWeight, match=r"`(blocks\.0\.up|embed)\.weight` has \d+ bytes.*more `vram`"):
            read()
    with pytest.raises(OutOfMemory, match="a row of 64 columns"):
        tile(pack_module(model_of_blocks(), min_bytes=0), 100, "head")


def test_embeddings_give_rows_and_refuse_the_rest(pair: tuple[Any, Any]) -> None:
    plain, ours = pair
    tile(ours, ROOM, "embed")
    assert_same_bits(ours.embed(IDS), plain.embed(IDS))
    with pytest.raises(PackedWeight, match=r"`embed\.weight` has 51200 bytes"):
        ours.embed.weight + 1


def test_copies(pair: tuple[Any, Any]) -> None:
    plain, ours = pair
    with torch.no_grad():
        for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            assert_same_bits(other(IDS), plain(IDS))
        alone = copy.deepcopy(ours.head)
        assert_same_bits(alone(draw(2, 64)), plain.head(draw(2, 64)))


def test_streamed(tmp_path: Path) -> None:
    """Tiles travel ahead of their turns: after the first pass no copy is dropped, and all are made once."""
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(1024, 500), nn.ReLU(), nn.Linear(500, 300)).to(torch.bfloat16)
    packed = pack_module(copy.deepcopy(plain), min_bytes=0)
    source, extents = write_blobs(packed, tmp_path / "blobs")
    device, feed = SimulatedDevice(4 * ROOM, delay=1e-4), MemoryFeed()
    streamer = Streamer(device, 4, ROOM)
    streamer.own(feed, source)
    room = 128 << 10
    for module in (packed[0], packed[2]):
        assert module.weight.packed.tile_bytes == 0

    def cut(model: Any) -> None:
        for module in (model[0], model[2]):
            module.weight.packed.tile_bytes = room

    ours = stream_model(packed, extents, streamer, feed, torch.device("cpu"), cut)
    try:
        x = draw(2, 1024)
        with torch.no_grad():
            expected = by_tiles(plain[2], plain[1](by_tiles(plain[0], x, room)), room)
            for _ in range(3):
                before = len(device.copied)
                assert_same_bits(ours(x), expected)
            assert streamer.dropped_pieces == 0
        once = sum(len(unit.pieces) for unit in streamer._chunks.values())
        assert len(device.copied) - before == once
        x.requires_grad_()
        (grad,) = torch.autograd.grad(ours(x), x, draw(2, 300))
        inner = grad_by_tiles(plain[2], draw(2, 300), room)
        inner = inner * (by_tiles(plain[0], x.detach(), room) > 0)
        assert_same_bits(grad, grad_by_tiles(plain[0], inner, room))
    finally:
        streamer.close()
