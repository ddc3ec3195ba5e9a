"""Moving a packed model, and loading into it: all packed weights in it agree, or nothing is done.

PyTorch does both to one module after the other, and what the last one refuses would be half done. So the
methods by which it does ask all packed modules beneath first: those of the model that was packed, and of all
in it that hold a packed one, such as its blocks and lists. What somebody puts around the model comes to them
in its turn: by then it may have changed modules of its own, which stand before the packed one. So may one
that makes another state dict of the one it loads, by a hook or a method, have loaded parameters of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from tpde.nn.modules import PackedModule
from tpde.nn.owner import Owned, Owner


class _Asked(threading.local):
    """What a thread is in the middle of: nobody is asked twice.

    Attributes
    ----------
    fn : callable, optional
        What moves.
    missing : list of str, optional
        A list that is one and the same from a load's first module to its last.
    modules : set of int
        Which were asked of that load.
    """

    fn: Any = None
    missing: list[str] | None = None
    modules: set[int]


_asked = _Asked()


def _move(model: nn.Module, fn: Any, recurse: bool = True) -> Any:
    before = _asked.fn
    if fn is not before:
        for module in model.modules() if recurse else (model,):
            if isinstance(module, PackedModule):
                module.tpde_check(fn)
    _asked.fn = fn
    try:
        return type(model)._apply(model, fn, recurse)  # type: ignore[no-untyped-call]
    finally:
        _asked.fn = before


def _load(
    model: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    if _asked.missing is not missing_keys:
        _asked.missing, _asked.modules = missing_keys, set()
    assign = local_metadata.get("assign_to_params_buffers", False)
    _ask(model, state_dict, prefix, assign)
    how = state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    type(model)._load_from_state_dict(model, *how)
    if _changes_names(model):
        _ask_beneath(model, state_dict, prefix, assign)


def _ask(module: nn.Module, state_dict: dict[str, Any], prefix: str, assign: bool) -> None:
    if _changes_names(module):  # all beneath are asked when it has
        return
    if isinstance(module, PackedModule) and id(module) not in _asked.modules:
        module.tpde_check_state(state_dict, prefix, assign)
        _asked.modules.add(id(module))
    _ask_beneath(module, state_dict, prefix, assign)


def _ask_beneath(module: nn.Module, state_dict: dict[str, Any], prefix: str, assign: bool) -> None:
    for name, child in module._modules.items():
        if child is not None:
            _ask(child, state_dict, f"{prefix}{name}.", assign)


def _changes_names(module: nn.Module) -> bool:
    """Whether a module may make another state dict of the one it loads, for itself and all beneath."""
    own = type(module)._load_from_state_dict
    return bool(module._load_state_dict_pre_hooks) or not (
        isinstance(module, PackedModule) or own is nn.Module._load_from_state_dict
    )


_DO: dict[str, Callable[..., Any]] = {"_apply": _move, "_load_from_state_dict": _load}


class AskedFirst(Owned):
    """A method of a module, in its own attributes, before which all packed modules in it are asked.

    Parameters
    ----------
    method : str
        `_apply`, by which all moves and casts go, or `_load_from_state_dict`, by which each module loads.
    owner : Owner
        The module.
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
        return _DO[self._method](self._owner(), *args, **kwargs)

    def for_copy(self, owner: Owner) -> AskedFirst:
        """See `Owned`."""
        return AskedFirst(self._method, owner)


def holders(model: nn.Module) -> list[nn.Module]:
    """The model, and all in it that have a packed module beneath them."""
    found: dict[nn.Module, bool] = {}  # by modules that were seen, whether each is packed or holds such
    holding = [model]
    _hold(model, found, holding)
    return holding


def _hold(module: nn.Module, found: dict[nn.Module, bool], holding: list[nn.Module]) -> bool:
    if module not in found:
        found[module] = isinstance(module, PackedModule)
        beneath = [_hold(it, found, holding) for it in module._modules.values() if it is not None]
        if any(beneath):
            found[module] = True
            if module is not holding[0]:
                holding.append(module)
    return found[module]


def ask_first(module: nn.Module) -> None:
    """Have a module ask: see `AskedFirst`."""
    for method in _DO:
        module.__dict__[method] = AskedFirst(method, Owner(module))


def ask_no_more(module: nn.Module) -> None:
    """Undo `ask_first`, if it was done to a module."""
    for method in _DO:
        if isinstance(module.__dict__.get(method), AskedFirst):
            del module.__dict__[method]
