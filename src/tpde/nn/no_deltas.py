"""What stands for `use` in packed models that have no deltas yet: it says how a model comes to have some."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from tpde.errors import InvalidInput


def no_deltas(name: Any = None) -> NoReturn:
    """Refuse to choose a delta.

    Raises
    ------
    InvalidInput
        Always.
    """
    raise InvalidInput(
        f"`use` was given {name!r}, and the model has no deltas",
        hint='load it with `tpde.from_pretrained(path, deltas={"NAME": "NAME.tpde"})`, or call '
        '`tpde.nn.add_deltas(model, {"NAME": "NAME.tpde"})` first',
        where="use",
    )


def promise_use(model: nn.Module) -> None:
    """Have `use` say what is missing, unless the model has one."""
    if not hasattr(model, "use"):
        model.__dict__["use"] = no_deltas


def promise_no_use(module: nn.Module) -> None:
    """Undo `promise_use`."""
    if module.__dict__.get("use") is no_deltas:
        del module.__dict__["use"]


def has_use(model: nn.Module) -> bool:
    """Whether a model has deltas, or a method `use` of its own."""
    return getattr(model, "use", no_deltas) is not no_deltas
