"""Parts of a model, refused while rows of its batches are under several deltas.

A part that is called by itself, or saved, would be under whichever delta was used last. Packed weights refuse
that when they are decoded; this does it for plain parameters, and names the part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import nn
from torch.compiler import is_compiling

from tpde.errors import InvalidInput, PackedWeight
from tpde.weights.active_delta import WHOLE, ActiveDelta
from tpde.weights.parameter import PackedParameter


class _Part:
    """A hook that refuses what nobody calls a model for."""

    def __init__(self, parts: Parts, name: str, what: str) -> None:
        self._parts, self._name, self._what = parts, name, what

    def __call__(self, *args: Any) -> None:
        """Before a module is called, or asked for its state."""
        # The compiler knows nothing of threads, and compiles for either.
        refused = self._parts.closed if is_compiling() else self._parts.active_delta.rows() is not None
        if refused:
            raise InvalidInput(
                f"`{self._name}` {self._what}, and each row of a batch has a delta of its own",
                hint=WHOLE,
                where=self._name,
            )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise PackedWeight(
            f"`{self._name}` cannot be copied or pickled while each row of a batch has a delta of its own",
            hint="choose one delta for all rows: `model.use(name)`",
        )


def _weights(module: nn.Module) -> Iterator[int]:
    """Identities of what a module itself holds, also of what is tied: that is there under each name."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        yield id(tensor.packed if isinstance(tensor, PackedParameter) else tensor)


class Parts:
    """Hooks on all modules of a model that hold, or contain what holds, weights that deltas change.

    Parameters
    ----------
    active_delta : ActiveDelta
        Which says whether a thread computes rows of one delta.

    Attributes
    ----------
    active_delta : ActiveDelta
        As above.
    closed : bool
        No thread does.
    """

    def __init__(self, active_delta: ActiveDelta) -> None:
        self.active_delta, self.closed = active_delta, True
        self._handles: list[Any] = []

    def refuse(self, model: nn.Module, changed: Collection[int]) -> None:
        """Put the hooks on. If that fails, `remove` takes off those that are there.

        Parameters
        ----------
        model : nn.Module
            Which is called as a whole.
        changed : collection of int
            Identities of the plain tensors and packed weights that deltas change.
        """
        holders = {it for it in model.modules() if not set(_weights(it)).isdisjoint(changed)}
        for path, module in model.named_modules():
            if holders.isdisjoint(module.modules()):
                continue
            name = path or type(model).__name__
            saved = _Part(self, name, "was asked for its state")
            self._handles.append(module.register_state_dict_pre_hook(saved))
            if module is not model:
                called = _Part(self, name, "was called by itself")
                self._handles.append(module.register_forward_pre_hook(called, prepend=True))

    @contextmanager
    def opened(self) -> Iterator[None]:
        """While a thread computes rows of one delta after the other."""
        self.closed = False
        try:
            yield
        finally:
            self.closed = True

    def remove(self) -> None:
        """Take the hooks off."""
        for it in self._handles:
            it.remove()
        self._handles.clear()
