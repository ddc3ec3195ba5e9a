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

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tpde.nn.group import Group
from tpde.nn.saved import Saver, saves


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
            saver = Saver(self.space)
            self._hooks = saved_tensors_hooks(saver.pack, saver.unpack)
            self._hooks.__enter__()

    def close(self) -> None:
        """Leave the workspace to others."""
        space = self.space
        if self._hooks is not None:
            self._hooks.__exit__()
        space.scopes.pop()
        if not space.scopes:
            space.filled, space.group, space.thread = None, None, 0
            space.some.clear()
        space.lock.release()


def is_open(group: Group) -> bool:
    """Whether this thread has a scope of this group open, whose views autograd would not keep."""
    space = group.workspace
    if space.thread != get_ident() or space.group is not group:
        return False
    return not torch.is_grad_enabled() or saves(space)


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
        """Before the block's forward pass."""
        group = self.group
        if torch.compiler.is_compiling():
            if group.whole and not torch.is_grad_enabled():
                group.flat = torch.ops.tpde.materialize(first_tensor(args, kwargs), group.key)
            return
        scope = Scope(group, self)
        if len(scope.space.scopes) == 1:
            try:
                group.fill()
            except BaseException:  # PyTorch calls no hook after Ctrl-C
                scope.close()
                raise

    def close(self) -> None:
        """Close the scope, if it is the innermost one of this thread."""
        # A hook that failed before ours opened the scope leaves none to close.
        space = self.group.workspace
        if space.thread == get_ident() and space.scopes and space.scopes[-1].owner is self:
            space.scopes[-1].close()


class GuardedForward:
    """A block's forward pass, after which its scope is closed where PyTorch calls no hooks: after Ctrl-C.

    It takes the place of the method in the module's own attributes.

    Parameters
    ----------
    opener : OpenBlock
        Of the block.
    forward : callable
        What was there.
    """

    def __init__(self, opener: OpenBlock, forward: Callable[..., Any]) -> None:
        self.opener, self.forward = opener, forward
        functools.update_wrapper(self, forward)  # transformers looks at the arguments' names

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As before."""
        if torch.compiler.is_compiling():
            return self.forward(*args, **kwargs)
        try:
            return self.forward(*args, **kwargs)
        except Exception:  # the hook closes it
            raise
        except BaseException:
            self.opener.close()
            raise


class CloseBlock:
    """A forward hook of a block: closes the scope, whether the block succeeded or failed."""

    def __init__(self, opener: OpenBlock) -> None:
        self.opener = opener

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """After it."""
        if torch.compiler.is_compiling():
            self.opener.group.flat = None
            return
        self.opener.close()
