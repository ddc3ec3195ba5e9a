"""How long a thread waits for the workspace: by where the one that holds it is."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")

from tpde.nn.waiting import acquire


def frames(*modules: str) -> Any:
    """A thread's frames, the innermost first, by the modules of their code."""
    back = None
    for name in reversed(modules):
        back = SimpleNamespace(f_globals={"__name__": name}, f_lasti=0, f_back=back)
    return back


class Held:
    """A lock that somebody else has until some second; waiting for it takes no time."""

    def __init__(self, until: float) -> None:
        self.now, self.until = 1000.0, 1000.0 + until
        self.frames: dict[int, Any] = {}

    def wanted(self, holder: Callable[[], int]) -> bool:
        """Ask for it."""
        return acquire(self, holder, clock=lambda: self.now, frames=lambda: self.frames)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        assert 0 < timeout < 0.1, "as often the holder is looked at"
        self.now += timeout
        return self.now >= self.until


@pytest.mark.parametrize(
    ("modules", "patience"),
    [
        (("threading", "threading", "app"), 0.1),
        (("threading", "concurrent.futures._base", "app", "threading"), 0.1),
        (("threading",), 0.1),
        (("selectors", "asyncio.base_events", "app"), 0.1),
        (("torch.futures", "app"), 0.1),
        (("torch.autograd.graph", "torch._tensor", "app"), 0.1),
        (("app",), 10),
        (("app", "threading", "threading"), 10),
        (("torch.nn.functional", "tpde.nn.modules", "app"), 10),
        (("threading", "tpde.streaming.streamer", "app"), 10),
        (("threading", "threading", "tpde.host.pinned", "app"), 10),
        (("threading", "tpdes", "app"), 0.1),
    ],
)
def test_a_holder_that_stays_where_it_is(modules: tuple[str, ...], patience: float) -> None:
    """It may wait for this thread: soon, if it waits for others, unless that is tpde, which needs nobody."""
    lock = Held(60)
    lock.frames[7] = frames(*modules)
    assert lock.wanted(lambda: 7) is False
    assert patience < lock.now - 1000 < patience + 0.1


def test_a_holder_that_goes_on_is_waited_for() -> None:
    lock, steps = Held(60), iter(range(1_000_000))

    def holder() -> int:
        lock.frames[7].f_lasti = next(steps)
        return 7

    lock.frames[7] = frames("threading", "app")
    assert lock.wanted(holder) is True


def test_a_holder_that_is_called_anew_is_waited_for() -> None:
    lock = Held(60)
    kept = []

    def holder() -> int:
        kept.append(frames("threading", "app"))
        lock.frames[7] = kept[-1]
        return 7

    assert lock.wanted(holder) is True


@pytest.mark.parametrize("holder", [0, 8])
def test_a_lock_that_nobody_holds_is_taken(holder: int) -> None:
    """Threads let go of it between two looks, and some have ended."""
    lock = Held(60)
    lock.frames[7] = frames("threading", "app")
    assert lock.wanted(lambda: holder) is True


def test_time_counts_from_when_the_holder_stopped() -> None:
    lock = Held(60)
    lock.frames[7] = frames("threading", "app")

    def holder() -> int:
        lock.frames[7].f_lasti = min(lock.now, 1020)
        return 7

    assert lock.wanted(holder) is False
    assert 20.1 < lock.now - 1000 < 20.2
