"""Buffers that files are read to: who has them, who waits for them, and when they are free again."""

from __future__ import annotations

import ctypes
import threading
import time

import pytest
from support.locking import FakeLock
from support.read_ahead import (
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

from tpde.errors import ReadError
from tpde.io.sources import FileSource

pytestmark = pytest.mark.usefixtures("bounded")


def test_a_buffer_waits_for_its_copy(source: FileSource, data: bytes, fake: FakeLock) -> None:
    feed = reading(1, 3, fake)
    first, second = feed.request(piece(source, 0)), feed.request(piece(source, PIECE))
    address, event = first.wait(), Copied(None)
    first.copied(event)
    time.sleep(0.1)
    assert not second.ready()
    assert ctypes.string_at(address, PIECE) == data[:PIECE]
    event.passed.set()
    check(feed, second, data)
    feed.close()


def test_requests_never_block_and_are_served_in_order(
    source: FileSource, data: bytes, fake: FakeLock
) -> None:
    slow = Slow()
    feed = reading(2, 4, fake, slow)
    tickets = [feed.request(piece(source, i * PIECE)) for i in range(8)]
    soon(lambda: slow.reading == 4, "all threads share the first piece")
    assert not any(ticket.ready() for ticket in tickets)
    slow.go.set()
    soon(tickets[1].ready, "as many as there are buffers are read without being waited for")
    time.sleep(0.05)
    assert not tickets[2].ready()
    for ticket in tickets:
        check(feed, ticket, data)
        ticket.cancel()
    feed.close()


def test_cancelled_while_it_is_read(source: FileSource, data: bytes, fake: FakeLock) -> None:
    """Reads that are under way write to the buffer: nobody else gets it before they end."""
    slow = Slow()
    feed = reading(1, 2, fake, slow)
    first, second = feed.request(piece(source, 0)), feed.request(piece(source, 3 * PIECE))
    soon(lambda: slow.reading == 2, "reading")
    first.cancel()
    time.sleep(0.05)
    assert slow.reading == 2
    slow.go.set()
    check(feed, second, data)
    assert slow.reading == 2 + 4, "the other two reads of the first piece were not begun"
    feed.close()


@pytest.mark.parametrize("how", ["cancelled", "copied"])
def test_what_was_given_back_is_not_waited_for(
    how: str, source: FileSource, data: bytes, fake: FakeLock
) -> None:
    feed = reading(1, 1, fake)
    try:
        ticket = feed.request(piece(source, 0))
        check(feed, ticket, data)
        if how == "copied":
            ticket.copied(Copied())
        else:
            ticket.cancel()
        assert not ticket.ready()
        with pytest.raises(ValueError, match="`at 0` was cancelled, or copied already"):
            waited(ticket)
        check(feed, feed.request(piece(source, PIECE)), data)
    finally:
        feed.close()


def test_memory_stays_while_one_of_several_threads_reads_to_it(source: FileSource, fake: FakeLock) -> None:
    slow = Slow()
    feed = reading(1, 3, fake, slow)
    feed.request(piece(source, 0, 4096))
    soon(lambda: slow.reading == 1, "reading")
    closer = threading.Thread(target=feed.close)
    closer.start()
    soon(lambda: len(threads()) == 1, "those that have nothing to do end")
    assert fake.locked
    slow.go.set()
    closer.join(20)
    assert not fake.locked


def test_a_single_read_that_was_cancelled_meanwhile_frees_its_buffer(
    source: FileSource, data: bytes, fake: FakeLock
) -> None:
    slow = Slow()
    feed = reading(1, 1, fake, slow)
    first, second = feed.request(piece(source, 0, 4096)), feed.request(piece(source, 8192, 4096))
    soon(lambda: slow.reading == 1, "reading")
    first.cancel()
    slow.go.set()
    check(feed, second, data)
    assert not first.ready()
    feed.close()


def test_a_single_read_that_fails_frees_its_buffer(source: FileSource, data: bytes, fake: FakeLock) -> None:
    files = Failing()
    feed, files.broken = reading(1, 1, fake, files), range(SIZE)
    for _ in range(2):
        ticket = feed.request(piece(source, 0, 4096))
        with pytest.raises(ReadError, match="the disk failed"):
            waited(ticket)
        assert not ticket.ready()
    files.broken = range(0)
    check(feed, feed.request(piece(source, 0, 4096)), data)
    feed.close()


def test_nobody_is_left_waiting_for_what_was_cancelled(
    source: FileSource, data: bytes, fake: FakeLock
) -> None:
    slow = Slow()
    feed = reading(1, 1, fake, slow)
    ticket, found = feed.request(piece(source, 0)), list[BaseException]()

    def wait() -> None:
        try:
            ticket.wait()
        except ValueError as error:
            found.append(error)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    soon(lambda: slow.reading == 1, "reading")
    ticket.cancel()
    waiter.join(20)
    assert found, "it waits for ever"
    slow.go.set()
    feed.close()


def test_ctrl_c_while_a_piece_is_cancelled(
    source: FileSource, data: bytes, fake: FakeLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more of it is read: its buffer is free once, and another's."""
    slow = Slow()
    feed = reading(1, 1, fake, slow)
    ticket = feed.request(piece(source, 0))
    soon(lambda: slow.reading == 1, "reading")

    def interrupted(ticket: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(feed._queue, "_skip", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ticket.cancel()
    slow.go.set()
    others = [feed.request(piece(source, i * PIECE)) for i in (1, 2, 3)]
    addresses = set()
    for it in others:
        addresses.add(waited(it))
        it.copied(Copied())
    assert slow.reading == 1 + 3 * 4
    assert len(addresses) == 1, "there is one buffer"
    check(feed, feed.request(piece(source, 0)), data)
    feed.close()
