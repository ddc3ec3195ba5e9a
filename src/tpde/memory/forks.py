"""What a forked process has anew: of the threads, it has the one that forked."""

from __future__ import annotations

import os
import weakref
from contextlib import ExitStack
from typing import Protocol


class Renewed(Protocol):
    """What waits for threads, or has what only one process may have."""

    def renew(self) -> None:
        """Forget threads that are not here, and give back what is another process's."""


_RENEWED: weakref.WeakSet[Renewed] = weakref.WeakSet()


def renew_in_forks(it: Renewed) -> None:
    """Have `it` renewed in each process that is forked, for as long as somebody holds it."""
    _RENEWED.add(it)


def _forked() -> None:
    with ExitStack() as all_of_them:  # though one fails
        for it in list(_RENEWED):
            all_of_them.callback(it.renew)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
