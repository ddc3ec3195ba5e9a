"""Paths that callers give."""

from __future__ import annotations

from pathlib import Path


def anchored(path: Path) -> Path:
    """The same path, whichever folder becomes the current one; links are not followed."""
    try:
        return path.absolute()
    except OSError:  # the current folder is gone, and nothing can be found there
        return path
