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


def device_of(map_location: Any) -> Any:
    """Where tensors go, as a device.

    Raises
    ------
    InvalidInput
        If it is none.
    """
    if map_location is None:
        return None
    import torch

    try:
        return torch.device(map_location)
    except (RuntimeError, TypeError) as error:
        raise InvalidInput(
            f"map_location is {map_location!r}", hint="name a device, such as `cuda:0`"
        ) from error
