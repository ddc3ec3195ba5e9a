"""Reading ahead from files: every byte, in any order, past the page cache or not, and what fails."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.locking import FakeLock

from tpde.errors import InvalidInput, ReadError, Truncated, UnsupportedDevice
from tpde.host.direct_io import Files
from tpde.host.disk import SLACK, ReadAhead
from tpde.io.sources import ByteSource, BytesSource, Extent, FileSource

pytestmark = pytest.mark.usefixtures("bounded")

MIB = 1 << 20
SIZE = 6 * MIB + 1234
PIECE = 256 << 10


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLock]:
    """Afterwards nothing is locked, and no thread left."""
    monkeypatch.delenv("TPDE_HOST_MEMORY", raising=False)
    made = FakeLock()
    yield made
    gc.collect()
    soon(lambda: not threads(), "threads are left")
    assert not made.locked


@pytest.fixture(scope="module")
def data() -> bytes:
    return os.urandom(SIZE)


@pytest.fixture
def source(tmp_path: Path, data: bytes) -> Iterator[FileSource]:
    (tmp_path / "blobs").write_bytes(data)
    made = FileSource(tmp_path / "blobs")
    yield made
    made.close()


def reading(buffers: int, threads: int, page_lock: FakeLock | None, files: Any = None) -> ReadAhead:
    """Small reads, so that threads share a piece."""
    return ReadAhead(buffers, PIECE, threads, page_lock, files=files, read_bytes=64 << 10)


def threads() -> list[str]:
    return [it.name for it in threading.enumerate() if it.name == "tpde-disk"]


def soon(true: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + 20
    while not true():
        assert time.monotonic() < until, what
        time.sleep(0.002)


def piece(source: Any, offset: int, size: int = PIECE) -> Extent:
    return Extent(source, offset, size, f"at {offset}")


def waited(ticket: Any) -> int:
    """What `wait` gives, or raises; it must do either soon, whatever has become of the buffers."""
    found: list[int | BaseException] = []

    def wait() -> None:
        try:
            found.append(ticket.wait())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(20)
    assert found, f"`{ticket.extent.name}` is waited for in vain"
    if isinstance(found[0], BaseException):
        raise found.pop()  # type: ignore[misc]
    return found[0]


def check(feed: ReadAhead, ticket: Any, data: bytes) -> None:
    extent = ticket.extent
    found = ctypes.string_at(waited(ticket), extent.size)
    assert found == data[extent.offset : extent.offset + extent.size], extent.name
    assert ticket.ready()


class Copied:
    """An event that passes when it is told to, or after a delay."""

    def __init__(self, delay: float | None = 0.0) -> None:
        self.passed = threading.Event()
        self.delay = delay

    def synchronize(self) -> None:
        if self.delay is not None:
            time.sleep(self.delay)
            self.passed.set()
        assert self.passed.wait(20)


class Slow(Files):
    """Holds reads back until they are let go, those from some offset on."""

    def __init__(self, begin: int = 0) -> None:
        super().__init__()
        self.go, self.reading, self.begin = threading.Event(), 0, begin

    def read(self, source: ByteSource, offset: int, out: memoryview, size: int) -> None:
        if offset >= self.begin:
            self.reading += 1
            assert self.go.wait(20)
        super().read(source, offset, out, size)


class Failing(Files):
    """A disk that fails where it is read from some offset to another.

    Attributes
    ----------
    broken : range
        The offsets.
    """

    broken = range(0)

    def read(self, source: ByteSource, offset: int, out: memoryview, size: int) -> None:
        if offset in self.broken:
            raise OSError(errno.EIO, "Input/output error")
        super().read(source, offset, out, size)


# ---- every byte ----


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("buffers", [1, 5])
def test_a_whole_file(buffers: int, count: int, source: FileSource, data: bytes, fake: FakeLock) -> None:
    feed = reading(buffers, count, fake)
    assert feed.ahead == buffers * PIECE
    assert feed.locked_bytes == feed.private_bytes == fake.bytes == buffers * (PIECE + SLACK)
    tickets = [feed.request(piece(source, at, min(PIECE, SIZE - at))) for at in range(0, SIZE, PIECE)]
    for ticket in tickets:
        check(feed, ticket, data)
        ticket.copied(Copied())
    assert feed.device_address(tickets[0].extent) is None
    feed.close()
    feed.close()


@pytest.mark.parametrize("mode", ["direct", "cached", "direct refused when reading", "memory"])
@pytest.mark.parametrize("seed", range(3))
def test_any_order(
    seed: int, mode: str, source: FileSource, data: bytes, fake: FakeLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any offsets and sizes, cancelled at any time, copies of any length: nothing is overwritten in use."""
    reads, preadv = {"direct": 0, "cached": 0}, os.preadv

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        kind = "cached" if descriptor == source.fileno() else "direct"
        if kind == "direct" and mode != "direct":
            raise OSError(errno.EINVAL, "Invalid argument")
        reads[kind] += 1
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    if mode == "cached":
        monkeypatch.setattr(os, "O_DIRECT", os.O_DIRECTORY)  # an error, as of file systems without it
    origin: Any = BytesSource(data) if mode == "memory" else source
    draw = random.Random(seed)
    feed = reading(3, 4, fake)
    pending: list[Any] = []
    copying: list[tuple[Any, int, bytes, Copied]] = []

    def check_copies() -> None:
        """What is being copied from must not change: a buffer is not read to before its event has passed."""
        for extent, address, before, event in list(copying):
            found = ctypes.string_at(address, extent.size)
            if event.passed.is_set():
                copying.remove((extent, address, before, event))
            else:
                assert found == before, "overwritten while it was copied"

    for _ in range(300):
        size = draw.choice((1, 4096, PIECE, draw.randint(1, PIECE)))
        offset = draw.choice((0, SIZE - size, draw.randint(0, SIZE - size), draw.randint(0, 9) << 12))
        pending.append(feed.request(piece(origin, min(offset, SIZE - size), size)))
        for ticket in list(pending):
            if draw.random() < 0.1:
                pending.remove(ticket)
                ticket.cancel()
                ticket.cancel()
        while len(pending) > draw.randint(0, 8):
            ticket = pending.pop(0)
            check(feed, ticket, data)
            if draw.random() < 0.1:
                ticket.cancel()
                continue
            address, extent, event = ticket.wait(), ticket.extent, Copied(draw.choice((0, 0.004)))
            copying.append((extent, address, ctypes.string_at(address, extent.size), event))
            ticket.copied(event)
            ticket.cancel()  # too late to change anything
        check_copies()
    for ticket in pending:
        check(feed, ticket, data)
        ticket.cancel()
    feed.close()
    if mode != "memory":
        assert reads["direct" if mode == "direct" else "cached"] > 100
        assert not reads["cached" if mode == "direct" else "direct"]


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


