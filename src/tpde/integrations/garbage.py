"""Python's cyclic garbage collection, which loading a model sets off and does not need."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager


class _Dropped:
    """Whether something was dropped that leaves garbage in cycles, and memory in it."""

    any = False


def _note() -> None:
    _Dropped.any = True


def collect_when_dropped(thing: object) -> None:
    """Let the next load collect garbage first, if this is no longer there by then."""
    weakref.finalize(thing, _note).atexit = False


@contextmanager
def collecting_later() -> Iterator[None]:
    """Let no garbage that is in cycles be collected meanwhile; afterwards as before.

    Building a model makes tens of thousands of objects that stay. One by one they set off a pass over all
    objects there are: 440,000 after PyTorch and transformers are imported, 0.35 s on the host of an H200, in
    which no thread runs Python. What is in no cycle is freed as ever. What streams weights is in cycles with
    what it has read ahead: where it was dropped before, garbage is collected first. With several loads at a
    time, the end of one may let collection begin again before the others are done.

    Examples
    --------
    >>> with collecting_later():
    ...     gc.isenabled()
    False
    """
    enabled = gc.isenabled()
    try:
        if enabled and _Dropped.any:
            gc.collect()
            _Dropped.any = False  # now: what was only found to be dropped just then is gone, too
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()
