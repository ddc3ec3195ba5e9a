"""Layers whose weights are in the window layout compute, on the CPU, what plain ones do."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
from support.fused import fuse, layer
from support.models import assert_same_bits
from support.small import IDS, torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import tpde
from tpde.errors import InvalidInput, PackedWeight
from tpde.nn import set_kernels
from tpde.weights.product import linear

functional = torch.nn.functional


def test_gradients_and_hooks(pair: Any, fused: Any) -> None:
    plain = pair[0]
    for rows in ((3,), (2, 5), (40, 3), ()):
        found = []
        for model in (plain, fused):
            x = torch.ones((*rows, 64)).bfloat16().requires_grad_()
            y = model.blocks[0].up(x)
            y.float().square().sum().backward()
            found.append((y, x.grad, model.blocks[0].up.bias.grad))
            model.zero_grad()
        for ours, theirs in zip(*found, strict=True):
            assert_same_bits(ours, theirs)


@pytest.mark.parametrize("what", ["dropped", "moved", "exact again"])
def test_a_backward_pass_holds_its_weights(what: str, pair: Any, fused: Any) -> None:
    """As autograd holds plain ones."""
    models, found = [copy.deepcopy(fused), pair[0]], []
    while models:
        model = models.pop()
        x = torch.linspace(-1, 1, 3 * 64).view(3, 64).bfloat16().requires_grad_()
        y = model.blocks[0].down(model.blocks[0].up(x)).float().square().sum()
        if what == "moved":
            model.share_memory()
        elif what == "exact again" and not models:
            set_kernels(model, "exact")
        elif what == "dropped":
            seen, model = weakref.ref(model), None
            gc.collect()
            assert models or seen() is None
        y.backward()
        found.append(x.grad)
    assert_same_bits(*found)


def test_a_backward_pass_with_updated_weights_is_refused(pair: Any, fused: Any) -> None:
    x = torch.ones(3, 64).bfloat16().requires_grad_()
    y = fused.blocks[0].up(x).sum()
    after = copy.deepcopy(pair[0])
    with torch.no_grad():
        after.blocks[0].up.weight[3] += 1
    tpde.apply_delta(fused, tpde.make_delta(pair[0], after))
    with pytest.raises(InvalidInput, match=r"have other values by now.*compute the forward pass anew"):
        y.backward()


def test_gradients_of_gradients(pair: Any, fused: Any) -> None:
    found = []
    for model in (pair[0], fused):
        x = torch.linspace(-1, 1, 3 * 64).view(3, 64).bfloat16().requires_grad_()
        y = torch.tanh(model.blocks[0].up(x)).float().square().sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        first.float().square().sum().backward()
        found.append((first, x.grad))
    for ours, theirs in zip(*found, strict=True):
        assert_same_bits(ours, theirs)


def test_other_inputs_are_computed_as_before(pair: Any, fused: Any) -> None:
    plain, ours = pair[0].blocks[0].up, fused.blocks[0].up
    x = torch.randn(4, 64)
    for lower in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", lower):
            assert_same_bits(ours(x), plain(x))
    for bad in (x, x.bfloat16()[:, :63], torch.randn(()).bfloat16(), x.bfloat16().to("meta")):
        with pytest.raises(RuntimeError):
            plain(bad)
        with pytest.raises(RuntimeError):
            ours(bad)
    for shape in ((0, 64), (2, 0, 64)):
        assert ours(torch.zeros(shape).bfloat16()).shape == (*shape[:-1], 192)


def test_autocast_casts_an_input_of_several_layers_once(pair: Any, fused: Any) -> None:
    """Its gradients are then added in the lower dtype."""
    found = []
    for model in (pair[0], fused):
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            sum(it.up(x).float().square().sum() for it in model.blocks).backward()
        found.append(x.grad)
    assert_same_bits(*found)


def test_transforms(pair: Any, fused: Any) -> None:
    plain, ours = pair[0].blocks[0].down, fused.blocks[0].down
    x, along = torch.randn(3, 192).bfloat16(), torch.randn(3, 192).bfloat16()
    assert_same_bits(torch.vmap(ours)(x), torch.vmap(plain)(x))
    for f, g in zip(*(torch.func.jvp(it, (x,), (along,)) for it in (ours, plain)), strict=True):
        assert_same_bits(f, g)
    grads = [torch.func.grad(lambda x, it=it: it(x).float().sum())(x) for it in (ours, plain)]
    assert_same_bits(*grads)
    with torch.autograd.forward_ad.dual_level():
        assert linear(ours.weight.packed, x, None, False) is None
        duals = [
            torch.autograd.forward_ad.unpack_dual(it(torch.autograd.forward_ad.make_dual(x, along))).tangent
            for it in (ours, plain)
        ]
    assert_same_bits(*duals)


def test_tracing_is_refused_and_replacing_is_not(fused: Any) -> None:
    x = torch.randn(3, 64).bfloat16()
    with pytest.raises(PackedWeight, match=r"torch\.jit\.trace"):
        torch.jit.trace(fused.blocks[0].up, x)
    given = {"weight": torch.ones(192, 64).bfloat16(), "bias": torch.zeros(192).bfloat16()}
    found = torch.func.functional_call(fused.blocks[0].up, given, (x,))
    assert_same_bits(found, functional.linear(x, given["weight"], given["bias"]))
    with pytest.raises(PackedWeight, match=r"torch\.export"):
        torch.export.export(fused, (IDS,))


def test_code_that_takes_the_parameter(pair: Any, fused: Any) -> None:
    plain, ours = pair[0].blocks[0].up, fused.blocks[0].up
    x = torch.randn(3, 64).bfloat16()
    assert_same_bits(functional.linear(x, ours.weight), functional.linear(x, plain.weight))
    named = functional.linear(input=x, weight=ours.weight, bias=ours.bias)
    assert_same_bits(named, functional.linear(x, plain.weight, plain.bias))
    assert_same_bits(x @ ours.weight.t(), x @ plain.weight.t())
    assert_same_bits(functional.linear(ours.weight, x), functional.linear(plain.weight, x))


def test_whoever_records_operators_sees_the_product(fused: Any) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Recording():
        fused.blocks[0].up(torch.randn(3, 64).bfloat16())
    assert "tpde.linear.default" in seen


def test_fake_inputs_have_fake_outputs(pair: Any, fused: Any) -> None:
    """Where sizes alone are asked for: weights are decoded as they are."""
    for model in (*pair, fused):
        with FakeTensorMode(allow_non_fake_inputs=True):
            found = model.blocks[0].up(torch.empty(3, 64, dtype=torch.bfloat16))
        assert type(found) is FakeTensor
        assert found.shape == (3, 192)
    assert_same_bits(fused(IDS), pair[0](IDS))


def test_compiled(pair: Any, fused: Any) -> None:
    plain, ours = pair[0].blocks[0].up, fused.blocks[0].up
    x = torch.randn(3, 64).bfloat16()
    made = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_same_bits(made(x), plain(x))
    found = []
    for it in (made, plain):
        given = x.clone().requires_grad_()
        y = it(given)
        y.float().sum().backward()
        found.append((y, given.grad))
    for mine, theirs in zip(*found, strict=True):
        assert_same_bits(mine, theirs)
    for lower in (torch.bfloat16, torch.float16):
        with torch.no_grad(), torch.autocast("cpu", lower):
            assert_same_bits(
                torch.compile(ours, fullgraph=True, backend="aot_eager")(x.float()), plain(x.float())
            )


def test_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is larger than a strip is decoded and multiplied strip by strip."""
    plain = layer(300, 64)
    made = fuse(plain)
    source = made.weight.packed.sources[0]
    monkeypatch.setattr(source, "strip_bytes", 48 * 64 * 2)
    x = torch.randn(2, 50, 64).bfloat16()
    with torch.no_grad():
        found, needed = source._in_strips(x, made.bias), plain(x)
    assert torch.allclose(found.float(), needed.float(), atol=1e-2)  # the library's kernels depend on sizes
