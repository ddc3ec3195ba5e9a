"""Custom operators over packed weights, for `torch.compile` and CUDA graphs.

Eager code does not need them: it decodes with `Materializer` and calls the framework's own operators.
Compiled code must not see how a weight comes about, only that it depends on something computed just before,
and must never keep it.

A graph names weights by a *key*, a number, and not by their blobs: as inputs of a graph, blobs would be
copied into each CUDA graph's own memory, and guarded one by one. A unit gets a new key whenever its blobs
change or move, so that graphs compiled for the old ones are not used again. Where the compiler sees a second
number in the place of the first, it makes it an input: blocks that are compiled one by one then share a
graph. Whatever else a graph depends on, shapes and dtypes, is an argument too, and not asked of the unit: the
compiler keeps graphs on disk, and another process has other weights for the same keys.

`tpde::materialize(Tensor after, SymInt key, SymInt count, ScalarType dtype) -> Tensor`
    All weights of a unit in a fresh buffer of so many elements, computed after `after`. The buffers of a
    model's blocks are of one size, so that the allocator takes the same memory for all.
`tpde::linear(Tensor x, Tensor? bias, SymInt key, SymInt width, bool transposed, bool trained) -> Tensor`
    `x @ W.T + bias`, or `x @ W + bias`, of so many columns; of a weight in the window layout without decoding
    it, where that is faster. Keeps no weight for the backward pass, which decodes again. `trained` is what
    the plain weight says of gradients, of one in the window layout that the key alone stands for.
`tpde::tiled_linear(Tensor x, Tensor? bias, SymInt key, SymInt width, bool cast) -> Tensor`
    `x @ W.T + bias`, of so many columns, for a weight larger than any buffer, which is decoded, cast to the
    dtype of `x` if asked for, multiplied and forgotten a few rows at a time, here and in the backward pass.
`tpde::experts_linear(Tensor x, Tensor ids, Tensor? bias, SymInt key, SymInt width, SymInt tokens) -> Tensor`
    For each number of `ids`, as many for each row of x, that row times that expert of a weight in windows: so
    many columns, in a call of so many tokens. What needs a gradient is computed from decoded weights.
`tpde::embedding(Tensor ids, SymInt key, SymInt width, ScalarType dtype) -> Tensor`
    Rows of a matrix, of so many columns.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import ParamSpec, Protocol, cast

import torch
from torch import Tensor
from torch.library import Library, register_autograd
from torch.utils.flop_counter import register_flop_formula

from tpde.errors import InvalidInput
from tpde.weights.transforms import refuse_export

P = ParamSpec("P")


class KeyedWeights(Protocol):
    """What a key stands for: one weight, or all of a block."""

    def decode_into(self, out: Tensor) -> None:
        """Decode everything into a buffer of bytes, on the current stream."""

    def release(self) -> int:
        """Give the model's workspace up, whose memory the next buffer may then take."""


