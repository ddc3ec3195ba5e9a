"""What says that it requires a gradient, as the plain weight does, and gets none: nor is one computed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from support.models import assert_same_bits, torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tpde.nn import pack_module, packed_modules

WIDTH = 257  # with which kernels for batches and for rows differ in the last bits

SHAPES: dict[str, Callable[[], Any]] = {
    "a row": lambda: torch.randn(WIDTH),
    "rows": lambda: torch.randn(15, WIDTH),
    "a batch": lambda: torch.randn(3, 5, WIDTH),
    "a batch of batches": lambda: torch.randn(2, 3, 5, WIDTH),
    "a strided batch": lambda: torch.randn(2, 4, WIDTH).transpose(0, 1),
    "strided rows": lambda: torch.randn(WIDTH, 15).t(),
    "a part": lambda: torch.randn(3, 9, WIDTH)[:, ::2],
    "no rows": lambda: torch.randn(0, 5, WIDTH),
    # Contiguous by its sizes, and not rows by its strides.
    "one sequence, its batch last": lambda: torch.randn(1, 5, WIDTH).transpose(0, 1),
    "one of each batch": lambda: torch.randn(2, 1, 3, WIDTH).transpose(0, 1),
    "one row, transposed": lambda: torch.randn(5, 1, WIDTH).transpose(0, 1),
}


def models(bias: bool, block: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(WIDTH, 129, bias=bias), nn.Linear(129, 127, bias=bias))
    if block:
        plain = nn.Sequential(plain, nn.LayerNorm(127))
    ours = pack_module(copy.deepcopy(plain), min_bytes=0)
    assert len(list(packed_modules(ours))) == 2
    return plain, ours


def passed(model: Any, x: Any) -> tuple[Any, int]:
    with FlopCounterMode(display=False) as counter:
        out = model(x)
        out.square().sum().backward()
    return out, counter.get_total_flops()


@pytest.mark.parametrize("block", [False, True], ids=["layers", "block"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_have_the_plain_models_bits(shape: str, bias: bool, block: bool) -> None:
    plain, ours = models(bias, block)
    given = SHAPES[shape]()
    x, y = (given.detach().requires_grad_() for _ in range(2))
    (expected, _), (found, _) = passed(plain, x), passed(ours, y)
    assert_same_bits(found, expected)
    assert_same_bits(y.grad, x.grad)
    assert found.requires_grad
    named = dict(plain.named_parameters())
    for name, it in ours.named_parameters():
        if it.dim() == 1:
            assert_same_bits(it.grad, named[name].grad)


@pytest.mark.parametrize("block", [False, True], ids=["layers", "block"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", ["rows", "a batch"])
def test_no_gradient_of_a_packed_weight_is_computed(shape: str, bias: bool, block: bool) -> None:
    plain, ours = models(bias, block)
    for it in plain.parameters():
        it.requires_grad_(it.dim() == 1)
    x = SHAPES[shape]().requires_grad_()
    assert passed(ours, x)[1] == passed(plain, x)[1]


def test_results_say_what_the_plain_ones_say() -> None:
    plain, ours = models(bias=False, block=True)
    x = SHAPES["rows"]()
    assert ours(x).requires_grad is plain(x).requires_grad is True
    with torch.no_grad():
        assert not ours(x).requires_grad
