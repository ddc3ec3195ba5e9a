"""Products of many rows of x with experts in windows, on Hopper GPUs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from support.experts import experts_of, moe
from support.gpu import needs_cuda, torch
from support.tiles import share_out

from tpde.cuda import window_experts
from tpde.cuda.backend import current
from tpde.cuda.many_experts import WAYS, ManyExperts
from tpde.cuda.many_rows import many_way
from tpde.cuda.window_experts import DeviceExperts
from tpde.nn import PackedTensor, pack_module, packed_modules, set_kernels
from tpde.weights import windowing
from tpde.weights.experts_in_windows import parts_in_windows
from tpde.weights.windowed import Windowed
from tpde.weights.windowed_experts import WindowedExperts

pytestmark = needs_cuda

# Experts, rows, columns: tails, odd columns, rows of y at multiples of 16 bytes and elsewhere, two parts.
SHAPES = [(3, 16, 512), (8, 1536, 768), (16, 384, 2048), (4, 130, 2883), (5, 426, 600), (2, 64, 14336)]


@pytest.fixture(autouse=True)
def of_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("other GPUs decode experts for so many rows")


def bits(tensor: Any) -> Any:
    return tensor.contiguous().view(torch.int16)


def draw_of(*seeds: int) -> Any:
    return torch.Generator("cuda").manual_seed(sum(seeds))


def words(experts: int, rows: int, columns: int) -> Any:
    """Weights of any exponents, of which one expert is mostly zeros and one has escapes."""
    draw = draw_of(experts * rows, columns)
    made = torch.randn((experts, rows, columns), device="cuda", generator=draw) * 0.02
    made[0] *= torch.rand((rows, columns), device="cuda", generator=draw) < 0.5
    made[-1] *= torch.exp(3 * torch.randn((rows, columns), device="cuda", generator=draw))
    return made.bfloat16()


def kinds(plain: Any) -> list[PackedTensor]:
    """As one stack, turned, and of two parts each."""
    experts, rows, columns = plain.shape
    made = []
    for turned in (False, True):
        taken = plain.transpose(1, 2).contiguous() if turned else plain
        found = WindowedExperts.of_plain(taken, "experts", 10.0, turned)
        assert found is not None
        made.append(PackedTensor(found))
    if rows % 2 == 0:
        matrices = plain.view(2 * experts, rows // 2, columns).unbind()
        parts = parts_in_windows(matrices, [f"part {i}" for i in range(2 * experts)])
        assert parts is not None
        made.append(PackedTensor(parts, plain.shape, "experts"))
    return made


def take(monkeypatch: pytest.MonkeyPatch, way: ManyExperts) -> None:
    monkeypatch.setattr(window_experts, "_way_of", lambda *_: way)


@pytest.mark.parametrize("way", WAYS, ids=lambda it: f"{it.rows}x{it.warps}")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_those_of_one_matrix(
    shape: tuple[int, int, int], way: ManyExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many rows, by one run: windows.md 9.3. Nothing else in the batch changes them."""
    experts, rows, columns = shape
    plain, draw = words(*shape), draw_of(1)
    take(monkeypatch, way)
    share_out(monkeypatch, 1, (128, 8))
    x = torch.randn((700, columns), device="cuda", generator=draw).bfloat16()
    bias = torch.randn((experts, rows), device="cuda", generator=draw).bfloat16()
    ids = torch.randint(-1, experts + 1, (1400,), device="cuda", generator=draw)
    ids[:300] = experts - 1
    for added in (None, bias):
        needed = torch.zeros((1400, rows), device="cuda", dtype=torch.bfloat16)
        for number, matrix in enumerate(plain):
            encoded = windowing.encode(matrix)
            assert encoded is not None
            one = Windowed(encoded.blob, "matrix", encoded.window)
            own = (ids == number).nonzero().view(-1)
            taken = torch.cat((x[own // 2], x[:65]))
            there = one._there
            assert there is not None
            there.choose(len(taken), many_way(current().facts(0), one.window, len(taken)))
            needed[own] = one.product(taken, None if added is None else added[number], False)[: len(own)]
        for packed in kinds(plain):
            for kind in (torch.int64, torch.int32):
                found = packed.experts.product(x, ids.to(kind), 2, added, 65)
                assert torch.equal(bits(found), bits(needed))
            for count in (1, 3, 65, 129, 300):
                some = packed.experts.product(x[-count:], ids[-2 * count :], 2, added, 65)
                assert torch.equal(bits(some), bits(needed[-2 * count :]))


@pytest.mark.parametrize("way", WAYS, ids=lambda it: f"{it.rows}x{it.warps}")
def test_again_and_again(way: ManyExperts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come in other orders each time: a sum has no other row."""
    take(monkeypatch, way)
    experts, draw = kinds(words(32, 768, 2048))[0].experts, draw_of(2)
    x = torch.randn((2000, 2048), device="cuda", generator=draw).bfloat16()
    ids = torch.randint(0, 32, (4000,), device="cuda", generator=draw)
    needed, others = bits(experts.product(x, ids, 2, None, 2000)), torch.zeros((), device="cuda")
    for _ in range(200):
        others += (bits(experts.product(x, ids, 2, None, 2000)) != needed).any()
    assert not int(others)


@pytest.mark.parametrize("tails", ["normal", "heavy"])
def test_the_error_is_the_matrix_librarys(tails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take(monkeypatch, WAYS[1])
    plain, draw = words(16, 256, 2048), draw_of(3)
    plain[-1] = plain[1]
    x = torch.randn((512, 2048), device="cuda", generator=draw)
    if tails == "heavy":
        x *= torch.exp(2 * torch.randn((512, 2048), device="cuda", generator=draw))
    x, ids = x.bfloat16(), torch.arange(512, device="cuda") % 16
    needed = torch.stack([plain[i % 16].double() @ x[i].double() for i in range(512)])
    theirs = torch.empty((512, 256), device="cuda", dtype=torch.bfloat16)
    for number in range(16):
        theirs[number::16] = x[number::16] @ plain[number].t()
    ours = kinds(plain)[0].experts.product(x, ids, 1, None, 512)
    assert (ours.double() - needed).norm() <= 1.01 * (theirs.double() - needed).norm()


def test_graphs_follow_the_router() -> None:
    """Recorded with some choices, replayed with others: nobody waits."""
    experts, draw = kinds(words(32, 1024, 2048))[0].experts, draw_of(4)
    x = torch.randn((200, 2048), device="cuda", generator=draw).bfloat16()
    ids = torch.zeros(800, dtype=torch.int64, device="cuda")
    assert experts._there.room(200, 800)
    experts.product(x, ids, 4, None, 200)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = experts.product(x, ids, 4, None, 200)
    for _ in range(5):
        ids.copy_(torch.randint(0, 33, (800,), device="cuda", generator=draw))
        x.copy_(torch.randn(x.shape, device="cuda", generator=draw))
        graph.replay()
        assert torch.equal(bits(found), bits(experts.product(x, ids, 4, None, 200)))


def test_rows_of_no_expert_are_zeros() -> None:
    """Of negative numbers, and of the one after the last; whatever was there."""
    experts, draw = kinds(words(32, 1024, 2048))[0].experts, draw_of(5)
    x = torch.randn((200, 2048), device="cuda", generator=draw).bfloat16()
    for none in (32, -1, -(2**40)):
        ids = torch.full((800,), none, dtype=torch.int64, device="cuda")
        assert experts._there.room(200, 800)
        assert not experts.product(x, ids, 4, None, 200).float().any()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_models(name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of any length, of which some take many rows at a time and some few."""
    more = {"hidden_size": 2048, "intermediate_size": 2048, "moe_intermediate_size": 768}
    counts = {"num_experts": 32} if name == "qwen3_moe" else {"num_local_experts": 8}
    plain = moe(name, "grouped_mm", **more, **counts).cuda()
    model = set_kernels(pack_module(copy.deepcopy(plain), min_bytes=0), "fused")
    assert all(it.multiplies for it in experts_of(model))
    seen, before = set[bool](), DeviceExperts.room

    def room(self: Any, tokens: int, count: int) -> int:
        found = before(self, tokens, count)
        seen.add(found > 0)
        return found

    monkeypatch.setattr(DeviceExperts, "room", room)
    modules = [
        (it, theirs)
        for (_, it), theirs in zip(
            ((key, it) for key, it in packed_modules(model) if hasattr(it, "down_proj")),
            (layer.mlp.experts for layer in plain.model.layers),
            strict=True,
        )
    ]
    mine, theirs = modules[0]
    called = torch.compile(mine, dynamic=True) if compiled else mine
    count = len(theirs.gate_up_proj)
    with torch.no_grad():
        for tokens in (3, 64, 65, 200, 333, 1000):
            x = torch.randn(tokens, 2048, device="cuda").bfloat16()
            index = torch.randint(0, count, (tokens, 2), device="cuda")
            scores = torch.rand(tokens, 2, device="cuda").bfloat16()
            found, needed = called(x, index, scores).float(), theirs(x, index, scores).float()
            assert (found - needed).norm() <= 0.02 * needed.norm(), tokens
    assert seen == {False, True}
