"""What a check finds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that `verify` found.

    Attributes
    ----------
    file : str
        Path of the file.
    tensor : str or None
        The tensor, where the damage is in one.
    chunk : int or None
        The chunk, where the damage is in one.
    message : str
        What is wrong.
    """

    file: str
    tensor: str | None
    chunk: int | None
    message: str
