"""Every kernel once, on little: for compute-sanitizer, under which kernels take a thousand times as long."""

from __future__ import annotations

from typing import Any

import pytest
from support.backends import MadeBackend
from support.contents import fill
from support.device_deltas import moved, same, words_of
from support.gpu import Batch, needs_cuda, torch
from support.models import assert_same_bits
from support.packed import pack
from support.tiles import KINDS, share_out

import tpde
from tpde.cuda import window_experts
from tpde.cuda.backend import current, launching_on
from tpde.cuda.many_experts import WAYS, ManyExperts
from tpde.cuda.many_rows import many_way
from tpde.cuda.product_ways import MOST_ROWS
from tpde.cuda.window_products import DeviceWindow
from tpde.format.container import TensorSpec
from tpde.frameworks import torch_dtype
from tpde.nn import PackedTensor, pack_module
from tpde.weights import windowing
from tpde.weights.windowed_experts import WindowedExperts

pytestmark = needs_cuda

# Whole chunks, and cut ones; x that stays in shared memory, and x that does not.
SHAPES = [(40, 512), (33, 200), (17, 6400)]


def stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def weights(*shape: int) -> Any:
    """Of which one part has escapes, and one zeros."""
    draw = torch.Generator("cuda").manual_seed(sum(shape))
    made = 0.02 * torch.randn(shape, device="cuda", generator=draw)
    made[0] *= torch.exp(3 * torch.randn(shape[1:], device="cuda", generator=draw))
    made[1] *= torch.rand(shape[1:], device="cuda", generator=draw) < 0.5
    return made.bfloat16()


class Held:
    """A matrix, and its blob."""

    def __init__(self, rows: int, columns: int) -> None:
        self.plain = weights(rows, columns)
        encoded = windowing.encode(self.plain)
        assert encoded is not None
        self.blob, self.window = encoded
        self.device = DeviceWindow(self.window, self.blob.data_ptr(), torch.cuda.current_device())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_windows(shape: tuple[int, int]) -> None:
    """Encoded, and decoded."""
    held = Held(*shape)
    out = torch.empty_like(held.plain)
    held.device.rows(out.data_ptr(), shape[1], stream())
    assert_same_bits(out, held.plain)


