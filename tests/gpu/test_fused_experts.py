"""Experts straight from the window layout on the GPU: each row has the bits of its product alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from support.experts import NAMES, WAYS, experts_of, moe
from support.gpu import needs_cuda, torch
from support.models import VOCAB

from tpde.cuda.backend import current
from tpde.cuda.expert_ways import MOST_TOKENS, expert_products
from tpde.nn import PackedTensor, pack_module, packed_modules, set_kernels
from tpde.weights import windowing
from tpde.weights.experts_in_windows import parts_in_windows
from tpde.weights.windowed import Windowed
from tpde.weights.windowed_experts import WindowedExperts

pytestmark = needs_cuda

# Experts, rows, columns: a part of a sum, three, eight, tails, odd columns.
SHAPES = [(3, 16, 64), (8, 96, 768), (128, 192, 2048), (4, 130, 2883), (5, 34, 300), (2, 64, 14336)]
SHAPES += [(6, 2000, 300)]
FEW = 64  # tokens, up to which rows have the bits that they have alone


def words(experts: int, rows: int, columns: int) -> Any:
    """Weights of any exponents, of which one expert is mostly zeros and one has escapes."""
    draw = torch.Generator("cuda").manual_seed(experts * rows + columns)
    made = torch.randn((experts, rows, columns), device="cuda", generator=draw) * 0.02
    made[0] *= torch.rand((rows, columns), device="cuda", generator=draw) < 0.5
    made[-1] *= torch.exp(3 * torch.randn((rows, columns), device="cuda", generator=draw))
    return made.bfloat16()


def bits(tensor: Any) -> Any:
    return tensor.contiguous().view(torch.int16)


def one(plain: Any, turned: bool = False) -> PackedTensor:
    taken = plain.transpose(1, 2).contiguous() if turned else plain
    made = WindowedExperts.of_plain(taken, "experts", 10.0, turned)
    assert made is not None
    return PackedTensor(made)


def several(plain: Any, each: int) -> PackedTensor:
    experts, rows, columns = plain.shape
    matrices = plain.view(experts * each, rows // each, columns).unbind()
    made = parts_in_windows(matrices, [f"part {i}" for i in range(len(matrices))])
    assert made is not None
    return PackedTensor(made, plain.shape, "experts")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blobs_are_those_of_one_matrix(shape: tuple[int, int, int]) -> None:
    plain = words(*shape)
    source = one(plain).sources[0]
    for number, (window, at) in enumerate(zip(source.stack.windows, source.stack.starts, strict=True)):
        alone = windowing.encode(plain[number])
        assert alone is not None
        assert alone.window == window
        assert torch.equal(source.memory[at : at + window.nbytes], alone.blob)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_bits_that_it_has_alone(shape: tuple[int, int, int]) -> None:
    experts, rows, columns = shape
    plain, draw = words(*shape), torch.Generator("cuda").manual_seed(1)
    matrices = [windowing.encode(it) for it in plain]
    single = [Windowed(it.blob, "matrix", it.window) for it in matrices if it is not None]
    kinds = [one(plain), one(plain.clone(), turned=True)] + ([several(plain, 2)] if rows % 2 == 0 else [])
    x = torch.randn((MOST_TOKENS, columns), device="cuda", generator=draw).bfloat16()
    bias = torch.randn((experts, rows), device="cuda", generator=draw).bfloat16()
    for each in (1, 2):
        ids = torch.randint(0, experts, (MOST_TOKENS * each,), device="cuda", generator=draw)
        ids[: 2 * each] = experts - 1
        for added in (None, bias):
            needed = torch.cat(
                [
                    single[expert].product(
                        x[i // each : i // each + 1], None if added is None else added[expert], False
                    )
                    for i, expert in enumerate(ids.tolist())
                ]
            )
            for packed in kinds:
                for kind in (torch.int64, torch.int32):
                    found = packed.experts.product(x, ids.to(kind), each, added, FEW)
                    assert torch.equal(bits(found), bits(needed))
                for count in (1, 3, 8, 9, 33, 200):
                    some = packed.experts.product(x[:count], ids[: count * each], each, added, FEW)
                    assert torch.equal(bits(some), bits(needed[: count * each]))
    same = torch.full((MOST_TOKENS,), experts - 1, device="cuda")
    alone = torch.cat([single[-1].product(row[None], None, False) for row in x])
    for packed in kinds:
        assert torch.equal(bits(packed.experts.product(x, same, 1, None, FEW)), bits(alone))
        for none in (experts, -1):  # vLLM marks padding by -1
            for kind in (torch.int64, torch.int32):
                found = packed.experts.product(x, torch.full_like(same, none, dtype=kind), 1, None, FEW)
                assert not found.float().any()
                some = same.to(kind, copy=True)
                some[5:] = none
                found = packed.experts.product(x, some, 1, None, FEW)
                assert torch.equal(bits(found[:5]), bits(alone[:5]))
                assert not found[5:].float().any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_experts_are_decoded_exactly(shape: tuple[int, int, int]) -> None:
    plain = words(*shape)
    for packed in (one(plain), one(plain.transpose(1, 2).contiguous(), turned=True), several(plain, 1)):
        assert torch.equal(bits(packed.decoded()), bits(plain))
        size = packed.nbytes
        out = torch.full((size,), 0xA5, dtype=torch.uint8, device="cuda")
        some = sorted({0, shape[0] - 1})
        packed.experts.decode_some(some, out)
        found = out.view(torch.bfloat16).view(packed.shape)
        for number in range(shape[0]):
            if number in some:
                assert torch.equal(bits(found[number]), bits(plain[number]))
            else:
                assert (found[number].reshape(-1).view(torch.uint8) == 0xA5).all()
        assert torch.equal(packed.expert(1).decoded().view(torch.int16), bits(plain[1]).view(-1))


def test_the_error_is_the_matrix_librarys() -> None:
    plain, draw = words(16, 256, 2048), torch.Generator("cuda").manual_seed(2)
    plain[-1] = plain[1]
    x = torch.randn((64, 2048), device="cuda", generator=draw).bfloat16()
    ids = torch.randint(0, 16, (64,), device="cuda", generator=draw)
    needed = (plain[ids].double() @ x.double().unsqueeze(-1)).squeeze(-1)
    theirs = torch.bmm(plain[ids], x.unsqueeze(-1)).squeeze(-1)
    ours = one(plain).experts.product(x, ids, 1, None, FEW)
    assert (ours.double() - needed).norm() <= 1.01 * (theirs.double() - needed).norm()


def test_every_way_of_these_shapes_runs() -> None:
    """What the tests above compare: by the first way of each call."""
    have, found, fit = current().facts(0), set(), set()
    for experts, rows, columns in SHAPES:
        for count in (1, 2, 9, 33, 200, MOST_TOKENS, 2 * MOST_TOKENS):
            ways = expert_products(columns, -(-rows // 16), experts, count, have)
            found.add(ways[0][:2])
            fit |= {it[:2] for it in ways}
    assert found == fit


def test_sums_of_tokens() -> None:
    draw = torch.Generator("cuda").manual_seed(4)
    for tokens, each, width in ((1, 8, 2048), (33, 4, 130), (512, 8, 96), (3, 1, 35)):
        experts = one(words(2, width, 64)).experts
        y = torch.randn((tokens * each, width), device="cuda", generator=draw).bfloat16()
        scores = torch.rand((tokens, each), device="cuda", generator=draw)
        needed = torch.zeros((tokens, width), device="cuda")
        for k in range(each):
            needed += y.view(tokens, each, width)[:, k].float() * scores[:, k : k + 1]
        assert torch.equal(bits(experts.weighted(y, scores)), bits(needed.bfloat16()))


def test_graphs_follow_the_router() -> None:
    """Recorded with some choices, replayed with others: nobody waits."""
    plain, draw = words(32, 256, 2048), torch.Generator("cuda").manual_seed(3)
    experts = one(plain).experts
    x = torch.randn((8, 2048), device="cuda", generator=draw).bfloat16()
    ids = torch.zeros(32, dtype=torch.int64, device="cuda")
    experts.product(x, ids, 4, None, FEW)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = experts.product(x, ids, 4, None, FEW)
    for _ in range(5):
        ids.copy_(torch.randint(0, 33, (32,), device="cuda", generator=draw))
        x.copy_(torch.randn(x.shape, device="cuda", generator=draw))
        graph.replay()
        assert torch.equal(bits(found), bits(experts.product(x, ids, 4, None, FEW)))


def ids_of(batch: int, length: int) -> Any:
    draw = torch.Generator().manual_seed(batch * 1000 + length)
    return torch.randint(2, VOCAB, (batch, length), generator=draw).cuda()


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_models(name: str, how: str) -> None:
    plain = moe(name, how).cuda()
    model = set_kernels(pack_module(copy.deepcopy(plain), min_bytes=0), "fused")
    assert all(it.multiplies for it in experts_of(model))
    with torch.no_grad():
        for batch, length in ((1, 1), (3, 7), (4, 60)):  # the last by decoded weights
            found, needed = (it(ids_of(batch, length)).logits for it in (model, plain))
            assert (found.float() - needed.float()).norm() <= 0.05 * needed.float().norm()
    module = next(it for _, it in packed_modules(model) if hasattr(it, "down_proj"))
    x = torch.randn(40, 64, device="cuda").bfloat16()
    index = torch.stack([torch.randperm(4)[:2] for _ in range(40)]).cuda()
    scores = torch.rand(40, 2, device="cuda").bfloat16()
    with torch.no_grad():
        together = module(x, index, scores)
        for i in (0, 7, 39):
            row = slice(i, i + 1)
            assert torch.equal(bits(module(x[row], index[row], scores[row])), bits(together[row]))
    grads = []
    for it in (module, plain.model.layers[0].mlp.experts):
        taken = x.clone().requires_grad_()
        it(taken, index, scores).float().sum().backward()
        grads.append(taken.grad)
    if how != "eager":  # which adds with atomics
        assert torch.equal(bits(grads[0]), bits(grads[1]))
    exact = set_kernels(model, "exact")
    for key, it in plain.named_parameters():
        ours = exact.get_parameter(key)
        decoded = ours.packed.decoded() if hasattr(ours, "packed") else ours
        assert torch.equal(decoded.detach().view(torch.uint8), it.detach().view(torch.uint8)), key


@pytest.mark.parametrize("name", NAMES)
def test_whole_models_in_graphs(name: str) -> None:
    model = set_kernels(pack_module(moe(name, "grouped_mm").cuda(), min_bytes=0), "fused")
    one_token, other = ids_of(2, 1), ids_of(1, 2).view(2, 1)
    # A mask of eager attention, which gpt_oss alone has, is made on the host; one token needs none.
    masks = dict.fromkeys(("full_attention", "sliding_attention"))
    made = {"attention_mask": masks} if name == "gpt_oss" else {}
    with torch.no_grad():
        needed = model(other, use_cache=False, **made).logits
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(one_token, use_cache=False, **made)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = model(one_token, use_cache=False, **made).logits
        one_token.copy_(other)
        for _ in range(3):
            graph.replay()
            assert torch.equal(bits(found), bits(needed))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # PyTorch's own first one
def test_compiled() -> None:
    model = set_kernels(pack_module(moe("qwen3_moe", "grouped_mm").cuda(), min_bytes=0), "fused")
    module = next(it for _, it in packed_modules(model) if hasattr(it, "down_proj"))
    made = torch.compile(module, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(5, 64, device="cuda").bfloat16()
            index, scores = (
                torch.randint(0, 6, (5, 2), device="cuda"),
                torch.rand(5, 2, device="cuda").bfloat16(),
            )
            needed = module(x, index, scores)
            torch.compiler.cudagraph_mark_step_begin()
            found = made(x, index, scores).clone()
            assert (found.float() - needed.float()).norm() <= 0.02 * needed.float().norm()


def test_moving_there_and_back() -> None:
    plain = moe("mixtral")
    model = set_kernels(pack_module(copy.deepcopy(plain), min_bytes=0), "fused")
    with torch.no_grad():
        needed = model(ids_of(2, 7).cpu()).logits
        model.cuda()
        assert all(it.multiplies for it in experts_of(model))
        there = model(ids_of(2, 7)).logits.cpu()
        assert (there.float() - needed.float()).norm() <= 0.05 * needed.float().norm()
        model.cpu()
        assert torch.equal(bits(model(ids_of(2, 7).cpu()).logits), bits(needed))
