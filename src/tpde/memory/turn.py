"""One thread at a time: a lock that a forked process has anew."""

from __future__ import annotations

import threading

from tpde.memory.forks import renew_in_forks


class Turn:
    """The turn of one thread, which may take it again while it has it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        renew_in_forks(self)

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