@pytest.mark.parametrize("count", [1, 9, 33, MOST_ROWS])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(shape: tuple[int, int], count: int) -> None:
    """In every way: the bits of one row alone. x has room to a multiple of 8 columns."""
    held, (rows, columns) = Held(*shape), shape
    wide = -(-columns // 8) * 8
    x = torch.zeros((count, wide), dtype=torch.bfloat16, device="cuda")
    x[:, :columns] = torch.randn((count, columns), device="cuda")
    bias = torch.randn(rows, device="cuda").bfloat16()

    def product(some: Any) -> Any:
        y = torch.empty((len(some), rows), dtype=torch.bfloat16, device="cuda")
        room = torch.empty(held.device.room(len(some)), dtype=torch.uint8, device="cuda")
        to = y.data_ptr(), rows, bias.data_ptr(), stream(), room.data_ptr()
        held.device.product(some.data_ptr(), wide, len(some), *to)
        return y

    alone = product(x[-1:])
    for how in held.device.ways(count):
        held.device.choose(count, how)
        assert_same_bits(product(x)[-1:], alone)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="other GPUs than Hopper decode matrices for so many rows",
)
@pytest.mark.parametrize(("shape", "runs"), [((900, 2112), 1), ((900, 2112), 3), ((513, 256), 1)], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_products_of_many_rows(
    monkeypatch: pytest.MonkeyPatch, kind: tuple[int, int], shape: tuple[int, int], runs: int
) -> None:
    """However tiles are cut between blocks, the bits are those of whole ones."""
    share_out(monkeypatch, runs, kind)
    held, (rows, columns), count = Held(*shape), shape, 300
    x = torch.randn((count, columns), device="cuda").bfloat16()
    bias, there = torch.randn(rows, device="cuda").bfloat16(), current()
    found = []
    for blocks in (132, 7, 5, 3, 1):
        have = there.facts(0)._replace(multiprocessors=blocks)
        with launching_on(MadeBackend(there.kernel, have)):
            device = DeviceWindow(held.window, held.blob.data_ptr(), 0)
            device.choose(count, many_way(have, held.window, count))
            room = torch.full((device.room(count),), 0x7F, dtype=torch.uint8, device="cuda")
            y = torch.empty((count, rows), dtype=torch.bfloat16, device="cuda")
            to = y.data_ptr(), rows, bias.data_ptr(), stream(), room.data_ptr()
            for _ in range(3):  # flags of the last one are cleared
                device.product(x.data_ptr(), columns, count, *to)
        found.append(y)
    for it in found[1:]:
        assert_same_bits(it, found[0])


def test_experts() -> None:
    """Encoded, decoded, and multiplied."""
    plain = weights(3, 34, 300)
    source = WindowedExperts.of_plain(plain.clone(), "experts", 10.0, False)
    assert source is not None
    packed = PackedTensor(source)
    assert_same_bits(packed.decoded(), plain)
    x = torch.randn((9, 300), device="cuda").bfloat16()
    ids = torch.tensor([0, 2, 2, 1, 0, 1, 2, 0, 1], device="cuda")
    found = packed.experts.product(x, ids, 1, None, 9)
    assert_same_bits(packed.experts.product(x[:2], ids[:2], 1, None, 2), found[:2])


@pytest.mark.parametrize("way", WAYS, ids=lambda it: f"{it.rows}x{it.warps}")
def test_experts_with_many_rows(way: ManyExperts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that are whole and not, an expert without rows, blocks that take several tiles."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("other GPUs decode experts for so many rows")
    monkeypatch.setattr(window_experts, "_way_of", lambda *_: way)
    source = WindowedExperts.of_plain(weights(4, 212, 600), "experts", 10.0, False)
    assert source is not None
    experts = PackedTensor(source).experts
    x = torch.randn((way.rows + 70, 600), device="cuda").bfloat16()
    ids = torch.randint(-1, 3, (len(x),), device="cuda")
    ids[: way.rows + 9] = 1
    found, there = experts.product(x, ids, 1, None, 65), current()
    for some in (slice(2), slice(way.rows, None)):
        assert_same_bits(experts.product(x[some], ids[some], 1, None, 65), found[some])
    assert not found[ids < 0].float().any()
    with launching_on(MadeBackend(there.kernel, there.facts(0)._replace(multiprocessors=2))):
        assert_same_bits(experts.product(x, ids, 1, None, 65), found)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F8_E4M3"])
@pytest.mark.parametrize("content", ["normal", "pruned"])
def test_prefix_codes(dtype: str, content: str) -> None:
    spec = TensorSpec(dtype, (3 * 8192 + 517,))
    packed = pack(spec, fill(content, spec))
    assert packed is not None
    batch = Batch([packed])
    for check in (False, True):
        batch.launch(check)
        batch.assert_equal()


def test_a_module_that_is_packed_where_it_is() -> None:
    """Encoded on the device; rows of an embedding; checksums at first use."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Embedding(64, 512), torch.nn.Linear(512, 64))
    plain = plain.to("cuda", torch.bfloat16)
    ids = torch.tensor([[3, 9, 60]], device="cuda")
    with torch.no_grad():
        expected = plain(ids)
        pack_module(plain, min_bytes=1024)
        assert_same_bits(plain(ids), expected)


def test_deltas() -> None:
    words = words_of("BF16", 20_003)
    old, new = (
        {"w": torch.from_numpy(it).cuda().view(torch_dtype("BF16"))}
        for it in (words, moved(words, "BF16", 0.02, False))
    )
    tpde.apply_delta(old, tpde.make_delta(old, new))
    assert same(old, new)
