"""Embeddings with packed weights, of which only those rows are decoded that are asked for."""

from __future__ import annotations

import dis
import inspect
import itertools
import sys
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional

from tpde.nn.group import GroupSlot
from tpde.weights.functions import Packed
from tpde.weights.transforms import refuse_trace, transformed


def unpatched(kind: type[nn.Module]) -> Any:
    """The forward pass that a class got where it is defined; None if somebody's is in its place."""
    found = kind.forward
    return found if getattr(found, "__globals__", None) is vars(sys.modules[kind.__module__]) else None


_FORWARD = unpatched(nn.Embedding)
# What that calls, if it is PyTorch's own.
_OWN = getattr(functional.embedding, "__globals__", None) is vars(functional)
_EMBEDDING = functional.embedding if _OWN else None


def uses_super(function: Any) -> bool:
    """Whether a method calls the same one of its parent class."""
    return "__class__" in inspect.unwrap(function).__code__.co_freevars


def sets_attributes(function: Any) -> bool:
    """Whether a method sets or deletes attributes of its object, in its own code."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return False
    for before, it in itertools.pairwise(dis.get_instructions(code)):
        if it.opname in ("STORE_ATTR", "DELETE_ATTR"):
            loaded = before.argval[-1] if isinstance(before.argval, tuple) else before.argval
            if loaded in code.co_varnames[:1]:
                return True
    return False


def gathers(kind: type) -> bool:
    """Whether a class is an embedding that looks rows up as `nn.Embedding` does."""
    if not issubclass(kind, nn.Embedding):
        return False
    before = kind.__mro__[: kind.__mro__.index(nn.Embedding)]
    return all(uses_super(vars(it)["forward"]) for it in before if "forward" in vars(it))


class PackedEmbedding(nn.Embedding):
    """Decodes the rows asked for.

    Last among the bases, so that classes that wrap `nn.Embedding.forward` keep what they do with its result.
    """

    tpde_slots: dict[str, GroupSlot]

    def forward(self, input: Tensor) -> Tensor:
        """Rows of the packed weight."""
        slot = self.tpde_slots["weight"]
        if nn.Embedding.forward is not _FORWARD or self.max_norm is not None:  # patched, or set, maybe since
            return super().forward(input)
        if functional.embedding is not _EMBEDDING:  # likewise; PyTorch's calls it again for a packed weight
            weight = self.weight.plain() if isinstance(self.weight, Packed) else self.weight
            rest = self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
            return functional.embedding(input, weight, *rest)
        # Compiled, nobody asks for another tensor in the weight's place: the compiler fails where a weight
        # was read before it comes to a module that has it, too, such as a head or a whole model.
        if is_compiling():
            return cast(Tensor, torch.ops.tpde.embedding(input, slot.key, slot.shape[1], slot.dtype))
        if self._parameters.get("weight") is not slot.parameter:  # `torch.func.functional_call`
            return super().forward(input)
        if not isinstance(input, Tensor):
            refuse_trace(slot.packed.name)
            return super().forward(input)
        if transformed():
            return super().forward(input)
        if torch._C._is_torch_function_mode_enabled():  # which is to see the call
            return super().forward(input)
        return slot.rows(input)
