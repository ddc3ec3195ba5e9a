"""Parts of a model, refused while rows of its batches are under several deltas.

A part that is called by itself, or saved, would be under whichever delta was used last. Packed weights refuse
that when they are decoded; this does it for plain parameters, and names the part.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NoReturn

from torch import nn

from tpde.errors import InvalidInput, PackedWeight
from tpde.weights.choice import WHOLE, Choice


class _Part:
    """A hook that refuses what nobody calls a model for."""

    def __init__(self, choice: Choice, name: str, what: str) -> None:
        self._choice, self._name, self._what = choice, name, what

    def __call__(self, *args: Any) -> None:
        """Before a module is called, or asked for its state."""
        names = self._choice.rows()
        if names is not None:
            raise InvalidInput(
                f"`{self._name}` {self._what}, and each of {len(names)} rows has a delta of its own",
                hint=WHOLE,
                where=self._name,
            )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise PackedWeight(f"`{self._name}` cannot be copied while each row has a delta of its own", hint=WHOLE)


class Parts:
    """Hooks on all modules of a model that hold, or contain what holds, weights that deltas change.

    Parameters
    ----------
    model : nn.Module
        Which is called as a whole.
    holders : collection of nn.Module
        What holds such weights.
    choice : Choice
        Which says whether a thread computes rows of one delta.
    """

    def __init__(self, model: nn.Module, holders: Collection[nn.Module], choice: Choice) -> None:
        self._handles: list[Any] = []
        held = set(holders)
        for path, module in model.named_modules():
            if held.isdisjoint(module.modules()):
                continue
            name = path or type(model).__name__
            saved = _Part(choice, name, "was asked for its state")
            self._handles.append(module.register_state_dict_pre_hook(saved))
            if module is not model:
                called = _Part(choice, name, "was called by itself")
                self._handles.append(module.register_forward_pre_hook(called, prepend=True))

    def remove(self) -> None:
        """Take the hooks off."""
        for it in self._handles:
            it.remove()
        self._handles.clear()
