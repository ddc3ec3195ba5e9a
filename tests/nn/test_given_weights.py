"""Other tensors in the place of packed weights, as `torch.func.functional_call` puts them there."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
from support.models import assert_same_bits, torch
from support.small import IDS, Block, Model, nn
from torch.func import functional_call

from tpde.errors import PackedWeight
from tpde.nn import finish, pack_module, packed_modules, set_kernels

BACKENDS = [None, "eager", "aot_eager"]
X = torch.randn(3, 64).bfloat16()
IMAGE = torch.randn(1, 8, 8, 64).bfloat16()
TOKENS = torch.arange(6).reshape(2, 3)


class Doubled(nn.Linear):
    """A class of its own, which the compiler gets another way under gradients."""

    def forward(self, x: Any) -> Any:
        return nn.functional.linear(x, self.weight, self.bias) * 2


def tiled(model: Any) -> Any:
    for _, module in packed_modules(model):
        module.tpde_slots["weight"].packed.tile_bytes = 32 << 10
    return finish(model)


MADE = {
    "layer": (lambda: nn.Linear(64, 300), X, lambda model: model),
    "block": (lambda: nn.ModuleList([Block(64)]), X, lambda model: model),
    "fused": (lambda: nn.ModuleList([Block(64)]), X, lambda model: set_kernels(model, "fused")),
    "tiles": (lambda: nn.Linear(64, 700), X, tiled),
    "own class": (lambda: Doubled(64, 64), X, lambda model: model),
    "embedding": (lambda: nn.Embedding(300, 64), TOKENS, lambda model: model),
    "convolution": (lambda: nn.Conv2d(8, 64, 3), IMAGE, lambda model: model),
}


def made(name: str) -> tuple[Any, Any, Any]:
    """A plain module, the packed one, and what they take."""
    make, x, change = MADE[name]
    torch.manual_seed(0)
    plain = make().to(torch.bfloat16)
    packed = change(pack_module(copy.deepcopy(plain), min_bytes=0))
    return (plain[0], packed[0], x) if isinstance(plain, nn.ModuleList) else (plain, packed, x)


def others(module: Any) -> dict[str, Any]:
    found = {name: it for name, it in module.named_parameters() if it.dim() > 1}
    return {name: torch.randn_like(it).requires_grad_() for name, it in list(found.items())[:1]}


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MADE)
def test_what_is_given_is_used(name: str, backend: str | None, gradients: bool) -> None:
    """In the program, and around one that was compiled for the packed weights."""
    torch.compiler.reset()
    if name == "embedding" and backend is not None:
        pytest.skip("compiled embeddings do not ask: see `PackedEmbedding`")
    plain, packed, x = made(name)
    given = others(plain)
    key = next(iter(given))
    run: Any = functools.partial(functional_call, packed)
    compiled = packed
    if backend is not None:
        compiled = torch.compile(packed, backend=backend, fullgraph=True)
        run = torch.compile(lambda *it: functional_call(packed, *it), backend=backend, fullgraph=True)
    prefix = "" if backend is None else "_orig_mod."
    with torch.set_grad_enabled(gradients):
        expected = functional_call(plain, given, (x,))
        before = compiled(x)
        assert torch.equal(before, plain(x)) is not torch.equal(before, expected)
        assert torch.equal(functional_call(compiled, {prefix + key: given[key]}, (x,)), expected)
        found = run(given, (x,))
    assert torch.equal(found, expected)
    if gradients:
        grads = [torch.autograd.grad(out.square().sum(), given[key])[0] for out in (found, expected)]
        assert torch.equal(*grads)
    assert torch.equal(compiled(x), before)


def test_compiled_tied_weights_are_refused() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    plain = Model().to(torch.bfloat16)
    packed = pack_module(copy.deepcopy(plain), min_bytes=0)
    given = torch.randn_like(plain.embed.weight)
    compiled = torch.compile(packed, backend="eager")
    with torch.no_grad():
        assert_same_bits(compiled(IDS), plain(IDS))
        with pytest.raises(PackedWeight, match=r"`embed\.weight` is packed and tied.*without `torch"):
            functional_call(compiled, {"_orig_mod.embed.weight": given}, (IDS,))
        expected = functional_call(plain, {"embed.weight": given}, (IDS,))
        assert_same_bits(functional_call(packed, {"embed.weight": given}, (IDS,)), expected)
        assert_same_bits(compiled(IDS), plain(IDS))


def test_an_embedding_that_is_called_before_its_model_compiles() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    plain = Model().to(torch.bfloat16)
    packed = pack_module(copy.deepcopy(plain), min_bytes=0)

    def run(model: Any) -> Any:
        return model.embed(IDS).sum() + model(IDS)

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert_same_bits(compiled(packed), run(plain))


def test_export_is_refused() -> None:
    packed = pack_module(nn.Sequential(nn.Linear(64, 300)).to(torch.bfloat16), min_bytes=0)
    with pytest.raises(PackedWeight, match=r"torch\.export"):
        torch.export.export(packed, (X,))
