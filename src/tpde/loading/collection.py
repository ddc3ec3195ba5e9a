"""Python's cyclic garbage collection, which loading a model sets off and does not need."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from tpde.memory import garbage


class _Next:
    """Whether the next load begins with collecting garbage."""

    collects = False


def collect_first() -> None:
    """Let the next load collect garbage first: there is some in cycles, and memory in it."""
    _Next.collects = True


@contextmanager
def collecting_later() -> Iterator[None]:
    """Let no garbage that is in cycles be collected meanwhile; afterwards as before.

    Building a model makes tens of thousands of objects that stay. One by one they set off a pass over all
    objects there are: 440,000 after PyTorch and transformers are imported, 0.35 s on the host of an H200, in
    which no thread runs Python. What is in no cycle is freed as ever. What streams weights is in cycles with
    what it has read ahead, what accelerate spreads over devices with its hooks, and what a load has left that
    failed may be: after those, garbage is collected first (`collect_first`). With several loads at a time,
    the end of one may let collection begin again before the others are done.

    Examples
    --------
    >>> with collecting_later():
    ...     gc.isenabled()
    False
    """
    if gc.isenabled() and _Next.collects:
        gc.collect()
        _Next.collects = False  # now: what was only found to be dropped just then is gone, too
    try:
        with garbage.collecting_later():
            yield
    except BaseException:
        collect_first()
        raise
