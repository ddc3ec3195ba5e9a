"""Threads kept for the life of the process, and the measured point from which they pay.

For work whose loop is in Python but whose steps release the GIL, such as zstd frames. The core has threads
of its own.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import ParamSpec, TypeVar, cast

MAX_THREADS = 256
# Handing work to waiting threads and back took 45 us (2 threads) to 110 us (8) on a 2.5 GHz Xeon, making a
# pool for it 0.27 to 4.2 ms. What takes one thread less than this is never shared, and needs no measurement.
LEAST_SECONDS = 30e-6

P = ParamSpec("P")
T = TypeVar("T")

_lock = threading.Lock()
_executor: ThreadPoolExecutor | None = None


def _kept() -> ThreadPoolExecutor:
    """The pool. It starts a thread only when work comes and none waits."""
    global _executor  # noqa: PLW0603
    with _lock:
        if _executor is None:
            _executor = ThreadPoolExecutor(MAX_THREADS, "tpde")
        return _executor


def _after_fork() -> None:
    """Forget the pool: its threads did not come along."""
    global _executor, _lock
    _executor, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _submit(function: Callable[[], T]) -> Future[T] | None:
    """Have the pool call a function; None if it does not: at the interpreter's end executors take nothing."""
    try:
        return _kept().submit(function)
    except RuntimeError:
        return None


class Beside(Executor):
    """A thread beside others, which does one thing after the other.

    At the interpreter's end, when executors take nothing any more, callers do the rest themselves: what a
    thread saves then, or a function that is called at exit, is saved.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "tpde")
        self._last: Future[object] | None = None

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Do it, after all before."""
        if self._executor is not None:
            try:
                made = self._executor.submit(fn, *args, **kwargs)
            except RuntimeError:
                if self._last is not None:
                    wait([self._last])
                self._executor.shutdown(cancel_futures=True)  # it may have taken what it found no thread for
                self._executor = None
            else:
                self._last = cast("Future[object]", made)
                return made
        done = Future[T]()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the thread."""
        if self._executor is not None:
            self._executor.shutdown(wait, cancel_futures=cancel_futures)


@functools.cache
def hand_off(threads: int) -> float:
    """Seconds that sharing work among threads costs here: measured once a process, in about 1 ms."""

    def once() -> float:
        start = time.perf_counter()
        for future in [_submit(int) for _ in range(threads - 1)]:
            if future is None:
                return math.inf
            future.result()
        return time.perf_counter() - start

    once()  # starts the threads
    return statistics.median(once() for _ in range(5))


def pays(seconds: float, threads: int) -> bool:
    """Whether threads save more of the work than handing it to them costs.

    Parameters
    ----------
    seconds : float
        What one thread is expected to take.
    threads : int
        How many would share it.
    """
    return threads > 1 and seconds > LEAST_SECONDS and seconds * (1 - 1 / threads) > hand_off(threads)


def each(
    function: Callable[[int], T], numbers: range, *, seconds: float, threads: int, shared: bool | None = None
) -> list[T]:
    """Call a function for each number, on this thread or on several.

    Parameters
    ----------
    function : callable
        Takes a number; may run on any thread.
    numbers : range
        Which numbers. Threads take them in ascending order as they come.
    seconds : float
        What one thread is expected to take for all of them.
    threads : int
        The most threads to use, this one among them.
    shared : bool, optional
        Whether to share the work; None: if it pays.

    Returns
    -------
    list
        The results in the order of the numbers.

    Raises
    ------
    Exception
        What `function` raised for the lowest number for which it did, once no thread works any longer.
    """
    workers = min(threads, len(numbers), MAX_THREADS)
    if workers < 2 or not (pays(seconds, workers) if shared is None else shared):
        return [function(number) for number in numbers]
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}
    turn = itertools.count()

    def work() -> None:
        while not errors and (k := next(turn)) < len(numbers):
            try:
                results[k] = function(numbers[k])
            except BaseException as error:
                errors[k] = error

    futures = [_submit(work) for _ in range(workers - 1)]
    work()
    for future in futures:
        if future is not None:
            future.result()
    if errors:
        raise errors[min(errors)]
    return [results[k] for k in range(len(numbers))]


def begin(function: Callable[[], T], *, seconds: float) -> Callable[[], T]:
    """Call a function on another thread, or on this one if that does not pay.

    Parameters
    ----------
    function : callable
        May run on any thread.
    seconds : float
        What it is expected to take.

    Returns
    -------
    callable
        Waits for the result, and gives or raises it. It must be called: until then `function` may be at work.
    """
    if not pays(seconds, 2):
        found = function()
        return lambda: found
    made, claim = Future[T](), threading.Lock()

    def run() -> None:
        if not claim.acquire(blocking=False):  # the pool took what it found no thread for, and calls it later
            return
        try:
            made.set_result(function())
        except BaseException as error:
            made.set_exception(error)

    if _submit(run) is None:
        run()
    return made.result
