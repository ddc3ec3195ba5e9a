"""Forward passes of a model, and what waits for them to end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from torch import nn
from torch.compiler import is_compiling

from tpde.errors import PackedWeight
from tpde.nn.forward import AroundForward
from tpde.nn.owner import Owner

_PATIENCE_S = 1.0


class Passes:
    """Which threads are in a forward pass: what is changed between passes waits for all of them."""

    def __init__(self) -> None:
        self._ended = threading.Condition()
        self._depth: dict[int, int] = {}  # by threads
        self._waiting = 0  # for all of them to end

    @contextmanager
    def one(self) -> Iterator[None]:
        """A forward pass of this thread, or one within it."""
        me = get_ident()
        with self._ended:
            if me not in self._depth and self._waiting:
                # Else threads that compute without end leave no moment without one. Not for ever: a pass may
                # wait for this one.
                self._ended.wait_for(lambda: not self._waiting, timeout=_PATIENCE_S)
            self._depth[me] = self._depth.get(me, 0) + 1
        try:
            yield
        finally:
            with self._ended:
                self._depth[me] -= 1
                if not self._depth[me]:
                    del self._depth[me]
                    self._ended.notify_all()

    @contextmanager
    def none(self) -> Iterator[None]:
        """Wait until no thread is in one; inside, none begins.

        Raises
        ------
        PackedWeight
            If this thread is.
        """
        with self._ended:
            if get_ident() in self._depth:
                raise PackedWeight(
                    "the weights of a forward pass would become others before it ends",
                    hint="call `use` between two of them",
                )
            self._waiting += 1
            try:
                self._ended.wait_for(lambda: not self._depth)
                yield
            finally:
                self._waiting -= 1
                self._ended.notify_all()


class ModelForward(AroundForward):
    """A model's forward pass, which is counted.

    Parameters
    ----------
    passes : Passes
        By these.
    model : nn.Module
        See `AroundForward`.
    """

    __slots__ = ("passes",)

    def __init__(self, passes: Passes, model: nn.Module) -> None:
        super().__init__(model)
        self.passes = passes

    def for_copy(self, owner: Owner) -> ModelForward:
        """See `AroundForward`."""
        made = super().for_copy(owner)
        made.passes = self.passes
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As before; nothing changes meanwhile."""
        if is_compiling():
            return self.run(args, kwargs)
        with self.passes.one():
            return self.run(args, kwargs)
