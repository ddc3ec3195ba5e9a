"""A device that copies and decodes in threads of its own, with delays: streaming without a GPU."""

from __future__ import annotations

import ctypes
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest
import torch

from tpde.errors import Corrupt
from tpde.io.sources import Extent
from tpde.streaming.pieces import Piece
from tpde.weights.launch import Damage

T = TypeVar("T")


class Stream:
    """Does what it is given in order, each after a random delay.

    Attributes
    ----------
    failed : BaseException or None
        What the first job has raised that did: whoever waits for the device is told.
    """

    def __init__(self, name: str, seed: int, delay: float) -> None:
        self.failed: BaseException | None = None
        self._closed = False
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._random, self._delay = random.Random(seed), delay
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._delay and self._random.random() < 0.3:
                time.sleep(self._random.random() * self._delay)
            try:
                job()
            except BaseException as error:
                self.failed = self.failed or error

    def put(self, job: Callable[[], None]) -> None:
        if self._closed:
            raise RuntimeError("the simulated device was closed")
        self._jobs.put(job)

    def record(self) -> threading.Event:
        event = threading.Event()
        self.put(event.set)
        return event

    def close(self) -> None:
        self._closed = True
        self._jobs.put(None)
        self._thread.join()


class SimulatedDevice:
    """A device in host memory.

    Parameters
    ----------
    ring : int
        Bytes.
    delay : float
        Seconds that a copy or a decode is late, at most.
    seed : int
        Of the delays.
    without : str
        `hold` or `copied`: leave out the wait for that event.
    blocking : bool
        Decoding waits until it is done, for callers who use the buffer from their own thread.
    """

    def __init__(
        self, ring: int, *, delay: float = 0.0, seed: int = 0, without: str = "", blocking: bool = True
    ) -> None:
        self.trace: Any = None
        self.memory = np.full(ring, 0xEE, np.uint8)
        self.copies, self.compute = Stream("copies", seed, delay), Stream("compute", seed + 1, delay)
        self.without, self.blocking = without, blocking
        self.copied: list[str] = []
        self.graph = False

    def prepare(self, pieces: Sequence[Piece]) -> Any:
        return {"pieces": pieces, "damage": None}

    def copy(self, place: int, address: int, piece: Piece) -> threading.Event:
        at, size = place, piece.extent.size

        def job() -> None:
            self.memory[at : at + size] = np.ctypeslib.as_array(
                ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8)), (size,)
            )

        self.copied.append(piece.extent.name)
        self.copies.put(job)
        return self.copies.record()

    def hold(self, event: threading.Event) -> None:
        if self.without != "hold":
            self.copies.put(lambda: _wait(event))

    def decode(
        self, handle: Any, number: int, place: int, out: torch.Tensor, copied: threading.Event
    ) -> threading.Event:
        piece = handle["pieces"][number]

        def job() -> None:
            for i, span in enumerate(piece.spans):
                tensor, (first, last, low, high) = span.tensor, span.chunks
                at = place + span.at + low
                begin, end = tensor.header.chunk_range(first, last)
                size = tensor.header.word_bytes
                words = np.empty((end - begin) * size, np.uint8)
                try:
                    data = self.memory[at : at + high - low].copy()
                    tensor.host_reader().decode_bytes(first, last, data, words)
                except Corrupt as error:
                    handle["damage"] = Damage(number, i, error.chunk or 0)
                    continue
                out.numpy()[span.out + begin * size : span.out + end * size] = words

        if self.without != "copied":
            self.compute.put(lambda: _wait(copied))
        self.compute.put(job)
        event = self.compute.record()
        if self.blocking:
            self._wait(event)
        return event

    def damage(self, handle: Any) -> Damage | None:
        found, handle["damage"] = handle["damage"], None
        return found

    def wait(self) -> None:
        self._wait(self.compute.record())
        self._wait(self.copies.record())

    def decoded(self) -> None:
        self._wait(self.compute.record())

    def _wait(self, event: threading.Event) -> None:
        _wait(event)
        failed = self.copies.failed or self.compute.failed
        if failed is not None:
            raise RuntimeError(f"the simulated device failed: {failed}") from failed

    def recording(self) -> bool:
        return self.graph

    def close(self) -> None:
        self.copies.close()
        self.compute.close()


def _wait(event: threading.Event) -> None:
    if not event.wait(60):
        raise TimeoutError("the simulated device hangs")


class Ticket(NamedTuple):
    """Asks its feed, whose methods tests replace."""

    feed: MemoryFeed
    extent: Extent

    def wait(self) -> int:
        return self.feed.wait(self.extent)

    def ready(self) -> bool:
        return self.feed.ready(self.extent)

    def copied(self, event: Any) -> None:
        self.feed.copied(self.extent, event)

    def cancel(self) -> None:
        self.feed.cancel(self.extent)


class MemoryFeed:
    """Files' bytes in memory. `late` pieces are ready only when they are waited for."""

    def __init__(self, *, ahead: int = 0, late: bool = False) -> None:
        self.trace: Any = None
        self.ahead, self.late = ahead, late
        self.requested: list[Extent] = []
        self.cancelled = self.begun = self.closed = 0
        self._whole: dict[str, np.ndarray] = {}

    def whole(self, extent: Extent) -> np.ndarray:
        """The bytes of an extent's file, for a test to change."""
        found = self._whole.get(extent.source.name)
        if found is None:
            found = np.empty(extent.source.size, np.uint8)
            extent.source.read_into(0, found.data)
            self._whole[extent.source.name] = found
        return found

    def request(self, extent: Extent) -> Ticket:
        self.requested.append(extent)
        return Ticket(self, extent)

    def wait(self, extent: Extent) -> int:
        return int(self.whole(extent).ctypes.data) + extent.offset

    def ready(self, extent: Extent) -> bool:
        return not self.late

    def copied(self, extent: Extent, event: threading.Event) -> None:
        pass

    def cancel(self, extent: Extent) -> None:
        self.cancelled += 1

    def device_address(self, extent: Extent) -> int | None:
        return None

    def begin(self) -> None:
        self.begun += 1

    def complete(self) -> None:
        pass

    def close(self) -> None:
        self.closed += 1


class Probe:
    """A lock that tells when a thread waits for it."""

    def __init__(self, lock: threading.RLock) -> None:
        self.lock, self.asked = lock, threading.Event()

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            self.asked.set()
            self.lock.acquire()

    def __exit__(self, *error: object) -> None:
        self.lock.release()


def probed(make: Callable[[], T], kind: str = "RLock") -> tuple[T, Probe]:
    """What a call makes, and the only lock that it makes: one that tells when a thread waits for it."""
    probe = Probe(getattr(threading, kind)())
    left = [probe]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, kind, left.pop)
        made = make()
    assert not left
    return made, probe
