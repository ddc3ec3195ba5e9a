"""Extents are read whole, whatever their sizes and order, or refused with a reason."""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from support.card import DEVICE, GIB, Card  # noqa: E402
from support.files import WatchedFile  # noqa: E402
from support.simulated import Probe  # noqa: E402

from tpde.errors import OutOfMemory, Truncated  # noqa: E402
from tpde.io.sources import FileSource  # noqa: E402
from tpde.loading import reading  # noqa: E402
from tpde.loading.reading import READERS, Extent, Reader, read_extents  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def source(tmp_path: Path) -> FileSource:
    """Give a file of random bytes."""
    path = tmp_path / "bytes"
    path.write_bytes(random.Random(1).randbytes(300_000))
    return FileSource(path)


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


def test_using_that_fails(source: FileSource) -> None:
    def use(number: int, tensor: Any) -> None:
        raise KeyboardInterrupt

    extents = [Extent(source, at, 1000, "x") for at in range(0, 300_000, 1000)]
    with pytest.raises(KeyboardInterrupt):
        read_extents(extents, CPU, use, group_bytes=1)
    assert not [it for it in threading.enumerate() if it.name.startswith("tpde-read")]


def test_running_out_while_running(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")
    from tpde.integrations.transformers import run_memory

    Card(monkeypatch).free = 1 << 29
    text = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ..."
    with (
        pytest.raises(OutOfMemory, match=r"generating needs 2\.50 GiB more on cuda:0, 0\.50 GiB are free"),
        run_memory.explained(torch.device("cuda", 0), "generating"),
    ):
        raise torch.cuda.OutOfMemoryError(text)


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


# ---- memory for them ----


class Allocator:
    """Notes what is allocated, and on which device; all of it is on the CPU.

    Attributes
    ----------
    fails : callable
        Called with the number of bytes; raises what the allocation does.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], None] = lambda _: None
    ) -> None:
        self.sizes: list[tuple[str, int]] = []
        self.fails, self._empty = fails, torch.empty
        monkeypatch.setattr(torch, "empty", self)

    def __call__(self, size: int, *, dtype: Any, device: Any) -> Any:
        self.sizes.append((str(device), size))
        self.fails(size)
        return self._empty(size, dtype=dtype)


MIB = 1 << 20


def allocated(sizes: Sequence[int], device: Any) -> list[Any]:
    """Give the tensors that extents of these sizes are read to."""
    extents = []
    for size in sizes:
        source: Any = SimpleNamespace(name="file", size=size, read_into=lambda *_: None)
        extents.append(Extent(source, 0, size, "x"))
    return read_extents(extents, device, make_reader=lambda _: Reader(CPU))


def test_large_tensors_come_out_of_one_block_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each a multiple of 512 bytes; small ones come out of the allocator's small blocks."""
    made = Allocator(monkeypatch)
    sizes = [MIB, 3 * MIB + 1, 5, MIB + 512]
    with torch.inference_mode():
        tensors = allocated(sizes, DEVICE)
    assert made.sizes == [("cuda:0", it) for it in (4 * MIB + 1024, *sizes)]
    assert [it.numel() for it in tensors] == sizes
    assert not any(it.is_inference() for it in tensors)
    for device, wanted in ((DEVICE, [MIB, 7]), (CPU, [2 * MIB])):
        made.sizes.clear()
        allocated(wanted, device)
        assert made.sizes == [(str(device), it) for it in wanted]


def _no_more_than(most: int) -> Callable[[int], None]:
    def fails(size: int) -> None:
        if size > most:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    return fails


def test_memory_in_pieces_may_do(monkeypatch: pytest.MonkeyPatch) -> None:
    Allocator(monkeypatch, _no_more_than(2 * MIB))
    assert [it.numel() for it in allocated([2 * MIB, 2 * MIB], DEVICE)] == [2 * MIB, 2 * MIB]


def test_weights_that_do_not_fit_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    Allocator(monkeypatch, _no_more_than(GIB))
    with pytest.raises(
        OutOfMemory, match=r"need 4\.00 GiB on cuda:0; 15\.00 GiB are free, but not in one"
    ) as one:
        allocated([2 * GIB, 2 * GIB], DEVICE)
    assert (one.value.where, one.value.needed) == ("cuda:0", 4 * GIB)
    card.free = 3 * GIB
    with pytest.raises(
        OutOfMemory, match=r"the packed weights needs 4\.00 GiB on cuda:0, 3\.00 GiB are free"
    ):
        allocated([2 * GIB, 2 * GIB], DEVICE)


@pytest.mark.parametrize(
    ("device", "said", "error"),
    [
        (CPU, "you tried to allocate 12 bytes", OutOfMemory),
        (CPU, "an illegal instruction", RuntimeError),
        (DEVICE, "CUDA cannot allocate: illegal memory access", RuntimeError),
    ],
)
def test_what_a_system_refuses(
    device: Any, said: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(size: int) -> None:
        raise RuntimeError(said)

    Allocator(monkeypatch, fails)
    with pytest.raises(error) as caught:
        allocated([12], device)
    assert type(caught.value) is error
    if error is OutOfMemory:
        assert "host memory, and the system refused" in str(caught.value)
        assert caught.value.needed == 12
    else:
        assert str(caught.value) == said


# ---- copies to a GPU ----


class Stream:
    """Does what it is given when somebody waits for it."""

    device = DEVICE

    def __init__(self, device: Any = DEVICE) -> None:
        self.jobs: list[Callable[[], None]] = []
        self.waited: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited.append(other)

    def run(self, count: int) -> None:
        jobs, self.jobs = self.jobs[:count], self.jobs[count:]
        for job in jobs:
            job()

    def synchronize(self) -> None:
        self.run(len(self.jobs))


class Event:
    """The end of what a stream was given so far."""

    def __init__(self) -> None:
        self.reached, self.stream = True, Stream()

    def record(self, stream: Stream) -> None:
        self.reached, self.stream = False, stream
        stream.jobs.append(lambda: setattr(self, "reached", True))

    def synchronize(self) -> None:
        while not self.reached:
            self.stream.run(1)


class Streams:
    """Those of a device, and which each thread copies on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.main, self.made, self._local = Stream(), list[Stream](), threading.local()
        self.devices = 0
        self._empty = torch.empty
        for name, value in {
            "current_stream": lambda _: self.main,
            "Stream": self._make,
            "Event": Event,
            "device": self._device,
            "stream": self._on,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch, "empty", self._pinned)

    def _make(self, device: Any) -> Stream:
        assert device == DEVICE
        self.made.append(Stream())
        return self.made[-1]

    def _pinned(self, size: int, *, pin_memory: bool = False, **options: Any) -> Any:
        assert pin_memory
        return self._empty(size, **options)

    @contextmanager
    def _device(self, device: Any) -> Iterator[None]:
        assert device == DEVICE
        self.devices += 1
        yield

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        self._local.now = stream
        yield
        self._local.now = self.main

    @property
    def current(self) -> Stream:
        return getattr(self._local, "now", self.main)


class OnDevice:
    """A tensor on the device: what is copied there arrives when its stream gets to it."""

    def __init__(self, streams: Streams, size: int) -> None:
        self.data, self._streams = torch.zeros(size, dtype=torch.uint8), streams

    def __getitem__(self, part: slice) -> OnDevice:
        made = OnDevice(self._streams, 0)
        made.data = self.data[part]
        return made

    def copy_(self, other: Any, *, non_blocking: bool = False) -> None:
        stream = self._streams.current
        assert stream is not self._streams.main
        stream.jobs.append(lambda: self.data.copy_(other))
        if not non_blocking:
            stream.synchronize()


@pytest.mark.parametrize("readers", [1, 3])
def test_copies_to_a_gpu(
    readers: int, source: FileSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer is read to again when its copy is done; when reading is, all copies are."""
    streams, data = Streams(monkeypatch), (tmp_path / "bytes").read_bytes()
    extents = [Extent(source, at, 50_001, "x") for at in (150_000, 7, 60_000)]
    with Reader(DEVICE, piece=4096, threads=readers) as reader:
        for _ in range(2):
            tensors: list[Any] = [OnDevice(streams, it.size) for it in extents]
            reader.begin(tensors, extents).wait()
            for tensor, extent in zip(tensors, extents, strict=True):
                assert tensor.data.numpy().tobytes() == data[extent.offset : extent.offset + extent.size]
    assert 1 <= len(streams.made) <= readers
    assert all(streams.main in it.waited for it in streams.made)
    assert streams.devices


def test_two_copies_to_a_gpu_are_under_way(source: FileSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is copied, the next piece is read."""
    streams, under_way = Streams(monkeypatch), list[int]()

    def read_into(offset: int, out: memoryview) -> None:
        under_way.append(sum(len(it.jobs) for it in streams.made))
        source.read_into(offset, out)

    with Reader(DEVICE, piece=4096, threads=1) as reader:
        tensors: list[Any] = [OnDevice(streams, 40_000)]
        reader.begin(tensors, [Extent(WatchedFile(source, read_into), 0, 40_000, "x")]).wait()
    assert max(under_way) == 2, "a copy, and the event behind it"


def test_copies_that_were_begun_are_waited_for_after_an_error(
    source: FileSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read a buffer that is given back."""
    streams = Streams(monkeypatch)

    def read_into(offset: int, out: memoryview) -> None:
        if offset == 8192:
            raise Truncated("the disk ends here")
        source.read_into(offset, out)

    with Reader(DEVICE, piece=4096, threads=1) as reader:
        tensors: list[Any] = [OnDevice(streams, 40_000)]
        with pytest.raises(Truncated, match="ends here"):
            reader.begin(tensors, [Extent(WatchedFile(source, read_into), 0, 40_000, "x")]).wait()
    assert [len(it.jobs) for it in streams.made] == [0]
