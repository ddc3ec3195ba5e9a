"""Models with deltas on a GPU: the fine-tunes' bits, what they take, and graphs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import checkpoint
from support.gpu import needs_cuda
from support.models import NAMES, assert_same_bits, make, outputs, torch
from support.small import IDS, Model
from support.tunes import tuned

import tpde
from tpde.errors import PackedWeight
from tpde.nn import add_deltas, pack_module, plain_state_dict

pytest.importorskip("cuda.core", reason="needs cuda-core")
pytestmark = needs_cuda


def models(dtype: Any = torch.bfloat16, **sizes: int) -> tuple[dict[str | None, Any], Any, dict[str, bytes]]:
    torch.manual_seed(5)
    base = Model(**sizes).to(dtype).eval()
    base.head.weight = torch.nn.Parameter(base.head.weight.detach().clone())
    plain = {None: base.to("cuda"), "math": tuned(base, 1), "law": tuned(base, 2)}
    deltas = {name: tpde.make_delta(base, plain[name]) for name in ("math", "law")}
    return plain, pack_module(copy.deepcopy(base), min_bytes=0), deltas


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("sizes", [{}, {"width": 512, "words": 3000, "blocks": 2}])
def test_bits(dtype: Any, sizes: dict[str, int]) -> None:
    plain, model, deltas = models(dtype, **sizes)
    add_deltas(model, deltas)
    ids = IDS.to("cuda")
    for name in ("math", "law", None, "math"):
        model.use(name)
        with torch.no_grad():
            assert_same_bits(model(ids), plain[name](ids), str(name))
        expected, found = plain[name].state_dict(), plain_state_dict(model)
        for key, value in expected.items():
            assert_same_bits(found[key], value, key)


def test_rows_under_several() -> None:
    plain, model, deltas = models(width=512, words=3000, blocks=2)
    add_deltas(model, deltas)
    ids = torch.arange(35, device="cuda").view(5, 7)
    for names in (["math", "law", "math", None, "law"], [None, "law", "math"], ["law"] * 4):
        model.use(names)
        took = ids[: len(names)]
        with torch.no_grad():
            found = model(took)
            for name in dict.fromkeys(names):
                rows = [row for row, it in enumerate(names) if it == name]
                assert_same_bits(found[rows], plain[name](took[rows]), str(name))
    model.use(["math", "law"])
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        _ = ids + 1  # PyTorch warns of empty graphs
        with pytest.raises(PackedWeight, match="under 2 deltas"):
            model(ids[:2])
    model.use("law")
    with torch.no_grad():
        assert_same_bits(model(ids), plain["law"](ids))


def test_generation_of_rows_under_several() -> None:
    base = make("llama", device="cuda")
    plain = {None: base, "math": tuned(base, 1), "law": tuned(base, 2)}
    model = tpde.pack_module(copy.deepcopy(base), min_bytes=0)
    add_deltas(model, {it: tpde.make_delta(base, plain[it]) for it in ("math", "law")})
    names, options = ["math", None, "math", "law"], {"max_new_tokens": 6, "do_sample": False}
    model.use(names)
    ids = torch.arange(2, 26, device="cuda").view(4, 6)
    found = model.generate(ids, pad_token_id=0, **options)
    for name in dict.fromkeys(names):
        rows = [row for row, it in enumerate(names) if it == name]
        assert torch.equal(found[rows], plain[name].generate(ids[rows], pad_token_id=0, **options))


def test_moved_to_the_cpu_and_back() -> None:
    plain, model, deltas = models()
    add_deltas(model, deltas)
    model.use("math")
    model.to("cpu")
    with torch.no_grad():
        assert_same_bits(model(IDS), plain["math"].cpu()(IDS))
        model.to("cuda").use("law")
        assert_same_bits(model(IDS.to("cuda")), plain["law"](IDS.to("cuda")))


@pytest.mark.parametrize("name", NAMES)
def test_from_pretrained(name: str, tmp_path: Path) -> None:
    base = checkpoint(tmp_path, name)
    tuned(make(name), 1).save_pretrained(tmp_path / "math")
    for file in base.plain.iterdir():
        if not (tmp_path / "math" / file.name).exists():
            (tmp_path / "math" / file.name).write_bytes(file.read_bytes())
    tpde.diff(base.plain, tmp_path / "math", tmp_path / "delta")
    model = tpde.from_pretrained(base.packed, device="cuda", deltas={"math": tmp_path / "delta"})
    for called, folder in (("math", tmp_path / "math"), (None, base.plain)):
        model.use(called)
        plain = base.kind.from_pretrained(folder).to("cuda")
        with torch.no_grad():
            assert_same_bits(outputs(name, model, 2, "cuda"), outputs(name, plain, 2, "cuda"), name)


def test_updates() -> None:
    plain, model, _ = models(width=512, words=3000, blocks=2)
    states, ids = [plain[None]], IDS.to("cuda")
    for step in range(11):
        states.append(tuned(states[-1], 100 + step, share=0.002, dense=1000))
        delta = tpde.make_delta(states[-2], states[-1])
        assert tpde.apply_delta(model, delta) > 0
        assert tpde.apply_delta(model, delta) == 0
        with torch.no_grad():
            assert_same_bits(model(ids), states[-1](ids))


def test_gradients() -> None:
    plain, model, deltas = models(width=512, words=300, blocks=1)
    add_deltas(model, deltas)
    model.use("math")
    for it in (plain["math"], model):
        it.requires_grad_(False)
    found = []
    for it in (plain["math"], model):
        x = torch.ones(2, 3, 512, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        loss = it.blocks[0].down(torch.relu(it.blocks[0].up(x))).sum()
        if it is model:
            model.use("law")
        loss.backward()
        found.append(x.grad)
    assert_same_bits(found[1], found[0])


def test_a_recorded_graph() -> None:
    plain, model, deltas = models()
    add_deltas(model, deltas)
    model.use("math")
    ids = IDS.to("cuda")
    with torch.no_grad():
        for _ in range(3):
            model(ids)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(ids)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(out, plain["math"](ids))
    with pytest.raises(PackedWeight, match="CUDA graph"):
        model.use("law")
    graph.replay()
    torch.cuda.synchronize()
    with torch.no_grad():
        assert_same_bits(out, plain["math"](ids))


def test_memory() -> None:
    """What eight deltas are counted to take, they take; and no more while they are decoded than was said.

    The embedding is a small part, as of large models: its changes are held in two forms.
    """
    torch.manual_seed(5)
    base = Model(width=2048, words=1024, blocks=4).to(torch.bfloat16).eval()
    deltas = {}
    for seed in range(8):
        made, draw = copy.deepcopy(base), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for it in made.parameters():
                it.view(torch.int16)[torch.rand(it.shape, generator=draw) < 0.035] += 1
        deltas[str(seed)] = tpde.make_delta(base, made)
    plain = sum(it.nbytes for it in base.parameters())
    model = pack_module(base.to("cuda"))
    ids = torch.arange(512, device="cuda").view(2, -1)
    with torch.no_grad():
        model(ids)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        add_deltas(model, deltas)
        model.use("3")
        model(ids)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        model(ids)
        torch.cuda.synchronize()
    assert held < 0.15 * plain
    assert model.tpde_deltas.nbytes < 0.15 * plain
    assert torch.cuda.max_memory_allocated() - before - held < 200 << 20
