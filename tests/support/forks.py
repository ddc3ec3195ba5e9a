"""What a forked process does, and whether it ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import pytest

_WITHIN_S = 20


def needs_fork(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that forks a process that has threads."""
    skip = pytest.mark.skipif(not hasattr(os, "fork") or sys.platform == "darwin", reason="needs fork")
    return skip(pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")(test))


def require_in_fork(check: Callable[[], bool]) -> None:
    """Make sure that `check` is true in a forked process, and ends there: it may wait for lost threads."""
    child = os.fork()
    if not child:
        code = 1
        try:
            code = 0 if check() else 2
        finally:
            os._exit(code)
    until = time.monotonic() + _WITHIN_S
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the forked process waits for threads that it does not have")
