"""Sizes that people write and read."""

from __future__ import annotations

import re

from tpde.errors import InvalidInput

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})\s*([A-Za-z]*)\s*")


def parse_size(size: str | int) -> int:
    """Read a number of bytes.

    Parameters
    ----------
    size : str or int
        `16GiB` (1024 bytes to the KiB), `16GB` (1000 to the kB), with or without a space and a fraction, or a
        number of bytes.

    Raises
    ------
    InvalidInput
        If it is no size, or not above zero.

    Examples
    --------
    >>> parse_size("16GiB"), parse_size("1.5 kB"), parse_size(512)
    (17179869184, 1500, 512)
    """
    if isinstance(size, int) and not isinstance(size, bool):
        found = size
    else:
        match = _SIZE.fullmatch(size) if isinstance(size, str) else None
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            likely = match is not None and f"{match[2].lower()}ib" in _UNITS
            raise InvalidInput(
                f"`{size}` is no size",
                hint=(
                    f"write `{match[1]}{match[2].upper()}iB` or `{match[1]}{match[2].upper()}B`"
                    if likely and match
                    else "write a number and a unit, such as `16GiB`, `512MiB` or `16GB`"
                ),
                found=size,
            )
        found = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if found <= 0:
        raise InvalidInput(
            f"`{size}` is no size: it must be above zero", hint="write one such as `16GiB`", found=size
        )
    return found


def parse_memory(size: str | int, name: str) -> int:
    """Read how much of a memory an argument names: as `parse_size`, but below 1 MiB only with a unit.

    Parameters
    ----------
    size : str or int
        As `parse_size` takes it.
    name : str
        The argument's.

    Raises
    ------
    InvalidInput
        As `parse_size`, and if it is a number alone that nobody means as bytes.
    """
    match = _SIZE.fullmatch(str(size))
    if match and not match[2] and 0 < float(match[1]) < 1 << 20:
        likely = "GiB" if float(match[1]) < 1024 else "MiB"
        raise InvalidInput(
            f"`{name}` is {match[1]} bytes",
            hint=f"did you mean `{match[1]}{likely}`? Write a number and a unit",
            where=name,
            found=size,
        )
    return parse_size(size)


def mib(size: int) -> str:
    """Write a number of bytes as MiB, rounded up."""
    return f"{-(-size // (1 << 20))} MiB"
