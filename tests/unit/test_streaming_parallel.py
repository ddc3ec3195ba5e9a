"""Work on a few threads: all of it is done once, and whatever ends it leaves no thread."""

from __future__ import annotations

import threading

import pytest

from tpde.streaming.parallel import overlapped


class Failed(Exception):
    """What a piece of work raises."""


def threads() -> list[str]:
    """Those that were started for work."""
    return [it.name for it in threading.enumerate() if it.name.startswith("tpde-host")]


def test_overlapped() -> None:
    """The second thing is done with a piece while the first is done with the next one, in another thread."""
    locked, log = threading.Event(), list[tuple[str, int, bool]]()
    main = threading.get_ident()

    def first(piece: int) -> None:
        if piece == 2:
            assert locked.wait(60), "what follows piece 1 is waited for, though piece 2 has begun"
        log.append(("first", piece, threading.get_ident() == main))

    def second(piece: int) -> None:
        locked.set()
        log.append(("second", piece, threading.get_ident() == main))

    overlapped([1, 2, 3], first, second)
    assert [it for it in log if it[0] == "first"] == [("first", n, True) for n in (1, 2, 3)]
    assert [it for it in log if it[0] == "second"] == [("second", n, False) for n in (1, 2, 3)]
    assert not threads()


def test_the_first_fails() -> None:
    after = []

    def first(piece: int) -> None:
        if piece == 2:
            raise Failed

    with pytest.raises(Failed):
        overlapped([1, 2, 3], first, after.append)
    assert set(after) <= {1}
    assert not threads()


def test_the_second_fails() -> None:
    """It is not tried again, though the first is done with all."""
    before, after = [], []

    def second(piece: int) -> None:
        after.append(piece)
        if piece == 2:
            raise Failed

    with pytest.raises(Failed):
        overlapped(range(9), before.append, second)
    assert before == list(range(9))
    assert after == [0, 1, 2]
    assert not threads()
