"""Which way of launching a product is the fastest on a card: tables on the disk, which `tpde tune` writes.

A table lies where compiled kernels are kept, and is read at a device's first product. It is for one card, and
for the kernels that were measured. Nothing but speed depends on it: whatever is wrong with it, there is one
warning, and the order that the kernels' own constants give. `TPDE_TUNING=0` leaves it out.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from tpde.cuda.capability import DeviceFacts
from tpde.cuda.compile import cache_directory, source_text
from tpde.errors import InvalidDestination, InvalidInput, bounded, printable
from tpde.io.sinks import FileSink
from tpde.io.sources import open_regular

VARIABLE, OFF = "TPDE_TUNING", "0"  # of the environment: whether tables are followed
_VERSION = 1
MOST_BYTES = 1 << 20  # of a file: a model has some ten shapes, of which each takes half a KiB
_MOST_LABEL = 200  # characters
_SHAPE, _COUNT = re.compile("([1-9][0-9]{0,18})x([1-9][0-9]{0,18})"), re.compile("[1-9][0-9]{0,3}")
_AGAIN = "run `tpde tune` again, or remove it"

Shape = tuple[int, int]  # of a matrix: rows, columns
Choices = Mapping[Shape, Mapping[int, str]]  # labels of the fastest ways, by shapes and rows of x


class TunedKernels(NamedTuple):
    """What is measured: files of kernels, and how many rows of x they take at most."""

    sources: tuple[str, ...]
    most_rows: int


class Way(Protocol):
    """How a product may be launched."""

    @property
    def label(self) -> str:
        """What tables name it by."""

    @property
    def width(self) -> int:
        """Rows of x that a warp multiplies at a time."""


W = TypeVar("W", bound=Way)


class WayTable:
    """The fastest ways on a card.

    Attributes
    ----------
    path : Path
        The file that they are from.
    choices : mapping
        Which they are.
    """

    def __init__(self, path: Path, choices: Choices) -> None:
        self.path, self.choices, self._said = path, choices, False

    def ordered(self, shape: Shape, count: int, ways_of: Callable[[int], list[W]]) -> list[W]:
        """How a product may be launched, the way first that was measured to be the fastest.

        Parameters
        ----------
        shape : tuple of int
            The matrix's rows and columns.
        count : int
            Rows of x. If there is nothing of so many, what is of the next larger number counts where warps
            multiply as many at a time.
        ways_of : callable
            Gives the ways for so many rows of x.
        """
        ways, measured = ways_of(count), self.choices.get(shape, {})
        near = min((it for it in measured if it >= count), default=None)
        if near is None or (near != count and _widths(ways_of(near)) != _widths(ways)):
            return ways
        first = [it for it in ways if it.label == measured[near]]
        if not first:
            self._tell(shape, near, measured[near])
        return first + [it for it in ways if it not in first]

    def _tell(self, shape: Shape, count: int, label: str) -> None:
        """Say, once, that an entry is none that can be followed."""
        if not self._said:
            self._said = True
            what = f"names `{label}` for {shape[0]} x {shape[1]} words and {count} rows of x"
            _warn(
                f"`{self.path}` {what}, which is no way of that product; such entries are ignored: {_AGAIN}"
            )


def _widths(ways: Sequence[Way]) -> set[int]:
    return {it.width for it in ways}


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def table_path(facts: DeviceFacts) -> Path:
    """Where a card's table is: `tuning` in the directory where compiled kernels are kept."""
    name = re.sub("[^A-Za-z0-9]+", "-", facts.name).strip("-")[:80]
    major, minor = facts.capability
    return cache_directory() / "tuning" / f"{name}-sm_{major}{minor}-{facts.multiprocessors}.json"


def table_of(facts: DeviceFacts, kernels: TunedKernels) -> WayTable:
    """A card's table, read once a process; an empty one if there is none that can, or is to, be used."""
    path = table_path(facts)
    if os.environ.get(VARIABLE) == OFF:
        return WayTable(path, {})
    return _table(path, facts, kernels)


@functools.cache
def _table(path: Path, facts: DeviceFacts, kernels: TunedKernels) -> WayTable:
    try:
        return WayTable(path, read_table(path, facts, kernels))
    except InvalidInput as error:
        _warn(f"{error.message}; products are launched as without it: {_AGAIN}")
        return WayTable(path, {})


def _origin(facts: DeviceFacts, kernels: TunedKernels) -> dict[str, Any]:
    """What a table depends on."""
    texts = "\0".join(map(source_text, kernels.sources))
    return {
        "version": _VERSION,
        "card": {**facts._asdict(), "capability": list(facts.capability)},
        "kernels": hashlib.sha256(texts.encode()).hexdigest(),
    }


def read_table(path: Path, facts: DeviceFacts, kernels: TunedKernels) -> Choices:
    """What a table says; nothing if there is no such file.

    Raises
    ------
    InvalidInput
        If it is none, or that of another card or of other kernels.
    """
    if not os.path.lexists(path):
        return {}
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise _bad(path, f"cannot be read ({error.strerror or error})") from error
    if len(data) > MOST_BYTES:
        raise _bad(path, f"has more than {MOST_BYTES} bytes")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"is not JSON ({bounded(printable(error), 100)})") from None
    if not isinstance(found, dict):
        raise _bad(path, "is no table of choices")
    for key, needed in _origin(facts, kernels).items():
        if found.get(key) != needed:
            what = {"version": "another version of tpde", "card": "another card", "kernels": "other kernels"}
            raise _bad(path, f"is of {what[key]}")
    return _choices(path, found.get("choices"), kernels.most_rows)


def _choices(path: Path, found: object, most_rows: int) -> Choices:
    """Check what a table says of the ways; whether there are such ways is only known with a product."""
    made: dict[Shape, dict[int, str]] = {}
    if not isinstance(found, dict):
        raise _bad(path, "has no `choices`")
    for key, by_count in found.items():
        shape = _SHAPE.fullmatch(key)
        if shape is None or not isinstance(by_count, dict):
            raise _bad(path, f"names the shape {_shown(key)}")
        for count, label in by_count.items():
            if _COUNT.fullmatch(count) is None or int(count) > most_rows:
                raise _bad(path, f"names {_shown(count)} rows of x")
            if not isinstance(label, str) or len(label) > _MOST_LABEL or not label.isprintable():
                raise _bad(path, f"names the way {_shown(label)}")
            made.setdefault((int(shape[1]), int(shape[2])), {})[int(count)] = label
    return made


def _shown(value: object) -> str:
    return f"`{bounded(printable(value), 60)}`"


def _bad(path: Path, what: str) -> InvalidInput:
    return InvalidInput(f"`{path}` {what}", hint=_AGAIN, where=str(path))


def write_table(path: Path, facts: DeviceFacts, kernels: TunedKernels, choices: Choices) -> None:
    """Write a table, in the place of one that is there.

    Raises
    ------
    InvalidDestination
        If it cannot be written, or is too large to be read.
    OSError
        If the system failed.
    """
    ordered = {
        f"{rows}x{columns}": dict(sorted(it.items())) for (rows, columns), it in sorted(choices.items())
    }
    text = json.dumps(_origin(facts, kernels) | {"choices": ordered}, indent=1) + "\n"
    if len(text) > MOST_BYTES:
        raise InvalidDestination(
            f"`{path}` would have {len(text)} bytes, {MOST_BYTES} at most are read",
            hint="remove it, and run `tpde tune` again",
            where=str(path),
        )
    sink = FileSink(path, force=True)
    try:
        sink.write(0, [text.encode()])
        sink.commit()
    finally:
        sink.abort()  # nothing, once it is committed
