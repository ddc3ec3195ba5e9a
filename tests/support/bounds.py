"""A bound on what a test takes: one that waits for ever fails."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SECONDS, AGAIN = 60.0, 2.0


@contextmanager
def bound() -> Iterator[None]:
    """Raise `TimeoutError` in the main thread after a while, and again and again: clean-ups may wait, too."""
    if os.environ.get("HYPOTHESIS_PROFILE") == "thorough":  # which takes as long as it takes
        yield
        return

    def late(*_: Any) -> None:
        raise TimeoutError("the test takes too long")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
