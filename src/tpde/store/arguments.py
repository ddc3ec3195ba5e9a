"""Arguments of a checkpoint store's methods, checked."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

from tpde.errors import InvalidInput
from tpde.store.chain import ID, MAX_STEP, STEP, TREE

_STATE_ID = re.compile("[0-9a-f]{32}")


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


def new_step(step: Any, there: Sequence[int], folder: Path) -> int:
    """The number of a step that follows those that are there.

    Raises
    ------
    InvalidInput
        If it is none, or not larger.
    """
    number = step_number(step)
    if there and number <= there[-1]:
        raise InvalidInput(
            f"step {number} is not larger than step {there[-1]}, the newest of `{folder}`",
            hint="save a larger step, or drop the newer ones first: "
            f"`prune(drop=[it for it in store.steps if it >= {number}])`",
            where=os.fspath(folder),
        )
    return number


def is_state_id(value: object) -> TypeGuard[str]:
    """Whether a value is the id of a state (checkpoint-store.md 5)."""
    return isinstance(value, str) and _STATE_ID.fullmatch(value) is not None


def step_metadata(step: int, tree: str, state_id: Any) -> dict[str, str]:
    """The metadata of a step's header (checkpoint-store.md 1).

    Raises
    ------
    InvalidInput
        If the id is none.
    """
    if state_id is None:
        return {STEP: str(step), TREE: tree}
    if not is_state_id(state_id):
        raise InvalidInput(
            f"state_id is {state_id!r:.50}",
            hint="take 32 digits, each of `0` to `9` or `a` to `f`, or None",
            where="state_id",
            found=state_id,
        )
    return {STEP: str(step), TREE: tree, ID: state_id}
