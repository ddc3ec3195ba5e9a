"""Reading ahead where a file, a disk or a device fails, at Ctrl-C, and at the end."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.locking import FakeLock
from support.read_ahead import (
    MIB,
    PIECE,
    SIZE,
    Copied,
    Failing,
    Slow,
    check,
    piece,
    reading,
    soon,
    threads,
    waited,
)

from tpde.errors import ReadError, Truncated
from tpde.io.sources import FileSource

pytestmark = pytest.mark.usefixtures("bounded")


@pytest.mark.parametrize("cached", [False, True])
def test_truncated_while_open(
    cached: bool, source: FileSource, data: bytes, monkeypatch: pytest.MonkeyPatch, fake: FakeLock
) -> None:
    if cached:
        monkeypatch.setattr(os, "O_DIRECT", os.O_DIRECTORY)
    feed = reading(2, 2, fake)
    check(feed, ticket := feed.request(piece(source, 4 * MIB)), data)
    ticket.cancel()
    os.truncate(source.name, 4 * MIB + 5000)
    ticket = feed.request(piece(source, 4 * MIB))
    for _ in range(2):
        with pytest.raises(Truncated, match=r"`at 4194304`: `.*blobs` ends at byte 4199304") as caught:
            waited(ticket)
        assert (caught.value.where, caught.value.found) == (source.name, 4199304)
        assert "fetch" in (caught.value.hint or "")
    assert not ticket.ready()
    ticket.cancel()
    check(feed, feed.request(piece(source, 4 * MIB, 5000)), data)
    for _ in range(5):  # buffers come back
        with pytest.raises(Truncated):
            waited(feed.request(piece(source, 5 * MIB)))
    feed.close()


def test_replaced_while_open(source: FileSource, data: bytes, tmp_path: Path, fake: FakeLock) -> None:
    """The file that was opened is read, also by a reader that opens it later."""
    (tmp_path / "other").write_bytes(bytes(SIZE))
    (tmp_path / "other").replace(source.name)
    feed = reading(2, 2, fake)
    check(feed, feed.request(piece(source, 1000)), data)
    os.unlink(source.name)
    check(feed, feed.request(piece(source, MIB)), data)
    feed.close()


def test_the_disk_fails(source: FileSource, data: bytes, fake: FakeLock) -> None:
    files = Failing()
    feed, files.broken = reading(2, 4, fake, files), range(MIB, MIB + PIECE)
    for _ in range(4):  # more than there are buffers
        tickets = [feed.request(piece(source, at)) for at in (0, MIB, 2 * MIB)]
        check(feed, tickets[0], data)
        tickets[0].copied(Copied())
        with pytest.raises(
            ReadError, match=r"`at 1048576`: bytes \d+ to \d+ of .*: the disk failed; check it"
        ):
            waited(tickets[1])
        check(feed, tickets[2], data)
        tickets[1].cancel()
        tickets[2].cancel()
    files.broken = range(0)
    check(feed, feed.request(piece(source, MIB)), data)
    feed.close()


@pytest.mark.parametrize("where", ["event", "bind"])
def test_the_device_fails(where: str, source: FileSource, fake: FakeLock) -> None:
    """Whoever waits is told, instead of waiting for threads that have ended."""

    def broken(*args: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    if where == "bind":
        fake.bind = broken  # type: ignore[method-assign]
    feed = reading(1, 2, fake)
    first = feed.request(piece(source, 0))
    if where == "event":
        waited(first)
        event = Copied()
        event.synchronize = broken  # type: ignore[method-assign]
        first.copied(event)
        first = feed.request(piece(source, PIECE))
    with pytest.raises(ReadError, match="an illegal memory access was encountered; load the model again"):
        waited(first)
    feed.close()


def test_ctrl_c(source: FileSource, data: bytes, request: pytest.FixtureRequest, fake: FakeLock) -> None:
    # A job in the background ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    slow = Slow()
    feed = reading(1, 2, fake, slow)
    ticket = feed.request(piece(source, 0))
    presser = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    presser.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ticket.wait()
    assert time.monotonic() - began < 5
    presser.join()
    ticket.cancel()
    slow.go.set()
    check(feed, feed.request(piece(source, PIECE)), data)
    feed.close()


@contextmanager
def interrupted(turn: int) -> Iterator[None]:
    """Ctrl-C in this thread, when it wakes others up for the `turn`th time."""
    left, notify_all = turn, threading.Condition.notify_all

    def notify(condition: threading.Condition) -> None:
        nonlocal left
        if threading.current_thread() is threading.main_thread():
            left -= 1
            if not left:
                raise KeyboardInterrupt
        notify_all(condition)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Condition, "notify_all", notify)
        yield


def test_ctrl_c_in_a_request_or_a_cancellation(source: FileSource, data: bytes, fake: FakeLock) -> None:
    """Nobody has the ticket then: its buffer is free all the same, and once."""
    feed = reading(1, 1, fake)
    try:
        with interrupted(1), pytest.raises(KeyboardInterrupt):
            feed.request(piece(source, 0))
        for turn in (1, 2):
            ticket = feed.request(piece(source, 0))
            check(feed, ticket, data)
            with interrupted(turn), pytest.raises(KeyboardInterrupt):
                ticket.cancel()
            ticket.cancel()
            first, second = feed.request(piece(source, PIECE)), feed.request(piece(source, 0))
            check(feed, first, data)
            time.sleep(0.05)
            assert not second.ready(), "there is one buffer"
            check(feed, first, data)
            first.cancel()
            check(feed, second, data)
            second.cancel()
    finally:
        feed.close()


@pytest.mark.parametrize("how", ["close", "forget"])
def test_the_end_while_reading(how: str, source: FileSource, fake: FakeLock) -> None:
    """Memory stays until the last read, and the last copy, are done."""
    slow = Slow(MIB)
    feed = reading(2, 2, fake, slow)
    first, second = feed.request(piece(source, 0)), feed.request(piece(source, MIB))
    event = Copied(None)
    first.wait()
    first.copied(event)
    soon(lambda: slow.reading == 2, "reading")
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            second.wait()
        except BaseException as error:
            failed.append(error)

    if how == "close":
        waiter, closer = threading.Thread(target=wait), threading.Thread(target=feed.close)
        waiter.start()
        time.sleep(0.05)
        closer.start()
        waiter.join(20)
        assert isinstance(failed[0], ReadError)
        assert "its model was closed" in str(failed[0])
    else:
        del feed, wait
        gc.collect()
    assert fake.locked
    slow.go.set()
    time.sleep(0.05)
    assert fake.locked
    event.passed.set()
    soon(lambda: not fake.locked, "memory is given back")
    if how == "close":
        closer.join(20)
        assert not closer.is_alive()


def test_forgotten_while_idle(fake: FakeLock) -> None:
    feed = reading(2, 2, fake)
    assert len(threads()) == 2
    del feed
    gc.collect()
    soon(lambda: not fake.locked and not threads(), "threads end")


def test_closed_by_one_of_its_own_threads(source: FileSource, data: bytes, fake: FakeLock) -> None:
    """As when the garbage that a reader allocates has the model collected: it may hold the lock then."""
    feed = reading(2, 3, fake)
    ended: list[bool] = []

    class Closing:
        def read(self, *span: object) -> None:
            feed.close()
            ended.append(True)

    feed.trace = Closing()
    feed.request(piece(source, 0))
    soon(lambda: bool(ended), "closing waits for ever")
    soon(lambda: not threads(), "threads are left")
