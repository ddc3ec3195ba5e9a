"""A few threads for work that the system does: reading, faulting pages in, locking them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    left, lock, stop, go = iter(work), threading.Lock(), threading.Event(), threading.Event()
    reports: queue.SimpleQueue[tuple[T] | BaseException | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            go.wait()  # starting one beside others at work took 40 ms where there are two processors
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
        go.set()
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
        go.set()
        for thread in crew:
            if thread.ident is not None:
                thread.join()


def staged(
    groups: Sequence[Sequence[T]],
    do: Callable[[T], None],
    threads: int,
    then: Callable[[int], None],
    done: Callable[[T], None] = lambda _: None,
) -> None:
    """Do all pieces of some groups of work, and something with each group when its pieces are done.

    Whatever ends this, no thread is left behind. After a failure of `then` nothing more is begun.

    Parameters
    ----------
    groups : sequence of sequence
        The pieces, which are begun in this order.
    do, threads, done
        As of `for_each`.
    then : callable
        Called with the number of each group, in order, in one thread more, while others' pieces are done.
    """
    failed, errors = threading.Event(), list[BaseException]()
    left, ready, begun = [len(group) for group in groups], queue.SimpleQueue["int | None"](), 0

    def follow() -> None:
        try:
            while (number := ready.get()) is not None and not failed.is_set():
                then(number)
        except BaseException as error:
            errors.append(error)
            failed.set()

    def submit() -> None:
        nonlocal begun
        while begun < len(left) and not left[begun]:
            ready.put(begun)
            begun += 1

    def work() -> Iterator[tuple[int, T]]:
        for number, group in enumerate(groups):
            for piece in group:
                if failed.is_set():
                    return
                yield number, piece

    def finished(piece: tuple[int, T]) -> None:
        done(piece[1])
        left[piece[0]] -= 1
        submit()

    # Not an executor: those end with the main thread, while others may still wait for this work.
    follower = threading.Thread(target=follow, name=NAME, daemon=True)
    try:
        follower.start()
        submit()
        for_each(work(), lambda piece: do(piece[1]), threads, finished)
    except BaseException:
        failed.set()
        raise
    finally:
        ready.put(None)
        if follower.ident is not None:
            follower.join()
    if errors:
        raise errors.pop()
