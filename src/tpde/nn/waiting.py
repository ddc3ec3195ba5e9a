"""Taking a lock that another thread holds, unless that one waits for this thread.

A block's forward pass may hand a layer to another thread and wait for the result. That thread must not wait
for the workspace, which the block has until it returns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Protocol

_POLL = 0.02  # seconds: as often the holder is looked at
_SOON = 0.1  # as long a holder must have waited at one place, where it is known to wait
_LATE = 10.0  # or have been at one place, where it may compute as well

# Where Python code waits for other threads: locks, futures, queues, events, loops, the threads of autograd.
_WAITS = ("threading", "selectors", "torch.futures", "torch.autograd.graph")


def _place(frame: FrameType | None) -> tuple[tuple[int, int] | None, bool]:
    """Where a thread is, by its frame, and whether it waits there for others in code that is not tpde's."""
    if frame is None:
        return None, False
    place, waits = (id(frame), frame.f_lasti), False
    while frame is not None and frame.f_globals.get("__name__") in _WAITS:
        waits, frame = True, frame.f_back
    ours = frame is not None and str(frame.f_globals.get("__name__")).startswith("tpde.")
    return place, waits and not ours


class _Lock(Protocol):
    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...


def acquire(
    lock: _Lock,
    holder: Callable[[], int],
    *,
    clock: Callable[[], float] = time.monotonic,
    frames: Callable[[], Mapping[int, FrameType]] = sys._current_frames,
) -> bool:
    """Wait for a lock, as long as its holder goes on.

    Parameters
    ----------
    lock : RLock
        Which another thread held a moment ago.
    holder : callable
        Which thread holds it, 0 if none does.
    clock : callable
        Gives the time, in seconds.
    frames : callable
        Gives the frame that each thread is in.

    Returns
    -------
    bool
        Whether the lock was taken. If not, its holder has been at one place for so long that it may wait for
        this thread.
    """
    last, since = None, clock()
    while not lock.acquire(timeout=_POLL):
        place, waits = _place(frames().get(holder()))
        now = clock()
        if place is None or place != last:
            last, since = place, now
        elif now - since > (_SOON if waits else _LATE):
            return False
    return True
