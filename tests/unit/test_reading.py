"""Extents are read whole, whatever their sizes and order, or refused with a reason."""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from support.files import WatchedFile, random_file  # noqa: E402
from support.simulated import Probe  # noqa: E402

from tpde.errors import ReadError, Truncated  # noqa: E402
from tpde.io.sources import FileSource  # noqa: E402
from tpde.loading import reading  # noqa: E402
from tpde.loading.reading import READERS, Extent, Reader, read_extents  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def source(tmp_path: Path) -> FileSource:
    """Give a file of random bytes."""
    return random_file(tmp_path / "bytes", 300_000)


def test_extents(source: FileSource, tmp_path: Path) -> None:
    data, draw = (tmp_path / "bytes").read_bytes(), random.Random(2)
    extents = []
    for _ in range(40):
        size = draw.choice([0, 1, 4095, 4096, 4097, 50_000])
        at = draw.randrange(300_000 - size)
        extents.append(Extent(source, at, size, "x"))
    for tensor, extent in zip(
        read_extents(extents, CPU, make_reader=partial(Reader, piece=4096)), extents, strict=True
    ):
        assert tensor.numpy().tobytes() == data[extent.offset : extent.offset + extent.size]
        assert tensor.untyped_storage().nbytes() == extent.size
    assert read_extents([], CPU) == []


def test_a_file_that_is_too_short(source: FileSource, tmp_path: Path) -> None:
    with pytest.raises(Truncated, match="`w` ends at 300001"):
        read_extents([Extent(source, 0, 300_001, "w")], CPU)
    (tmp_path / "bytes").write_bytes(b"gone")  # it shrinks while it is open
    with pytest.raises(Truncated, match="needed"):
        read_extents([Extent(source, 0, 300_000, "w")], CPU)


def test_what_is_complete_is_used_while_others_are_read(source: FileSource) -> None:
    """The last group waits here until the first one was used."""
    used, numbers = threading.Event(), list[int]()

    def read_into(offset: int, out: memoryview) -> None:
        assert offset < 200_000 or used.wait(60), "the first group is not used while the last is read"
        source.read_into(offset, out)

    def use(number: int, tensor: Any) -> None:
        whole = torch.empty(100_000, dtype=torch.uint8)
        source.read_into(extents[number].offset, whole.numpy().data)
        assert torch.equal(tensor, whole)
        numbers.append(number)
        used.set()

    extents = [Extent(WatchedFile(source, read_into), at, 100_000, "x") for at in (200_000, 0, 100_000)]
    read_extents(extents, CPU, use, group_bytes=100_000)
    assert numbers == [1, 2, 0]


def test_after_a_failure_nobody_reads_the_rest(source: FileSource) -> None:
    """Two threads share what is read; the one that fails goes on to what is wanted next."""
    held, went_on, read = threading.Event(), threading.Event(), list[int]()

    def read_into(offset: int, out: memoryview) -> None:
        read.append(offset)
        if offset == 0:
            held.set()
            went_on.wait(20)
        elif offset == 1000:
            assert held.wait(60)
            raise OSError("it failed")
        elif offset >= 100_000:
            went_on.set()

    extents = [Extent(WatchedFile(source, read_into), at, 100_000, "x") for at in (0, 100_000)]
    with pytest.raises(OSError, match="it failed"):
        read_extents(extents, CPU, make_reader=partial(Reader, piece=1000, threads=2), group_bytes=100_000)
    assert sorted(it for it in read if it < 100_000) == [0, 1000]


def test_others_read_no_more_after_an_error() -> None:
    one_by_one = partial(reading.Reader, piece=10, threads=1)
    reads: list[int] = []

    class Source:
        name, size = "x", 1000

        def read_into(self, offset: int, out: memoryview) -> None:
            reads.append(offset)
            if len(reads) == 2:
                raise ReadError("the disk failed")

    with pytest.raises(ReadError, match="the disk failed"):
        reading.read_extents([Extent(Source(), 0, 1000, "x")], torch.device("cpu"), make_reader=one_by_one)
    assert len(reads) == 2


def test_using_that_fails(source: FileSource) -> None:
    def use(number: int, tensor: Any) -> None:
        raise KeyboardInterrupt

    extents = [Extent(source, at, 1000, "x") for at in range(0, 300_000, 1000)]
    with pytest.raises(KeyboardInterrupt):
        read_extents(extents, CPU, use, group_bytes=1)
    assert not [it for it in threading.enumerate() if it.name.startswith("tpde-read")]


def test_what_is_complete_is_not_held(source: FileSource) -> None:
    """Whoever asked for it may give it back, though others are still being read."""
    with Reader(CPU) as reader:
        tensor = torch.empty(1000, dtype=torch.uint8)
        begun = reader.begin([tensor], [Extent(source, 0, 1000, "x")])
        begun.wait()
        gone = weakref.ref(tensor)
        del tensor
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize(("processors", "pieces", "threads"), [(2, 20, 2), (64, 20, READERS), (64, 5, 5)])
def test_no_more_threads_than_are_of_use(
    processors: int, pieces: int, threads: int, source: FileSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them wait here until they have been counted."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(processors), raising=False)
    counted = threading.Event()
    watched, size = WatchedFile(source, lambda *_: counted.wait(60) and None), pieces * 1000 - 7
    with Reader(CPU, piece=1000) as reader:
        begun = reader.begin([torch.empty(size, dtype=torch.uint8)], [Extent(watched, 0, size, "x")])
        found = [it for it in threading.enumerate() if it.name.startswith("tpde-read")]
        counted.set()
        begun.wait()
    assert len(found) == threads


@pytest.mark.parametrize("what", ["asks for a piece", "stops"])
def test_pieces_are_handed_out_to_one_thread_at_a_time(what: str, source: FileSource) -> None:
    work = reading._Work([torch.empty(10, dtype=torch.uint8)], [Extent(source, 0, 10, "x")], 10)
    probe, done = Probe(threading.RLock()), list[Any]()
    work._lock = probe  # type: ignore[assignment]

    def go() -> None:
        done.append(next(iter(work)) if what == "asks for a piece" else work.stop())
        probe.asked.set()  # had it not asked

    thread = threading.Thread(target=go)
    with probe:
        thread.start()
        assert probe.asked.wait(60)
        assert not done
    thread.join(60)
    assert done == [(0, 0, 10) if what == "asks for a piece" else None]
    assert list(itertools.islice(work, 9)) == []


def test_each_piece_is_handed_out_once(source: FileSource) -> None:
    """In the order of files and offsets, whatever that of the extents."""
    read: list[tuple[int, int]] = []
    watched = WatchedFile(source, lambda offset, out: read.append((offset, out.nbytes)))
    sizes, places = (250, 0, 100), (500, 300, 100)
    extents = [Extent(watched, at, size, "x") for at, size in zip(places, sizes, strict=True)]
    read_extents(extents, CPU, make_reader=partial(Reader, piece=100, threads=1))
    assert read == [(100, 100), (500, 100), (600, 100), (700, 50)]
