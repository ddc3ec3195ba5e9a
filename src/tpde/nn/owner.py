"""What stands in a module's own attributes for one of its methods, and what becomes of it in copies.

Python gives a method the object that it is called on; what an attribute holds, it does not. Such a thing has
to know its module, and a shallow copy, which takes the attributes as they are, would go on with the module it
was copied from.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import nn


class Owner:
    """The module that something in its attributes belongs to.

    It is not held: were it, a model that nobody uses would stay.

    Parameters
    ----------
    module : nn.Module, optional
        Without one, `bind` says it later.
    """

    __slots__ = ("_module",)

    def __init__(self, module: nn.Module | None = None) -> None:
        self._module: Callable[[], nn.Module | None] = _nobody if module is None else weakref.ref(module)

    def bind(self, module: nn.Module) -> None:
        """Say which module it is."""
        self._module = weakref.ref(module)

    def __call__(self) -> nn.Module:
        """The module.

        Raises
        ------
        ReferenceError
            If it was deleted.
        """
        module = self._module()
        if module is None:
            raise ReferenceError(
                "the block whose forward pass this is was deleted, with the model; keep one of them"
            )
        return module

    def __reduce__(self) -> tuple[Any, ...]:
        return Owner, (), (self._module(),)

    def __setstate__(self, state: tuple[nn.Module | None]) -> None:
        if state[0] is not None:
            self.bind(state[0])


def _nobody() -> None:
    """The module of an owner that is not bound yet."""


class Owned(ABC):
    """Something in a module's attributes that belongs to it."""

    __slots__ = ()

    @abstractmethod
    def for_copy(self, owner: Owner) -> Owned:
        """The same for a copy of the module, of which no more is known than its owner."""


class CopiedModule(Owned):
    """`__reduce_ex__` of a module some of whose attributes are `Owned`: copies of it get their own.

    `copy.copy`, `copy.deepcopy` and `pickle` ask objects for it, not their classes.

    Parameters
    ----------
    owner : Owner
        The module.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def __call__(self, protocol: Any) -> tuple[Any, ...] | str:
        """What its class gives, with the module's things for its copy."""
        module, owner = self._owner(), Owner()
        reduced: Any = type(module).__reduce_ex__(module, protocol)
        if rebuilds(reduced):
            return reduced if isinstance(reduced, str) else (reduced[0], tuple(map(_plain, reduced[1])))
        make, args, state, *rest = reduced
        if isinstance(state, dict):
            made: dict[int, Owned] = {}  # one thing may be there under two names
            state = {
                name: made.setdefault(id(it), it.for_copy(owner)) if isinstance(it, Owned) else it
                for name, it in state.items()
            }
        return _bound, (owner, make, args), state, *rest

    def for_copy(self, owner: Owner) -> CopiedModule:
        """See `Owned`."""
        return CopiedModule(owner)


def rebuilds(reduced: tuple[Any, ...] | str) -> bool:
    """Whether a class gives `pickle` no state, but makes modules anew: as `torch.fx.GraphModule`."""
    return isinstance(reduced, str) or len(reduced) < 3


def _plain(argument: Any) -> Any:
    """What a class makes a module of, without what belongs to the module before; it does without."""
    if type(argument) is not dict:
        return argument
    return {name: it for name, it in argument.items() if not isinstance(it, Owned)}


def _bound(owner: Owner, make: Callable[..., nn.Module], args: tuple[Any, ...]) -> nn.Module:
    """A module without its attributes, which its owner knows."""
    module = make(*args)
    owner.bind(module)
    return module
