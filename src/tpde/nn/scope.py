"""Scopes: from where a block or a module starts until it returns, its weights may be in the workspace.

The outermost scope of a thread holds the workspace's lock, so that threads take turns block by block, and clears what
it left when it closes: a CUDA graph that is replayed later writes to the workspace without this code running, so
nothing in it is relied on twice. A scope of another group inside an open one leaves the workspace alone.

While gradients are recorded, a scope keeps views of the workspace out of autograd's graph: they are replaced by the
weights' names, and decoded again for the backward pass. Autograd's own formulas do the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tpde.nn.group import Group, Workspace
from tpde.nn.slot import Slot


class _Again(NamedTuple):
    """A saved view of a weight: where it lies in it."""

    slot: Slot
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int  # in elements


class _Passed(NamedTuple):
    """What hooks that were there before made of a tensor, and the one that turns it back."""

    value: Any
    back: Callable[[Any], Tensor]


class _Saver:
    """The pair of hooks of one scope. Only the innermost pair is called: these call the ones before."""

    def __init__(self, space: Workspace) -> None:
        self._space = space
        self._before = _top_hooks()

    def pack(self, tensor: Tensor) -> Any:
        space = self._space
        if tensor.device == space.device and tensor.layout is torch.strided:
            address = tensor.data_ptr()
            if space.start <= address < space.end and space.group is not None:
                slot = space.group.at(address)
                if slot is not None:
                    offset = (address - space.start - slot.offset) // tensor.dtype.itemsize
                    return _Again(slot, tensor.dtype, tensor.shape, tensor.stride(), offset)
        if self._before is not None:
            return _Passed(self._before[0](tensor), self._before[1])
        return tensor

    @staticmethod
    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, _Again):
            with torch.no_grad():
                flat = saved.slot.fresh().view(-1).view(saved.dtype)
                return flat.as_strided(saved.shape, saved.stride, saved.offset)
        if isinstance(saved, _Passed):
            return saved.back(saved.value)
        tensor: Tensor = saved
        return tensor


def _top_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """The innermost hooks on saved tensors, such as those of activation checkpointing."""
    ask = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if ask is None else ask(False)


def _ours_on_top(space: Workspace) -> bool:
    top = _top_hooks()
    owner = getattr(top[0], "__self__", None) if top is not None else None
    return isinstance(owner, _Saver) and owner._space is space


class Scope:
    """An open scope; `close` must be called by the same thread.

    Parameters
    ----------
    group : Group
        Whose weights may be put in the workspace.
    owner : object
        Who opened it.
    """

    def __init__(self, group: Group, owner: object) -> None:
        self.space, self.owner = group.workspace, owner
        self.space.lock.acquire()
        self.space.scopes.append(self)
        if len(self.space.scopes) == 1:
            self.space.thread, self.space.group = get_ident(), group
        self._hooks: saved_tensors_hooks | None = None
        if torch.is_grad_enabled():
            saver = _Saver(self.space)
            self._hooks = saved_tensors_hooks(saver.pack, saver.unpack)
            self._hooks.__enter__()

    def close(self) -> None:
        """Leave the workspace to others."""
        space = self.space
        if self._hooks is not None:
            self._hooks.__exit__()
        space.scopes.pop()
        if not space.scopes:
            space.whole, space.group, space.thread = False, None, 0
            space.some.clear()
        space.lock.release()


def is_open(group: Group) -> bool:
    """Whether this thread has a scope of this group open, whose views autograd would not keep."""
    space = group.workspace
    if space.thread != get_ident() or space.group is not group:
        return False
    return not torch.is_grad_enabled() or _ours_on_top(space)


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The tensor that a module was called with, as a constant for autograd."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.detach()
    raise TypeError("a module with packed weights was compiled that is called without a tensor")


class OpenBlock:
    """A forward pre-hook of a block: opens a scope and decodes the block's weights, all at once."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        group = self.group
        if torch.compiler.is_compiling():
            if not torch.is_grad_enabled():
                group.flat = torch.ops.tpde.materialize(first_tensor(args, kwargs), group.key)
            return
        scope = Scope(group, self)
        if len(scope.space.scopes) == 1:
            group.fill()


class CloseBlock:
    """A forward hook of a block: closes the scope, whether the block succeeded or failed."""

    def __init__(self, opener: OpenBlock) -> None:
        self.opener = opener

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        group = self.opener.group
        if torch.compiler.is_compiling():
            group.flat = None
            return
        # A hook that failed before ours opened the scope leaves none to close.
        space = group.workspace
        if space.thread == get_ident() and space.scopes and space.scopes[-1].owner is self.opener:
            space.scopes[-1].close()
