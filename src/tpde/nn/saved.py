"""Keeping views of the workspace out of autograd's graph.

A saved view is replaced by the weight's name, and decoded again for the backward pass. Autograd's own
formulas do the rest, so that gradients have the bits that they have with plain weights.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpde.nn.slot import Slot
from tpde.nn.workspace import Workspace
from tpde.weights.active_delta import ActiveDelta
from tpde.weights.packed_tensor import PackedTensor
from tpde.weights.parameter import PackedParameter


class _Again(NamedTuple):
    """A saved view of a weight: where it lies in it."""

    slot: Slot[Any]
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int  # in elements
    conjugated: bool  # by a bit of the tensor, not in memory; the next one is another
    negated: bool
    active_delta: ActiveDelta | None  # by whose name then the weight is decoded
    name: str | None
    updates: int  # of the weight until then

    def again(self) -> Tensor:
        """The view, decoded anew."""
        _require_updates(self.slot.packed, self.updates)
        with nullcontext() if self.active_delta is None else self.active_delta.at(self.name):
            return self._again()

    def _again(self) -> Tensor:
        if self.slot.experts is not None:  # one of many, mostly
            made = self.alone()
        else:
            flat = self.slot.instead().view(-1).view(self.dtype)
            made = flat.as_strided(self.shape, self.stride, self.offset)
        if self.conjugated:
            made = made.conj()
        return torch._neg_view(made) if self.negated else made

    def alone(self) -> Tensor:
        """The view, without the rest of the weight."""
        steps = zip(self.shape, self.stride, strict=True)
        count = sum((size - 1) * step for size, step in steps) + 1 if self.shape.numel() else 0
        size = self.dtype.itemsize
        flat = self.slot.span_instead(self.offset * size, (self.offset + max(count, 1)) * size)
        return flat.view(self.dtype).as_strided(self.shape, self.stride)


class _Packed(NamedTuple):
    """A weight that was saved as it is packed: an embedding's, or one that is multiplied so."""

    parameter: PackedParameter
    active_delta: ActiveDelta | None  # these three as above
    name: str | None
    updates: int

    def again(self) -> Tensor:
        """The weight, decoded."""
        _require_updates(self.parameter.packed, self.updates)
        with nullcontext() if self.active_delta is None else self.active_delta.at(self.name):
            return self.parameter.plain()


def _require_updates(packed: PackedTensor, updates: int) -> None:
    """Refuse a weight that was updated since.

    Raises
    ------
    RuntimeError
        As PyTorch does, naming the weight.
    """
    if packed.updates != updates:
        raise RuntimeError(
            f"`{packed.name}`, a packed weight that the backward pass needs, was updated since: compute "
            "the forward pass again"
        )


class _Kept(NamedTuple):
    """A tensor that is no weight, and its version then: autograd checks none where there are hooks."""

    tensor: Tensor
    version: int

    def unchanged(self) -> Tensor:
        """The tensor, if nobody has written to it since."""
        now = self.tensor._version
        if now != self.version:
            raise RuntimeError(
                f"a {self.tensor.dtype} tensor of shape {list(self.tensor.shape)} that the backward pass "
                f"needs was changed by an in-place operation: version {now}, {self.version} was saved"
            )
        return self.tensor


class _Passed(NamedTuple):
    """What hooks that were there before made of a tensor, and the one that turns it back."""

    value: Any
    back: Callable[[Any], Tensor]


class Saver:
    """The pair of hooks of one scope. Only the innermost pair is called: these call the ones before."""

    def __init__(self, space: Workspace) -> None:
        self._space = space
        self._before = _top_hooks()

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps in the place of a tensor."""
        space = self._space
        if isinstance(tensor, PackedParameter):
            packed, active_delta = tensor.packed, tensor.packed.active_delta
            name = None if active_delta is None else active_delta.now()
            return _Packed(tensor, active_delta, name, packed.updates)
        if tensor.device == space.device and tensor.layout is torch.strided:
            found = space.whose(tensor)
            if found is not None:
                slot, begin = found
                bits, active_delta = (tensor.is_conj(), tensor.is_neg()), slot.packed.active_delta
                name = None if active_delta is None else active_delta.now()
                where = tensor.dtype, tensor.shape, tensor.stride(), begin // tensor.dtype.itemsize
                return _Again(slot, *where, *bits, active_delta, name, slot.packed.updates)
        if self._before is not None:
            return _Passed(self._before[0](tensor), self._before[1])
        # Not the tensor itself: an operator that saves its result would be in a cycle that nothing breaks.
        return _Kept(tensor.detach(), tensor._version)

    @staticmethod
    def unpack(saved: Any) -> Tensor:
        """The tensor again."""
        if isinstance(saved, (_Again, _Packed)):
            with torch.no_grad():
                return saved.again()
        if isinstance(saved, _Passed):
            return saved.back(saved.value)
        kept: _Kept = saved
        return kept.unchanged()


def _top_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """The innermost hooks on saved tensors, such as those of activation checkpointing."""
    ask = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if ask is None else ask(False)


def is_top(saver: Saver) -> bool:
    """Whether the innermost hooks on saved tensors are these."""
    top = _top_hooks()
    return top is not None and getattr(top[0], "__self__", None) is saver


def saves(space: Workspace) -> bool:
    """Whether what autograd saves now goes through the hooks of this workspace."""
    top = _top_hooks()
    owner = getattr(top[0], "__self__", None) if top is not None else None
    return isinstance(owner, Saver) and owner._space is space