class KeyedWeight(Protocol):
    """One weight, with what the operators need that are called with its key."""

    def instead(self) -> Tensor:
        """The matrix, decoded."""

    def product(self, x: Tensor, bias: Tensor | None, trained: bool) -> Tensor:
        """`x @ W.T + bias`."""

    def tiles(self) -> Iterator[tuple[int, int, Tensor]]:
        """Rows of the matrix, a few at a time: the first, the one after the last, and they."""

    def experts_product(self, x: Tensor, ids: Tensor, per: int, bias: Tensor | None, tokens: int) -> Tensor:
        """Rows of x, times the experts that they are for."""

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the matrix."""


class _Kept(Protocol):
    """What a product keeps for its backward pass."""

    key: int
    unit: KeyedWeights | None
    width: int
    transposed: bool
    needs_input_grad: tuple[bool, ...]


# Not `torch.library.custom_op`: it looks for the module that calls it, twice an operator, among all that were
# imported. Beside transformers that takes 0.07 to 0.25 s, of the time to the first token.
_library = Library("tpde", "DEF")  # type: ignore[no-untyped-call]
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


def _operator(schema: str) -> Callable[[Callable[P, Tensor]], Callable[P, Tensor]]:
    """Define an operator; gives what calls it by way of PyTorch's dispatcher."""

    def define(work: Callable[P, Tensor]) -> Callable[P, Tensor]:
        name = _library.define(schema, tags=_TAGS)  # type: ignore[no-untyped-call]
        _library.impl(name, work, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        operator: Callable[P, Tensor] = getattr(torch.ops.tpde, name).default
        return operator

    return define


def _meta(name: str) -> Callable[[Callable[P, Tensor]], None]:
    """Say what an operator's results look like, to whatever traces programs: but for those that are kept."""

    def define(work: Callable[P, Tensor]) -> None:
        @functools.wraps(work)
        def like(*args: P.args, **kwargs: P.kwargs) -> Tensor:
            refuse_export()
            return work(*args, **kwargs)

        _library.impl(name, like, "Meta")  # type: ignore[no-untyped-call]

    return define


def _no_gradient(ctx: object, grad: Tensor) -> Tensor:
    raise NotImplementedError("gradients of gradients do not flow through packed weights")


_units: weakref.WeakValueDictionary[int, KeyedWeights] = weakref.WeakValueDictionary()
_numbers = itertools.count(2)  # the compiler makes no inputs of 0 and 1


def register(unit: KeyedWeights) -> int:
    """Give a unit a new key; it is valid as long as the unit lives."""
    key = next(_numbers)
    _units[key] = unit
    return key


def refuse(key: int) -> None:
    """Have a backward pass refused that is under way with a key."""
    _units.pop(key, None)


def renew(unit: KeyedWeights, key: int) -> int:
    """Give a unit another key: a backward pass that is under way with this one is refused."""
    refuse(key)
    return register(unit)


def _unit(key: int) -> KeyedWeights:
    unit = _units.get(int(key))
    if unit is None:
        raise InvalidInput(
            "a compiled graph or a backward pass uses packed weights that no longer exist, have other values "
            f"by now, or are under another delta (key {key})",
            hint="compute the forward pass anew, or compile the model again",
        )
    return unit


def _held(key: int) -> KeyedWeights | None:
    """What eager code keeps for a backward pass, as it keeps plain weights; tracers keep nothing."""
    return _units.get(key) if isinstance(key, int) else None


# An operator of one weight is called with the key of such a one.
_weight = cast(Callable[[int], KeyedWeight], _unit)


@_operator("materialize(Tensor after, SymInt key, SymInt count, ScalarType dtype) -> Tensor")
def materialize(after: Tensor, key: int, count: int, dtype: torch.dtype) -> Tensor:
    """Decode a unit into a fresh buffer."""
    unit = _unit(key)
    unit.release()
    flat = torch.empty(count, dtype=dtype, device=after.device)
    unit.decode_into(flat.view(torch.uint8))
    return flat


@_meta("materialize")
def _(after: Tensor, key: int, count: int, dtype: torch.dtype) -> Tensor:
    return after.new_empty((count,), dtype=dtype)


def _matrix(key: int, transposed: bool) -> Tensor:
    """The weight as `F.linear` takes it."""
    weight = _weight(key).instead()
    return weight.t() if transposed else weight


@_operator(
    "linear(Tensor x, Tensor? bias, SymInt key, SymInt width, bool transposed, bool trained=False) -> Tensor"
)
def linear(
    x: Tensor, bias: Tensor | None, key: int, width: int, transposed: bool, trained: bool = False
) -> Tensor:
    """Multiply by a packed weight."""
    if transposed:
        return torch.nn.functional.linear(x, _matrix(key, transposed), bias)
    return _weight(key).product(x, bias, trained)


@_meta("linear")
def _(
    x: Tensor, bias: Tensor | None, key: int, width: int, transposed: bool, trained: bool = False
) -> Tensor:
    return x.new_empty((*x.shape[:-1], width))


@_operator("linear_backward(Tensor grad, SymInt key, SymInt width, bool transposed) -> Tensor")
def linear_backward(grad: Tensor, key: int, width: int, transposed: bool) -> Tensor:
    """Gradient of `tpde::linear` with respect to `x`."""
    weight = _matrix(key, transposed)
    return grad.reshape(-1, grad.shape[-1]).mm(weight).view(*grad.shape[:-1], width)


@_meta("linear_backward")
def _(grad: Tensor, key: int, width: int, transposed: bool) -> Tensor:
    return grad.new_empty((*grad.shape[:-1], width))


def _keep(ctx: _Kept, inputs: tuple[Tensor, Tensor | None, int, int, bool, bool], output: Tensor) -> None:
    x, _, ctx.key, _, ctx.transposed, _ = inputs
    ctx.width, ctx.unit = x.shape[-1], _held(ctx.key)


def _linear_backward(ctx: _Kept, grad: Tensor) -> tuple[Tensor | None, ...]:
    x = linear_backward(grad, ctx.key, ctx.width, ctx.transposed) if ctx.needs_input_grad[0] else None
    bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
    return x, bias, None, None, None, None


register_autograd("tpde::linear", _linear_backward, setup_context=_keep, lib=_library)


def _keep_backward(ctx: _Kept, inputs: tuple[Tensor, int, int, bool], output: Tensor) -> None:
    grad, ctx.key, _, ctx.transposed = inputs
    ctx.width, ctx.unit = grad.shape[-1], _held(ctx.key)


def _twice_backward(ctx: _Kept, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of gradients: the product again, without a bias."""
    return linear(grad, None, ctx.key, ctx.width, ctx.transposed), None, None, None


register_autograd("tpde::linear_backward", _twice_backward, setup_context=_keep_backward, lib=_library)


@register_flop_formula(torch.ops.tpde.linear)
def _(x: torch.Size, bias: torch.Size | None, key: int, width: int, *args: object, **kwargs: object) -> int:
    """Counted as the plain product is."""
    return 2 * x.numel() * width


@register_flop_formula(torch.ops.tpde.linear_backward)
def _(grad: torch.Size, key: int, width: int, *args: object, **kwargs: object) -> int:
    return 2 * grad.numel() * width


@_operator("tiled_linear(Tensor x, Tensor? bias, SymInt key, SymInt width, bool cast) -> Tensor")
def tiled_linear(x: Tensor, bias: Tensor | None, key: int, width: int, cast: bool) -> Tensor:
    """Multiply by a packed weight, tile by tile."""
    out = x.new_empty((*x.shape[:-1], width))
    for begin, end, tile in _weight(key).tiles():
        rows = tile.to(x.dtype) if cast else tile
        out[..., begin:end] = torch.nn.functional.linear(x, rows, None if bias is None else bias[begin:end])
    return out


@_meta("tiled_linear")
def _(x: Tensor, bias: Tensor | None, key: int, width: int, cast: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], width))


@_operator("tiled_linear_backward(Tensor grad, SymInt key, SymInt width) -> Tensor")
def tiled_linear_backward(grad: Tensor, key: int, width: int) -> Tensor:
    """Gradient of `tpde::tiled_linear` with respect to `x`: the sum over tiles, in their order."""
    flat, total = grad.reshape(-1, grad.shape[-1]), None
    for begin, end, tile in _weight(key).tiles():
        part = flat[:, begin:end].mm(tile.to(grad.dtype))  # autocast multiplied in this dtype
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.view(*grad.shape[:-1], width)


@_meta("tiled_linear_backward")
def _(grad: Tensor, key: int, width: int) -> Tensor:
    return grad.new_empty((*grad.shape[:-1], width))


def _keep_tiled(ctx: _Kept, inputs: tuple[Tensor, Tensor | None, int, int, bool], output: Tensor) -> None:
    ctx.key, ctx.width, ctx.unit = inputs[2], inputs[0].shape[-1], _held(inputs[2])


def _tiled_backward(ctx: _Kept, grad: Tensor) -> tuple[Tensor | None, ...]:
    x = tiled_linear_backward(grad, ctx.key, ctx.width) if ctx.needs_input_grad[0] else None
    bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
    return x, bias, None, None, None


register_autograd("tpde::tiled_linear", _tiled_backward, setup_context=_keep_tiled, lib=_library)


@_operator(
    "experts_linear(Tensor x, Tensor ids, Tensor? bias, SymInt key, SymInt width, SymInt tokens) -> Tensor"
)
def experts_linear(x: Tensor, ids: Tensor, bias: Tensor | None, key: int, width: int, tokens: int) -> Tensor:
    """Multiply rows by the experts that they are for."""
    return _weight(key).experts_product(x, ids, len(ids) // max(len(x), 1), bias, tokens)


@_meta("experts_linear")
def _(x: Tensor, ids: Tensor, bias: Tensor | None, key: int, width: int, tokens: int) -> Tensor:
    return x.new_empty((ids.shape[0], width))


def _no_gradient_of_experts(ctx: object, grad: Tensor) -> Tensor:
    raise NotImplementedError("gradients do not flow through products with experts in the window layout")


register_autograd("tpde::experts_linear", _no_gradient_of_experts, lib=_library)


@register_flop_formula(torch.ops.tpde.experts_linear)
def _(
    x: torch.Size,
    ids: torch.Size,
    bias: torch.Size | None,
    key: int,
    width: int,
    *args: object,
    **kwargs: object,
) -> int:
    return 2 * ids[0] * x[1] * width


@_operator("embedding(Tensor ids, SymInt key, SymInt width, ScalarType dtype) -> Tensor")
def embedding(ids: Tensor, key: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows of a packed matrix."""
    return _weight(key).rows(ids)


@_meta("embedding")
def _(ids: Tensor, key: int, width: int, dtype: torch.dtype) -> Tensor:
    return ids.new_empty((*ids.shape, width), dtype=dtype)


for _name in ("materialize", "tiled_linear_backward"):
    register_autograd(f"tpde::{_name}", _no_gradient, lib=_library)
