"""Packed models within transforms of `torch.func`: what the plain ones give, bit for bit."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
from support.models import assert_same_bits
from support.small import Block, torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

from tpde.errors import PackedWeight
from tpde.nn import finish, pack_module, set_kernels

X = torch.randn(5, 64, generator=torch.Generator().manual_seed(7))
IDS = torch.arange(10).reshape(5, 2)


def summed(model: Any) -> Any:
    return lambda x: model(x).square().sum()


def with_parameters(model: Any) -> Any:
    return lambda state, x: functional_call(model, state, (x,))


TRANSFORMS = {
    "grad": lambda model: grad(summed(model))(X),
    "vmap": lambda model: vmap(model)(X),
    "vmap, no gradients": lambda model: torch.no_grad()(vmap(model))(X),
    "vmap of grad": lambda model: vmap(grad(summed(model)))(X),
    "jvp": lambda model: jvp(model, (X,), (torch.ones_like(X),)),
    "vjp": lambda model: vjp(model, X)[1](torch.ones_like(model(X))),
    "jacrev": lambda model: jacrev(model)(X[0]),
    "jacfwd": lambda model: jacfwd(model)(X[0]),
    "hessian": lambda model: hessian(summed(model))(X[0]),
    "functional_call": lambda model: vmap(with_parameters(model), (None, 0))(
        dict(model.named_parameters()), X
    ),
    "per sample": lambda model: vmap(
        grad(lambda bias, x: functional_call(model, {"up.bias": bias}, (x,)).sum()), (None, 0)
    )(dict(model.named_parameters())["up.bias"].detach(), X),
    "ensemble": lambda model: vmap(with_parameters(model), (0, None))(
        stack_module_state([model, model])[0], X
    ),
}


def both(plain: Any) -> tuple[Any, Any]:
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(parameter.bfloat16())
    return plain, pack_module(copy.deepcopy(plain), min_bytes=0)


@pytest.mark.parametrize("block", [False, True], ids=["layers", "block"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str, block: bool) -> None:
    torch.manual_seed(0)
    plain, ours = both(nn.ModuleList([Block(64)]))
    if not block:
        ours = pack_module(copy.deepcopy(plain[0]), min_bytes=0)
    models = (plain[0], ours[0] if block else ours)
    expected, found = (torch.utils._pytree.tree_leaves(TRANSFORMS[name](it)) for it in models)
    assert_same_bits(found, expected)
    with torch.no_grad():
        assert_same_bits(models[1](X), models[0](X))  # the workspace is whole


def test_embeddings() -> None:
    plain, ours = both(nn.Embedding(50, 64))
    with torch.no_grad():
        assert_same_bits(vmap(ours)(IDS), vmap(plain)(IDS))


def test_a_transform_within_a_block() -> None:
    class Mapped(Block):
        def forward(self, x: Any) -> Any:
            return vmap(super().forward)(x)

    torch.manual_seed(0)
    plain, ours = both(nn.ModuleList([Mapped(64)]))
    given = [X.clone().requires_grad_() for _ in range(2)]
    results = [model[0](x) for model, x in zip((plain, ours), given, strict=True)]
    assert_same_bits(results[1], results[0])
    for result in results:
        result.square().sum().backward()
    assert_same_bits(given[1].grad, given[0].grad)


@pytest.mark.parametrize("work", [lambda f, x: vmap(f)(x), lambda f, x: jvp(f, (x,), (x,))[1]])
def test_a_transform_within_a_layer_outside_of_blocks(work: Any) -> None:
    """Which reads its weight there first."""

    class Within(nn.Linear):
        def forward(self, x: Any) -> Any:
            return work(lambda it: nn.functional.linear(it, self.weight).tanh(), x)

    torch.manual_seed(0)
    plain, ours = both(Within(64, 64))
    given = [X.clone().requires_grad_() for _ in range(2)]
    results = [model(x) for model, x in zip((plain, ours), given, strict=True)]
    assert_same_bits(results[1], results[0])
    for result in results:
        result.square().sum().backward()
    assert_same_bits(given[1].grad, given[0].grad)


def at_a_level(module: Any, x: Any = X) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(module(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


FORWARD_MODE = {
    "jvp": lambda module, x: torch.compile(
        lambda it: jvp(module, (it,), (torch.ones_like(it),))[1], backend="eager", fullgraph=True
    )(x),
    "around": lambda module, x: at_a_level(torch.compile(module, backend="eager", fullgraph=True), x),
}


class Doubled(nn.Linear):
    def forward(self, x: Any) -> Any:
        return nn.functional.linear(x, self.weight, self.bias) * 2


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("kernels", ["exact", "fused"])
@pytest.mark.parametrize("kind", [nn.Linear, Doubled])
@pytest.mark.parametrize("how", FORWARD_MODE)
def test_compiled_forward_mode(how: str, kind: Any, kernels: str, gradients: bool) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    plain, ours = both(kind(64, 192).to(torch.bfloat16 if kernels == "fused" else torch.float32))
    set_kernels(ours, kernels)
    with torch.set_grad_enabled(gradients):
        x = X.to(plain.weight.dtype)
        assert_same_bits(FORWARD_MODE[how](ours, x), FORWARD_MODE[how](plain, x))


@pytest.mark.parametrize("work", [at_a_level, lambda module: jvp(module, (X,), (X,))])
def test_forward_mode_is_refused_of_tiles(work: Any) -> None:
    ours = pack_module(nn.Linear(64, 700), min_bytes=0)
    ours.weight.packed.tile_bytes = 128 << 10
    finish(ours)
    with pytest.raises(PackedWeight, match=r"`weight` is packed .*no forward-mode.*reverse mode"):
        work(ours)
    assert ours(X).shape == (5, 700)


def test_refused_hooks_leave_the_workspace_to_others() -> None:
    plain, ours = both(nn.Linear(64, 64))
    with torch.autograd.graph.disable_saved_tensors_hooks("none"), pytest.raises(RuntimeError, match="none"):
        ours(X)
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(ours(X)), daemon=True)
    other.start()
    other.join(60)
    assert_same_bits(found[0], plain(X))
