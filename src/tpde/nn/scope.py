"""Scopes: from where a block or a module starts until it returns, its weights may be in the workspace.

The outermost scope of a thread holds the workspace's lock, so that threads take turns block by block, and
clears what it left when it closes: a CUDA graph that is replayed later writes to the workspace without this
code running, so nothing in it is relied on twice. A scope of another group inside an open one leaves the
workspace alone, and so does one of a thread that the open one waits for.

While gradients are recorded, a scope also keeps views of the workspace out of autograd's graph.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_compiling

from tpde.nn.forward import AroundForward
from tpde.nn.group import Group
from tpde.nn.owner import Owner
from tpde.nn.saved import Saver, saves
from tpde.weights.transforms import refuse_trace, transformed


class Scope:
    """An open scope; `close` must be called by the same thread.

    Parameters
    ----------
    group : Group
        Whose weights may be put in the workspace.

    Attributes
    ----------
    outermost : bool
        Whether there was none before of this thread, so that the weights may be. None is within transforms
        of `torch.func`, which take no hooks on what autograd saves, and keep it.
    """

    __slots__ = ("_beside", "_hooks", "outermost", "space")

    def __init__(self, group: Group) -> None:
        refuse_trace(group.name)
        self.space = space = group._workspace or group.workspace
        self._hooks: saved_tensors_hooks | None = None
        self._beside: bool | None = None  # whether no scope before this one is, if this one is
        if transformed() or not space.enter():
            self.outermost, self._beside = False, get_ident() not in space.beside
            space.beside.add(get_ident())
            return
        self.outermost = not space.depth
        space.depth += 1
        if self.outermost:
            space.thread, space.group = get_ident(), group
            space.note_uses()
        if is_grad_enabled():
            saver = Saver(self.space)
            hooks = saved_tensors_hooks(saver.pack, saver.unpack)
            try:
                hooks.__enter__()
            except BaseException:  # somebody has disabled hooks
                self.close()
                raise
            self._hooks = hooks

    def check(self) -> None:
        """Refuse what a forward pass that has ended did to the weights: see `Workspace.check`."""
        if self.outermost:
            self.space.check()

    def close(self) -> None:
        """Leave the workspace to others."""
        space = self.space
        if self._beside is not None:
            if self._beside:
                space.beside.discard(get_ident())
            return
        if self._hooks is not None:
            self._hooks.__exit__()
        space.depth -= 1
        if not space.depth:
            space.give_up_kept()
            space.filled = space.group = None
            space.thread = 0
            if space.some:
                space.some.clear()
        space.lock.release()


def is_open(group: Group) -> bool:
    """Whether this thread has a scope of this group open, whose views autograd would not keep."""
    space = group.workspace
    if space.thread != get_ident() or space.group is not group:
        return False
    return not is_grad_enabled() or saves(space)


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Tensor:
    """The first tensor on its weights' device that a module was called with, as a constant for autograd.

    Weights are decoded where it is. If all are elsewhere, it is one of no elements: PyTorch then says so.
    """
    given = [it for it in (*args, *kwargs.values()) if isinstance(it, Tensor)]
    if not given:
        raise TypeError("a module with packed weights was compiled that is called without a tensor")
    for value in given:
        if value.device == device:
            return value.detach()
    return torch.empty(0, device=device)


class BlockForward(AroundForward):
    """A block's forward pass with a scope open, before which the block's weights are decoded, all at once.

    Parameters
    ----------
    group : Group
        The block's weights.
    block : nn.Module
        See `AroundForward`.

    Attributes
    ----------
    group : Group or None
        None when it has been taken out; others may go on calling it.
    """

    __slots__ = ("group",)

    def __init__(self, group: Group, block: nn.Module) -> None:
        super().__init__(block)
        self.group: Group | None = group

    def for_copy(self, owner: Owner) -> BlockForward:
        """See `AroundForward`."""
        made = super().for_copy(owner)
        made.group = self.group
        return made

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"group": self.group}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.group = state["group"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As before, with the weights at hand."""
        group = self.group
        if group is None:
            return self.run(args, kwargs)
        if is_compiling():
            if group.whole and not is_grad_enabled():
                group.flat = group.materialize(first_tensor(args, kwargs, group.slots[0].device))
            result = self.run(args, kwargs)
            group.flat = None
            return result
        scope = Scope(group)
        try:
            if scope.outermost:
                group.fill()
            result = self.run(args, kwargs)
            scope.check()
            return result
        except Exception:
            scope.check()  # autograd refuses some changes, when the weight is used next, in its own words
            raise
        finally:
            scope.close()
