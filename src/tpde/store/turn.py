"""One thread at a time: a lock that a forked process has anew."""

from __future__ import annotations

import os
import threading
import weakref


class Turn:
    """The turn of one thread, which may take it again while it has it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _TURNS.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Take it from a thread that is not here: not from this one."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = threading.RLock()


_TURNS: weakref.WeakSet[Turn] = weakref.WeakSet()


def _forked() -> None:
    """Renew all: of the threads, this process has the one that forked."""
    for turn in list(_TURNS):
        turn.renew()


os.register_at_fork(after_in_child=_forked)