def test_too_large(source: FileSource, fake: FakeLock) -> None:
    feed = reading(2, 1, fake)
    with pytest.raises(InvalidInput, match=r"`at 0`: 262145 bytes, but a piece has 1 to 262144"):
        feed.request(piece(source, 0, PIECE + 1))
    with pytest.raises(InvalidInput, match="0 bytes, but a piece has 1"):
        feed.request(piece(source, 0, 0))
    feed.close()


@pytest.mark.parametrize(("buffers", "size", "count"), [(0, PIECE, 1), (1, 0, 1), (1, PIECE, 0)])
def test_what_reads_nothing(buffers: int, size: int, count: int, fake: FakeLock) -> None:
    with pytest.raises(InvalidInput, match="read nothing"):
        ReadAhead(buffers, size, count, fake)
    assert not fake.attempts


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


def test_memory_for_no_device_is_not_locked(source: FileSource, data: bytes, fake: FakeLock) -> None:
    feed = reading(1, 1, None)
    assert not fake.attempts
    assert (feed.locked_bytes, feed.private_bytes) == (0, PIECE + SLACK)
    check(feed, feed.request(piece(source, 0)), data)
    feed.close()


def test_threads_use_the_device_whose_copies_they_wait_for(
    source: FileSource, data: bytes, fake: FakeLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is locked there is nothing to bind to."""
    feed = reading(1, 3, fake)
    check(feed, feed.request(piece(source, 0)), data)
    feed.close()
    assert fake.bound == ["tpde-disk"] * 3
    reading(1, 3, None).close()
    monkeypatch.setenv("TPDE_HOST_MEMORY", "pageable")
    reading(1, 3, fake).close()
    assert len(fake.bound) == 3


def test_the_page_cache_is_left_alone(
    tmp_path: Path, data: bytes, fake: FakeLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "O_DIRECT", os.O_DIRECTORY)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, at, size, advice: dropped.append((at, size)))
    (tmp_path / "blobs").write_bytes(data)
    source = FileSource(tmp_path / "blobs")
    feed = reading(1, 1, fake)
    check(feed, feed.request(piece(source, 4096, PIECE)), data)
    assert sum(size for _, size in dropped) == PIECE
    feed.close()
    source.close()


def test_trace(source: FileSource, data: bytes, fake: FakeLock) -> None:
    class Notes:
        def __init__(self) -> None:
            self.reads: list[tuple[str, int]] = []

        def read(self, begin: int, end: int, name: str, nbytes: int) -> None:
            assert end > begin
            self.reads.append((name, nbytes))

    feed = reading(2, 2, fake)
    assert feed.trace is None
    feed.trace = Notes()
    check(feed, feed.request(piece(source, 777)), data)
    assert feed.trace.reads == [("at 777", PIECE)]
    feed.close()


# ---- locking ----


def test_pageable_where_locking_is_refused(source: FileSource, data: bytes, fake: FakeLock) -> None:
    fake.refuse = lambda read_only, before: True
    with pytest.warns(RuntimeWarning, match="the memory that files are read to .*stays pageable") as caught:
        feed = reading(2, 2, fake)
    assert caught[0].filename == __file__
    assert (feed.locked_bytes, feed.private_bytes) == (0, 2 * (PIECE + SLACK))
    check(feed, feed.request(piece(source, 0)), data)
    feed.close()


def test_forced(source: FileSource, fake: FakeLock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPDE_HOST_MEMORY", "arena")
    fake.refuse = lambda read_only, before: True
    with pytest.raises(UnsupportedDevice, match="cannot be page-locked"):
        reading(2, 2, fake)
    monkeypatch.setenv("TPDE_HOST_MEMORY", "pageable")
    attempts = fake.attempts
    reading(2, 2, fake).close()
    assert fake.attempts == attempts


# ---- faults ----


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
