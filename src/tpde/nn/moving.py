"""Moving a packed model, and loading into it: all packed weights in it agree, or nothing is done.

PyTorch does both to one module after the other, and what the last one refuses would be half done. So the two
methods of the model that was packed ask all of its packed modules first. A model that somebody puts around it
is refused as well, by then with what it moved before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tpde.nn.module_state import assigns
from tpde.nn.modules import PackedModule
from tpde.nn.owner import Owned, Owner


def _ask_to_apply(model: nn.Module, fn: Any, recurse: bool = True) -> None:
    for module in model.modules() if recurse else (model,):
        if isinstance(module, PackedModule):
            module.tpde_check(fn)


def _ask_to_load(model: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> None:
    assign = assigns(*args, **kwargs)

    def ask(module: nn.Module, prefix: str) -> None:
        if module._load_state_dict_pre_hooks:  # which may make another one of it
            return
        if isinstance(module, PackedModule):
            module.tpde_check_state(state_dict, prefix, assign)
        for name, child in module._modules.items():
            if child is not None:
                ask(child, f"{prefix}{name}.")

    ask(model, "")


_ASK: dict[str, Callable[..., None]] = {"_apply": _ask_to_apply, "load_state_dict": _ask_to_load}


class AskedFirst(Owned):
    """A method of a model, in the model's own attributes, before which all packed modules in it are asked.

    Parameters
    ----------
    method : str
        `_apply`, by which all moves and casts go, or `load_state_dict`.
    owner : Owner
        The model.
    """

    def __init__(self, method: str, owner: Owner) -> None:
        self._method, self._owner = method, owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do what the method does.

        Raises
        ------
        PackedWeight, InvalidInput
            If a packed weight cannot be so; then nothing is changed.
        """
        model = self._owner()
        _ASK[self._method](model, *args, **kwargs)
        return getattr(type(model), self._method)(model, *args, **kwargs)

    def for_copy(self, owner: Owner) -> AskedFirst:
        """See `Owned`."""
        return AskedFirst(self._method, owner)


def ask_first(model: nn.Module) -> None:
    """Have a packed model ask: see `AskedFirst`."""
    for method in _ASK:
        model.__dict__[method] = AskedFirst(method, Owner(model))


def ask_no_more(module: nn.Module) -> None:
    """Undo `ask_first`, if it was done to a module."""
    for method in _ASK:
        if isinstance(module.__dict__.get(method), AskedFirst):
            del module.__dict__[method]
