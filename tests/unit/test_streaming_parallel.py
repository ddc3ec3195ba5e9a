"""Work on a few threads: all of it is done once, and whatever ends it leaves no thread."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest

from tpde.host.workers import for_each, staged

pytestmark = pytest.mark.usefixtures("bounded")


class Failed(Exception):
    """What a piece of work raises."""


def threads() -> list[str]:
    """Those that were started for work."""
    return [it.name for it in threading.enumerate() if it.name.startswith("tpde-host")]


def test_staged() -> None:
    """What follows a group is done while the next one's pieces are, in another thread, in order."""
    locked, lock = threading.Event(), threading.Lock()
    log, done, main = list[object](), list[str](), threading.get_ident()

    def do(piece: str) -> None:
        if piece == "c":
            assert locked.wait(60), "what follows the first group is waited for"
        with lock:
            log.append(piece)
        assert threading.get_ident() != main

    def then(number: int) -> None:
        with lock:
            log.append(number)
        locked.set()
        assert threading.get_ident() != main

    staged([["a", "b"], [], ["c", "d"], ["e"]], do, 3, then, done.append)
    assert [it for it in log if isinstance(it, int)] == [0, 1, 2, 3]
    assert {*log[: log.index(0)]} >= {"a", "b"}
    assert log.index("c") > log.index(0)
    assert sorted(done) == list("abcde")
    assert not threads()


def test_nothing_staged() -> None:
    staged([], lambda _: None, 2, lambda _: pytest.fail("there is no group"))


def test_a_piece_fails() -> None:
    after = []

    def do(piece: int) -> None:
        if piece == 2:
            raise Failed

    with pytest.raises(Failed):
        staged([[1], [2], [3]], do, 1, after.append)
    assert set(after) <= {0}
    assert not threads()


def test_what_follows_fails() -> None:
    """It is not tried again."""
    before, after = [], []

    def then(number: int) -> None:
        after.append(number)
        if number == 2:
            raise Failed

    with pytest.raises(Failed):
        staged([[number] for number in range(9)], before.append, 1, then)
    assert before == list(range(len(before)))
    assert after == [0, 1, 2]
    assert not threads()


def test_after_a_failure_of_what_follows_nothing_is_begun() -> None:
    """The third piece is under way by then."""
    before, begun = list[int](), threading.Event()
    follower: list[threading.Thread] = []

    def do(number: int) -> None:
        before.append(number)
        if number == 2:
            assert begun.wait(60)
            follower[0].join(60)

    def then(number: int) -> None:
        if number == 1:
            follower.append(threading.current_thread())
            begun.set()
            raise Failed

    with pytest.raises(Failed):
        staged([[number] for number in range(9)], do, 1, then)
    assert before == [0, 1, 2]


def test_after_a_failure_nothing_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though pieces are done, of groups that wait for others to be followed."""
    joined, go, after = list[int](), threading.Event(), list[int]()
    begun, join = threading.Event(), threading.Thread.join

    def noted(thread: threading.Thread, timeout: float | None = None) -> None:
        joined.append(1)
        if len(joined) == 2:  # after the thread that did the work, the one that follows
            go.set()
        join(thread, timeout)

    def do(number: int) -> None:
        assert not number or begun.wait(60)
        if number == 2:
            raise Failed

    def then(number: int) -> None:
        after.append(number)
        begun.set()
        assert go.wait(60)

    monkeypatch.setattr(threading.Thread, "join", noted)
    with pytest.raises(Failed):
        staged([[0], [1], [2]], do, 1, then)
    assert after == [0]
    assert not threads()


@pytest.mark.parametrize("fails", [False, True])
def test_work_begins_when_all_threads_are_there(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside threads at work, each start would take long; where one cannot be started, none is left."""
    started, seen, start = list[threading.Thread](), list[int](), threading.Thread.start

    def counted(thread: threading.Thread) -> None:
        if len(started) == 4 and fails:
            raise Failed
        start(thread)
        started.append(thread)

    monkeypatch.setattr(threading.Thread, "start", counted)
    with pytest.raises(Failed) if fails else nullcontext():
        for_each(range(9), lambda piece: seen.append(len(started)), 5)
    assert seen == ([] if fails else [5] * 9)
    assert not threads()


def test_one_thread_at_a_time_asks_for_work() -> None:
    """As generators want it."""
    asked, second = list[int](), threading.Event()
    inside = threading.Semaphore(1)

    class Work:
        def __iter__(self) -> Work:
            return self

        def __next__(self) -> int:
            if not inside.acquire(blocking=False):
                second.set()
                pytest.fail("two threads ask at once")
            try:
                asked.append(1)
                if len(asked) == 1:
                    second.wait(0.1)
                if len(asked) > 20:
                    raise StopIteration
                return len(asked)
            finally:
                inside.release()

    for_each(Work(), lambda _: None, 4)
    assert not second.is_set()
