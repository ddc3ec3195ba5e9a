"""Reading ahead from files: every byte, in any order, past the page cache or not, locked or not."""

from __future__ import annotations

import ctypes
import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest
from support.locking import FakeLock
from support.read_ahead import PIECE, SIZE, Copied, check, piece, reading

from tpde.errors import InvalidInput, UnsupportedDevice
from tpde.host.disk import SLACK, ReadAhead
from tpde.io.sources import BytesSource, FileSource

pytestmark = pytest.mark.usefixtures("bounded")


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
    assert caught[0].filename == reading.__code__.co_filename
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
