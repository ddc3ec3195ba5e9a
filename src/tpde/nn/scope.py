"""Scopes: from where a block or a module starts until it returns, its weights may be in the workspace.

The outermost scope of a thread holds the workspace's lock, so that threads take turns block by block, and
clears what it left when it closes: a CUDA graph that is replayed later writes to the workspace without this
code running, so nothing in it is relied on twice. A scope of another group inside an open one leaves the
workspace alone.

While gradients are recorded, a scope also keeps views of the workspace out of autograd's graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any

from torch import Tensor, is_grad_enabled
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_compiling

from tpde.nn.group import Group
from tpde.nn.saved import Saver, saves


class Scope:
    """An open scope; `close` must be called by the same thread.

    Parameters
    ----------
    group : Group
        Whose weights may be put in the workspace.

    Attributes
    ----------
    outermost : bool
        Whether there was none before of this thread, so that the weights may be.
    """

    __slots__ = ("_hooks", "outermost", "space")

    def __init__(self, group: Group) -> None:
        self.space = space = group._workspace or group.workspace
        space.lock.acquire()
        self.outermost = not space.depth
        space.depth += 1
        if self.outermost:
            space.thread, space.group = get_ident(), group
        self._hooks: saved_tensors_hooks | None = None
        if is_grad_enabled():
            saver = Saver(self.space)
            self._hooks = saved_tensors_hooks(saver.pack, saver.unpack)
            self._hooks.__enter__()

    def close(self) -> None:
        """Leave the workspace to others."""
        space = self.space
        if self._hooks is not None:
            self._hooks.__exit__()
        space.depth -= 1
        if not space.depth:
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


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The tensor that a module was called with, as a constant for autograd."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.detach()
    raise TypeError("a module with packed weights was compiled that is called without a tensor")


class BlockForward:
    """A block's forward pass with a scope open, before which the block's weights are decoded, all at once.

    It takes the place of the method in the module's own attributes. Hooks would not do: PyTorch calls none
    after Ctrl-C, and compiles each on its own where a block is compiled, not the model.

    Parameters
    ----------
    group : Group
        The block's weights.
    forward : callable
        What was there.

    Attributes
    ----------
    group : Group or None
        None when it has been taken out; others may go on calling it.
    """

    # Apart from the attributes that others copy to what they put in its place: `functools.update_wrapper`.
    __slots__ = ("__dict__", "__weakref__", "forward", "group")

    def __init__(self, group: Group, forward: Callable[..., Any]) -> None:
        self.group: Group | None = group
        self.forward = forward
        functools.update_wrapper(self, forward)  # transformers looks at the arguments' names

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As before, with the weights at hand."""
        group = self.group
        if group is None:
            return self.forward(*args, **kwargs)
        if is_compiling():
            if group.whole and not is_grad_enabled():
                group.flat = group.materialize(first_tensor(args, kwargs))
            result = self.forward(*args, **kwargs)
            group.flat = None
            return result
        scope = Scope(group)
        try:
            if scope.outermost:
                group.fill()
            return self.forward(*args, **kwargs)
        finally:
            scope.close()
