"""How many threads work: as many as were asked for, or as there are processors."""

from __future__ import annotations

import os

from tpde.errors import InvalidArgument

MAX_THREADS = 1 << 16  # no machine has more processors, and the core would take 2^32 + 1 for 1


def default_threads() -> int:
    """Number of processors that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def check_threads(threads: int | None) -> int:
    """A number of threads, or the default for None.

    Raises
    ------
    InvalidArgument
        If it is not a whole number from 1 to `MAX_THREADS`.
    """
    if threads is None:
        return default_threads()
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS:
        raise InvalidArgument(
            f"{threads!r:.50} threads",
            hint=f"at least 1 is needed, and at most {MAX_THREADS}",
            where="threads",
            found=threads,
        )
    return threads
