"""Timing: what is compared runs in turns, after runs to warm up, and medians count."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

Key = TypeVar("Key", bound=Hashable)
Thing = TypeVar("Thing")
Work = Callable[[], Any]
Clock = Callable[[Work], float]


def each(work: Callable[[Thing], object], things: Iterable[Thing]) -> None:
    """Do the same with several things, one after the other."""
    for it in things:
        work(it)


def wall(work: Work) -> float:
    """Seconds by the host's clock."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def to_the_end(work: Work) -> float:
    """Seconds by the host's clock, to the end of all work on the device, if there is one."""
    from benchmarks.harness.gpu import wait

    wait()
    start = time.perf_counter()
    made = work()
    wait()
    took = time.perf_counter() - start
    del made  # is not freed before
    return took


def on_device(work: Work, before: Work | None = None) -> float:
    """Seconds by CUDA events, of what comes right after something else that does not count."""
    import torch

    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    if before is not None:
        before()
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e-3


def itself(work: Work) -> float:
    """What the work says that it took."""
    return float(work())


def alternate(
    ways: Mapping[Key, Work], runs: int, *, warm: int = 1, clock: Clock = wall
) -> dict[Key, list[float]]:
    """Seconds of each of some ways, in turns (A B C A B C ...): of `runs`, after `warm` that do not count."""
    taken: dict[Key, list[float]] = {name: [] for name in ways}
    for number in range(warm + runs):
        for name, way in ways.items():
            seconds = clock(way)
            if number >= warm:
                taken[name].append(seconds)
    return taken


def medians(taken: Mapping[Key, list[float]]) -> dict[Key, float]:
    """Of all."""
    return {name: statistics.median(them) for name, them in taken.items()}


class Laps:
    """Seconds of what is done again and again, by name, of calls whose results are wanted as well.

    Attributes
    ----------
    seconds : dict of str to list of float
        Of each call.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def __call__(self, name: str, work: Work) -> Any:
        """Time a call; returns what it does."""
        start = time.perf_counter()
        result = work()
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        return result

    def median(self, name: str, warm: int) -> float:
        """Of one, without the first ones."""
        return statistics.median(self.seconds[name][warm:])
