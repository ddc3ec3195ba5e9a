"""Python's cyclic garbage collection, where many objects are made that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_later() -> Iterator[None]:
    """Let no garbage that is in cycles be collected meanwhile; afterwards as before.

    What is in no cycle is freed as ever. With several threads at a time, the end of one may let collection
    begin again before the others are done.

    Examples
    --------
    >>> with collecting_later():
    ...     gc.isenabled()
    False
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
