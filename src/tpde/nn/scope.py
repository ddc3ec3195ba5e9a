"""Scopes: from where a block or a module starts until it returns, its weights may be in the workspace.

The outermost scope of a thread holds the workspace's lock, so that threads take turns block by block, and
clears what it left when it closes: a CUDA graph that is replayed later writes to the workspace without this
code running, so nothing in it is relied on twice. A scope of another group inside an open one leaves the
workspace alone, and so does one of a thread that the open one waits for.

While gradients are recorded, a scope also keeps views of the workspace out of autograd's graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_compiling

from tpde.nn.forward import AroundForward
from tpde.nn.group import Group
from tpde.nn.owner import Owner
from tpde.nn.saved import Saver, is_top, saves
from tpde.nn.workspace import Workspace
from tpde.weights.transforms import refuse_trace, transformed

T = TypeVar("T")


class Scope:
    """A scope, opened by `enter` and closed by `close` of the same thread.

    Ctrl-C may come after any call, in these two as well: what is taken is noted before, and `close` may be
    called again. See `within`.

    Parameters
    ----------
    group : Group
        Whose weights may be put in the workspace.

    Attributes
    ----------
    outermost : bool
        Whether it is open, and there was none before of this thread, so that the weights may be. None is
        within transforms of `torch.func`, which take no hooks on what autograd saves, and keep it.
    """

    __slots__ = ("_beside", "_depth", "_group", "_saver", "_space", "outermost")

    def __init__(self, group: Group) -> None:
        self._group, self.outermost = group, False
        self._space: Workspace | None = None
        self._depth: int | None = None  # of those around this one; None if it has not the workspace
        self._beside: bool | None = None  # whether no scope before this one is, if this one is
        self._saver: Saver | None = None

    def enter(self) -> None:
        """Open it."""
        group = self._group
        refuse_trace(group.name)
        self._space = space = group._workspace or group.workspace
        me = get_ident()
        if transformed():
            self._leave_alone(space)
            return
        if space.thread == me:
            self._depth = space.depth
            space.depth += 1
        else:
            self._depth = 0
            if not space.enter():
                self._depth = None
                self._leave_alone(space)
                return
            self.outermost, space.depth, space.thread, space.group = True, 1, me, group
            space.note_uses()
        if is_grad_enabled():
            saver = self._saver = Saver(space)
            saved_tensors_hooks(saver.pack, saver.unpack).__enter__()

    def _leave_alone(self, space: Workspace) -> None:
        """Decode copies: the workspace is another's."""
        self._beside = get_ident() not in space.beside
        space.beside.add(get_ident())

    def check(self) -> None:
        """Refuse what a forward pass that has ended did to the weights: see `Workspace.check`."""
        if self.outermost:
            assert self._space is not None
            self._space.check()

    def close(self) -> None:
        """Leave the workspace to others. A second time, it does what the first one was kept from."""
        space = self._space
        if space is None:
            return
        if self._beside:
            space.beside.discard(get_ident())
        if self._saver is not None and is_top(self._saver):
            torch._C._autograd._pop_saved_tensors_default_hooks()
        if self._depth is None:
            return
        if self._depth:
            space.depth = self._depth
            return
        lock = space.lock
        if lock._is_owned():
            space.give_up_kept()
            space.filled = space.group = None
            space.thread = space.depth = 0
            if space.some:
                space.some.clear()
            while lock._is_owned():  # it may have been taken by what was interrupted before it was noted
                lock.release()


def within(group: Group, work: Callable[[Scope], T]) -> T:
    """Call something with a scope open."""
    scope = Scope(group)
    try:
        scope.enter()
        result = work(scope)
        scope.check()
        return result
    except Exception:
        scope.check()  # autograd refuses some changes, when the weight is used next, in its own words
        raise
    finally:
        try:
            scope.close()
        except BaseException:  # Ctrl-C
            scope.close()
            raise


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
        return within(group, functools.partial(self._filled, group, args, kwargs))

    def _filled(self, group: Group, args: tuple[Any, ...], kwargs: dict[str, Any], scope: Scope) -> Any:
        if scope.outermost:
            group.fill()
        return self.run(args, kwargs)
