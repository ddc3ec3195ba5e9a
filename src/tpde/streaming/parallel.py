"""A few threads for work that the system does: reading, faulting pages in, locking them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

NAME = "tpde-host"  # of these threads


def for_each(
    work: Iterable[T], do: Callable[[T], None], threads: int, done: Callable[[T], None] = lambda _: None
) -> None:
    """Do all pieces of work, in any order.

    Whatever ends this (an error of `do`, Ctrl-C), no thread is left behind: each finishes what it is at.

    Parameters
    ----------
    work : iterable
        The pieces.
    do : callable
        Called with each, in some thread.
    threads : int
        How many.
    done : callable, optional
        Called with each after it was done, in this thread.
    """
    left, lock, stop = iter(work), threading.Lock(), threading.Event()
    reports: queue.SimpleQueue[tuple[T] | BaseException | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            while not stop.is_set():
                with lock:
                    piece = next(left, None)
                if piece is None:
                    break
                do(piece)
                reports.put((piece,))
        except BaseException as error:
            reports.put(error)
        reports.put(None)

    crew = [threading.Thread(target=run, name=NAME, daemon=True) for _ in range(threads)]
    running = 0
    try:
        for thread in crew:
            thread.start()
            running += 1
        while running:
            report = reports.get()
            if report is None:
                running -= 1
            elif isinstance(report, BaseException):
                raise report
            else:
                done(report[0])
    finally:
        stop.set()
        for thread in crew:
            if thread.ident is not None:
                thread.join()


def overlapped(work: Iterable[T], first: Callable[[T], None], second: Callable[[T], None]) -> None:
    """Do one thing with each piece of work, and another after it while the next piece is begun.

    Whatever ends this, no thread is left behind; after a failure of `second` it is not tried again.

    Parameters
    ----------
    work : iterable
        The pieces.
    first : callable
        Called with each, in this thread.
    second : callable
        Called with each in the same order, in another thread.
    """
    failed = threading.Event()

    def after(piece: T) -> None:
        if failed.is_set():
            return
        try:
            second(piece)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(1, NAME) as pool:
        jobs: list[Future[None]] = []
        try:
            for piece in work:
                first(piece)
                jobs.append(pool.submit(after, piece))
        except BaseException:
            failed.set()
            raise
        for job in jobs:
            job.result()
