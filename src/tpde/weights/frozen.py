"""Making decoded weights look to PyTorch as the plain ones do, without their being trained.

PyTorch chooses kernels by whether a weight requires a gradient, even where none is computed: `at::matmul`
folds a strided input's batch into its rows then, and else does not. So a decoded weight says what the plain
one says. But no gradient of it may be computed, which would take time and come to nothing. What does both is
a view that was made while gradients were off, of a tensor that requires one: it says that it requires a
gradient, and autograd finds no edge to follow. `F.linear` makes a view of that again, which has one: see
`linear`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, is_grad_enabled
from torch.nn import functional


@contextmanager
def aside() -> Iterator[None]:
    """Call operators that are not the model's.

    Weights have views once, not in each pass: selective checkpointing, which counts what a mode sees, would
    take others' results for theirs in the second one.
    """
    with torch.inference_mode(False), torch.no_grad(), torch._C._DisableTorchDispatch():
        yield


def as_weight(flat: Tensor, dtype: torch.dtype, shape: torch.Size, requires_grad: bool) -> Tensor:
    """Bytes as a weight that says whether it requires a gradient, and gets none.

    Parameters
    ----------
    flat : torch.Tensor
        One-dimensional, uint8, of the weight's size. Whoever writes to it later does so through another
        tensor, which counts versions of its own: to autograd, the weight has changed otherwise.
    dtype, shape
        Of the weight.
    requires_grad : bool
        What the plain weight says.

    Examples
    --------
    >>> weight = as_weight(torch.zeros(8, dtype=torch.uint8), torch.float32, torch.Size((1, 2)), True)
    >>> weight.requires_grad
    True
    >>> out = torch.nn.functional.linear(torch.ones(1, 2, requires_grad=True), weight)
    >>> out.sum().backward()
    >>> weight.grad is None
    True
    """
    with aside():
        weight = flat.view(dtype).view(shape)
        if not requires_grad:
            return weight
        leaf = weight.detach().requires_grad_(True)
        return leaf.view_as(leaf)


def without_gradient(weight: Tensor) -> Tensor:
    """The same memory as a weight that says that it requires no gradient."""
    with aside():
        return weight.detach()


def linear(x: Tensor, weight: Tensor, bare: Tensor | None, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear`, without a gradient of the weight.

    Of `weight.t()`, which `F.linear` makes, autograd finds an edge: the backward pass would compute the
    weight's gradient, which is as much as all else, and keep x for it. `at::matmul` asks what the weight says
    only if x has a batch that may not fold into its rows.

    Parameters
    ----------
    x, bias
        What the function takes.
    weight, bare : torch.Tensor
        The weight; the same from `without_gradient`, or None if it requires none.
    """
    if bare is not None and is_grad_enabled():
        trained = x.requires_grad or (bias is not None and bias.requires_grad)  # as is the result, then
        if trained and _folds(x):
            weight = bare
    return functional.linear(x, weight, bias)


def _folds(x: Tensor) -> bool:
    """Whether `F.linear` computes with x's rows, whatever the weight says: by strides, as `at::matmul` asks.

    That compares those of dimensions of one element, too, which `is_contiguous` passes over: of a batch of
    one sequence, transposed, they are others than of rows.
    """
    if x.dim() < 3:
        return True
    if not x.is_contiguous():
        return False
    if x.is_nested:  # has no strides, and is not asked for any
        return True
    sizes, steps = x.shape, x.stride()
    return all(steps[i] == sizes[i + 1] * steps[i + 1] for i in range(len(steps) - 2))


CONTIGUOUS = torch.contiguous_format
_OTHERS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by numbers of dimensions


def format_of(weight: Tensor) -> torch.memory_format:
    """The memory format of a plain weight: where a dimension is 1, it may be contiguous and have another."""
    if (other := _OTHERS.get(weight.dim())) is None:
        return CONTIGUOUS
    like = torch.empty(weight.shape, device="meta")
    strides = weight.stride()
    return other if like.stride() != strides == like.to(memory_format=other).stride() else CONTIGUOUS


def formatted(weight: Tensor, memory_format: torch.memory_format) -> Tensor:
    """A contiguous weight in a memory format, in memory of its own if that is another; see `as_weight`."""
    if memory_format is CONTIGUOUS:
        return weight
    with aside():
        made = weight.to(memory_format=memory_format)
        if not weight.requires_grad:
            return made
        leaf = made.requires_grad_(True)
        return leaf.as_strided(leaf.shape, leaf.stride())  # `view_as` makes new strides where a size is 1


class _Given(torch.autograd.Function):
    """Values that depend on nothing, and say that they do."""

    @staticmethod
    def forward(ctx: object, leaf: Tensor, values: list[Tensor]) -> Tensor:
        # Neither an argument nor a view, as rows in a larger buffer are: autograd refuses to change these.
        return values[0].data

    @staticmethod
    def backward(ctx: object, *grads: object) -> tuple[None, None]:
        return None, None


_leaves: dict[torch.device, Tensor] = {}


def as_looked_up(values: Tensor, requires_grad: bool) -> Tensor:
    """Values that were looked up in a weight, as the plain one gives them while gradients are recorded.

    Parameters
    ----------
    values : torch.Tensor
        Of a floating-point dtype, in memory of its own.
    requires_grad : bool
        What the plain weight says.
    """
    if not (requires_grad and torch.is_grad_enabled()):
        return values
    leaf = _leaves.get(values.device)
    if leaf is None:
        with torch.inference_mode(False):
            leaf = _leaves[values.device] = torch.zeros((), device=values.device, requires_grad=True)
    return cast(Tensor, _Given.apply(leaf, [values]))  # type: ignore[no-untyped-call]
