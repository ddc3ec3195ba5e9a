"""Rows under several states where calls are recorded: by autograd, compilers, traces and CUDA graphs."""

from __future__ import annotations

import copy

import pytest
from support.models import assert_same_bits
from support.row_tunes import IDS, Tunes, make
from support.small import torch
from support.tunes import tuned

import tpde
from tpde.errors import InvalidInput, PackedWeight
from tpde.nn import add_deltas, pack_module


def test_gradients_flow_where_no_plain_parameter_changes() -> None:
    torch.manual_seed(5)
    base = torch.nn.Sequential(torch.nn.Linear(64, 256, bias=False), torch.nn.Linear(256, 64, bias=False))
    plain = {None: base, "math": tuned(base, 1, dense=100), "law": tuned(base, 2, dense=100)}
    for it in plain.values():
        it.requires_grad_(False)
    packed = pack_module(copy.deepcopy(base), min_bytes=0)
    add_deltas(packed, {it: tpde.make_delta(base, plain[it]) for it in ("math", "law")})
    names = ["math", "law", None, "math"]
    packed.use(names)
    x = torch.randn(4, 64, requires_grad=True)
    packed(x).square().sum().backward()
    packed.use(None)
    for name, model in plain.items():
        rows = [i for i, it in enumerate(names) if it == name]
        own = x.detach()[rows].requires_grad_()
        model(own).square().sum().backward()
        assert_same_bits(x.grad[rows], own.grad, str(name))


def test_a_plain_parameter_that_autograd_keeps_is_missed(tunes: Tunes) -> None:
    tunes.packed.use(["math", "law"])
    loss = tunes.packed(IDS[:2]).sum()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|was changed by an in-place"):
        loss.backward()
    tunes.packed.use(["law", "law"])
    tunes.packed(IDS[:2]).sum().backward()  # one delta, which stays


def test_checkpointing_is_refused_where_it_would_fail(tunes: Tunes) -> None:
    model = tunes.packed
    model.use(["math", "law"])
    model.blocks[1].gradient_checkpointing = True
    tunes.check(["math", "law"])
    model(IDS[:2])  # in evaluation
    model.train()
    with pytest.raises(PackedWeight, match=r"`blocks\.1` does gradient checkpointing") as caught:
        model(IDS[:2])
    assert caught.value.where == "blocks.1"
    with torch.no_grad():
        model(IDS[:2])
    model.use("math")
    model(IDS[:2])


def test_compiled(tunes: Tunes) -> None:
    compiled = torch.compile(tunes.packed, backend="aot_eager")
    with torch.no_grad():
        for _ in range(2):
            tunes.packed.use("math")
            assert_same_bits(compiled(IDS), tunes.plain["math"](IDS))
            tunes.packed.use(["math", "law"])
            with pytest.raises(InvalidInput, match="was to be compiled"):
                compiled(IDS[:2])
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(tunes.packed, backend="aot_eager", fullgraph=True)(IDS[:2])


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler asks a block's input for it
def test_compiled_blocks(tunes: Tunes) -> None:
    for block in tunes.packed.blocks:
        block.compile(backend="aot_eager")
    for names in (["math", "law"], ["law", None, "math"], ["law"] * 2):
        tunes.packed.use(names)
        tunes.check(names)
    tunes.packed.use(["law", "math"])
    loss = tunes.packed(IDS[:2]).sum()
    with pytest.raises(InvalidInput, match="the same for all of them"):
        loss.backward()
    with pytest.raises(InvalidInput, match="by itself"):
        tunes.packed.blocks[0](torch.zeros(2, 64).bfloat16())


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_traced(tunes: Tunes) -> None:
    plain = make(pack=False, blocks=1)
    plain.packed.use("math")
    traced = torch.jit.trace(plain.packed, IDS)
    with torch.no_grad():
        assert_same_bits(traced(IDS), plain.plain["math"](IDS))
    for model in (tunes.packed, plain.packed):
        model.use(["math", "law"])
        with pytest.raises((PackedWeight, InvalidInput), match=r"torch\.jit\.trace|each of 2 rows"):
            torch.jit.trace(model, IDS[:2])
    plain.check(["math", "law"])


def test_graphs_of_several_are_not_recorded(tunes: Tunes, monkeypatch: pytest.MonkeyPatch) -> None:
    tunes.packed.use(["math", "law"])
    monkeypatch.setattr("tpde.nn.passes.capturing", lambda device: True)
    with pytest.raises(PackedWeight, match="under 2 deltas"):
        tunes.packed(IDS[:2])
    tunes.packed.use(["law", "law"])
    tunes.check(["law", "law"])
    monkeypatch.undo()
    tunes.packed.use("math")
    tunes.check(["math"])


def test_a_recorded_graph_is_not_left_behind(tunes: Tunes, monkeypatch: pytest.MonkeyPatch) -> None:
    tunes.packed.use(["math", "law"])
    monkeypatch.setattr("tpde.weights.changed.capturing", lambda device: True)
    with pytest.raises(PackedWeight, match="recorded with the weights of 'math'"):
        tunes.packed(IDS[:2])
    monkeypatch.undo()
    for names in (["law"], "law", None):
        with pytest.raises(PackedWeight, match="CUDA graph was recorded"):
            tunes.packed.use(names)
