"""Arguments of a checkpoint store's methods, checked."""

from __future__ import annotations

import operator
from typing import Any

from tpde.errors import InvalidInput
from tpde.store.chain import MAX_STEP


def whole_number(what: str, value: Any, least: int, most: int) -> int:
    """A number within its range.

    Raises
    ------
    InvalidInput
        If it is none, or out of it.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool) or not least <= number <= most:
        raise InvalidInput(f"{what} is {value!r}", hint=f"take a whole number from {least} to {most}")
    return number


def step_number(step: Any) -> int:
    """The number of a step.

    Raises
    ------
    InvalidInput
        If it is none.
    """
    return whole_number("step", step, 0, MAX_STEP)
