"""Processors that others use, too: waiting for one on which fixed arithmetic takes no longer than it can.

In an idle virtual machine with an H200, arithmetic, Python and launches of kernels all took 1.7 to 2 times as
long at the same times, for seconds on end, and then not; neither the GPU's clocks nor `/proc/stat` said so.
What explains it is another machine that has the other thread of the core.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
import zlib

SLOW = 1.3  # times the fastest that was seen
PATIENCE = 3.0  # s
_PAUSE = 0.1  # s
_BYTES, _ROUNDS, _REPEATS = bytes(1 << 16), 20, 3  # near the core; 0.3 to 0.7 ms each time

_fastest = multiprocessing.Value("d", math.inf)  # of this process and its forks


def arithmetic() -> float:
    """Seconds that some arithmetic takes where this thread is: the fastest of three times."""
    took = math.inf
    for _ in range(_REPEATS):
        start = time.perf_counter()
        for _ in range(_ROUNDS):
            zlib.crc32(_BYTES)
        took = min(took, time.perf_counter() - start)
    return took


def quiet() -> bool:
    """Whether nobody slows the processor down that this thread is on."""
    took = arithmetic()
    with _fastest.get_lock():
        _fastest.value = min(_fastest.value, took)
        return bool(took <= SLOW * _fastest.value)


def calibrate() -> None:
    """Find out how fast the processors are."""
    _any_quiet(every=True)


def settle(patience: float = PATIENCE) -> bool:
    """Stay on this processor if it is quiet, or move this thread to one that is; wait for one for a while.

    Returns
    -------
    bool
        Whether there was one.
    """
    end = time.perf_counter() + patience
    while not quiet() and not _any_quiet():
        if time.perf_counter() >= end:
            return False
        time.sleep(_PAUSE)
    return True


def _any_quiet(*, every: bool = False) -> bool:
    """Try one processor after the other, up to a quiet one or all; this thread may then go anywhere again.

    The system leaves a thread where it is as long as there is no reason to move it.
    """
    if not hasattr(os, "sched_setaffinity"):
        return False
    allowed, found = os.sched_getaffinity(0), False
    try:
        for number in sorted(allowed):
            os.sched_setaffinity(0, {number})
            found = quiet()
            if found and not every:
                break
    finally:
        os.sched_setaffinity(0, allowed)
    return found
