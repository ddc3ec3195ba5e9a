"""What stands in a module's attributes for one of its methods, and does something around it."""

from __future__ import annotations

import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from tpde.nn.owner import Owned, Owner

if TYPE_CHECKING:
    from typing_extensions import Self


class AroundForward(Owned):
    """A forward pass, or another method, and what a subclass does around it.

    It takes the place of the method in the module's own attributes. Hooks would not do: PyTorch calls none
    after Ctrl-C, and compiles each on its own where a block is compiled, not the model.

    Parameters
    ----------
    module : nn.Module
        Not held, as long as its forward pass is its class's: were it, a model that nobody uses would stay.
        The class is asked in each call: others may patch it, or give the module another.

    Attributes
    ----------
    method : str
        Which method it is.
    """

    method = "forward"

    # Apart from the attributes that others copy to what they put in its place: `functools.update_wrapper`.
    __slots__ = ("__dict__", "__weakref__", "_forward", "_owner")

    def __init__(self, module: nn.Module) -> None:
        forward: Any = getattr(module, self.method)
        functools.update_wrapper(self, forward)
        del self.__dict__["__wrapped__"]
        of_class = self.method not in module.__dict__
        self._owner = Owner(module) if of_class else None
        self._forward: Any = None if of_class else forward

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""

    @property
    def forward(self) -> Callable[..., Any]:
        """What was there."""
        if self._owner is None:
            return cast("Callable[..., Any]", self._forward)
        module = self._owner()
        return MethodType(getattr(type(module), self.method), module)

    def for_copy(self, owner: Owner) -> Self:
        """See `Owned`: somebody's own forward pass, in the place of the class's, stays as it is."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._forward = self._forward
        made._owner = None if self._owner is None else owner
        return made

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward pass alone."""
        if self._owner is None:
            return self._forward(*args, **kwargs)
        module = self._owner()  # a method made of both could not be compiled
        return getattr(type(module), self.method)(module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """For transformers, which looks at the arguments' names."""
        return inspect.signature(self.forward)

    def __getstate__(self) -> dict[str, Any]:
        return {"owner": self._owner, "forward": self._forward, "attributes": self.__dict__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state["attributes"])
        self._owner = state["owner"]
        self._forward = state["forward"]

    def leave(self, module: nn.Module) -> None:
        """Put back what was there, if this stands in its place."""
        held = module.__dict__
        if held.get(self.method) is self:
            del held[self.method]
            if self._owner is None:  # somebody's own, in the place of the class's
                held[self.method] = self._forward
