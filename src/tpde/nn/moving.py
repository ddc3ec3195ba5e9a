"""Moving models, and loading state dicts into them: of packed weights in them all agree, or nothing is done.

PyTorch does both to one module after the other, and what the last one refuses would be half done. Which
module a user calls is not known before: a model, one that holds it, or a layer. So `nn.Module`'s own two
methods, by which all others go, ask the packed modules in it first. Models that have none are not changed by
that, in what is done or how.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

from torch import nn


class Asked(Protocol):
    """A packed module."""

    def tpde_check(self, fn: Any) -> None:
        """Raise what applying a function to the weights would."""

    def tpde_check_state(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Raise what loading a state dict would."""


_asked = threading.local()  # for what all were asked


@contextmanager
def _asking(what: str, ask: Callable[[], None]) -> Iterator[None]:
    """Ask, but in the course of what was asked for."""
    if getattr(_asked, what, False):
        yield
        return
    ask()
    setattr(_asked, what, True)
    try:
        yield
    finally:
        setattr(_asked, what, False)


def ask_first(kind: type[nn.Module]) -> None:
    """Have all models ask those modules in them that are of a class: once for each process.

    Parameters
    ----------
    kind : type
        Modules that have the methods of `Asked`.
    """
    apply: Any = nn.Module._apply
    load: Any = nn.Module.load_state_dict
    if hasattr(apply, "tpde_asks"):
        return

    @functools.wraps(apply)
    def _apply(self: nn.Module, fn: Any, recurse: bool = True) -> Any:
        def ask() -> None:
            for module in self.modules() if recurse else (self,):
                if isinstance(module, kind):
                    cast(Asked, module).tpde_check(fn)

        with _asking("move", ask):
            return apply(self, fn, recurse)

    @functools.wraps(load)
    def load_state_dict(self: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        def ask(module: nn.Module, prefix: str) -> None:
            if module._load_state_dict_pre_hooks:  # which may make another one of it
                return
            if isinstance(module, kind):
                cast(Asked, module).tpde_check_state(state_dict, prefix)
            for name, child in module._modules.items():
                if child is not None:
                    ask(child, f"{prefix}{name}.")

        with _asking("load", lambda: ask(self, "")):
            return load(self, state_dict, *args, **kwargs)

    _apply.tpde_asks = True  # type: ignore[attr-defined]
    nn.Module._apply, nn.Module.load_state_dict = _apply, load_state_dict  # type: ignore[method-assign]
