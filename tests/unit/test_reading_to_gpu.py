"""Extents are read to buffers that are copied to a GPU, whose streams run when somebody waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from support.card import DEVICE  # noqa: E402
from support.files import WatchedFile, random_file  # noqa: E402

from tpde.errors import Truncated  # noqa: E402
from tpde.io.sources import FileSource  # noqa: E402
from tpde.loading.reading import Extent, Reader  # noqa: E402


@pytest.fixture
def source(tmp_path: Path) -> FileSource:
    """Give a file of random bytes."""
    return random_file(tmp_path / "bytes", 300_000)


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
