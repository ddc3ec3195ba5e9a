"""What is called while files are read and written."""

from __future__ import annotations

from collections.abc import Callable

from tpde.errors import InvalidArgument

Progress = Callable[[int], None]
"""Called with a number of source bytes when they are done."""


def no_progress(_: int) -> None:
    """No progress is shown."""


def check_progress(progress: object) -> None:
    """Refuse what cannot be called, before anything is done.

    Raises
    ------
    InvalidArgument
        If it cannot.
    """
    if not callable(progress):
        raise InvalidArgument(
            f"`progress` is a {type(progress).__name__}, which cannot be called",
            hint="pass a function that takes a number of bytes, or leave it out",
            where="progress",
            found=progress,
        )
