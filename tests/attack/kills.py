"""Signals at every call that changes something, before it and after; and kills at any moment."""

from __future__ import annotations

import signal
from collections.abc import Iterator

from .field import Field, Finding
from .operations import OPERATIONS
from .shim import AFTER, BEFORE, Arming

_SIGNALS = ("SIGKILL", "SIGINT", "SIGTERM")
_MOMENT = "moment"
_MOMENTS = 60  # of each operation


def at_changes(field: Field) -> Iterator[str]:
    """Every change of every operation, with every signal."""
    for name in OPERATIONS:
        for number in range(1, len(field.known(name).changes) + 1):
            for when in ("before", "after"):
                for number_of in _SIGNALS:
                    yield f"{name}:{number}:{when}:{number_of}"


def cases(field: Field) -> Iterator[str]:
    """All of these, and moments spread over each operation.

    Which call a moment falls on is chance: what is found there need not be seen again.
    """
    yield from at_changes(field)
    for name in OPERATIONS:
        yield from (f"{name}:{number}:{_MOMENT}:SIGKILL" for number in range(_MOMENTS))


def arming_of(case: str) -> tuple[str, Arming]:
    """The operation of a case, and what happens to it."""
    name, number, when, signal_name = case.split(":")
    action = BEFORE if when == "before" else AFTER
    value = int(getattr(signal, signal_name))
    return name, Arming(action, int(number), value, changes=True, flags=OPERATIONS[name].flags)


def attack(field: Field, case: str) -> list[Finding]:
    """Try a case."""
    if _MOMENT in case.split(":"):
        return _at_a_moment(field, case)
    name, arming = arming_of(case)
    calls, number = field.known(name).changes, arming.number
    call = calls[number - 1] if number <= len(calls) else "none"
    field.prepare(name)
    outcome = field.run(name, arming)
    return [Finding(case, f"{call}: {it}") for it in field.problems(name, outcome)]


def _at_a_moment(field: Field, case: str) -> list[Finding]:
    name, number, _, _ = case.split(":")
    moment = field.known(name).seconds * (int(number) + 0.5) / _MOMENTS
    field.prepare(name)
    outcome = field.run(name, Arming(flags=OPERATIONS[name].flags), moment=moment)
    return [Finding(case, f"after {1000 * moment:.2f} ms: {it}") for it in field.problems(name, outcome)]
