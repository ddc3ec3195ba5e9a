"""Telling what is freed at once from what waits for garbage collection."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def uncollected() -> Iterator[None]:
    """Let no garbage that is in cycles be collected meanwhile."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def alive(refs: Sequence[weakref.ref[Any]]) -> list[Any]:
    """What some references are of, as far as it is there."""
    return [it for it in (ref() for ref in refs) if it is not None]
