"""What is called while files are read and written."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int], None]
"""Called with a number of source bytes when they are done."""


def no_progress(_: int) -> None:
    """No progress is shown."""
