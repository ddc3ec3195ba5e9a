"""CUDA streams that do nothing before somebody waits, and then in an order that a test chooses."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from support.backends import MadeKernel
from support.kernels import Card, memory
from tpde.cuda import items
from tpde.errors import Corrupt
from tpde.streaming.streamed_source import Streamed

HOST_BYTES = 50  # that a copy moves in a nanosecond
DECODE_NS = 10_000


class Event:
    """An event; one that was never recorded holds nobody up."""

    def __init__(self, cuda: Cuda, enable_timing: bool = False) -> None:
        self._cuda, self.timed = cuda, enable_timing
        self.recorded = self.passed = self.at = 0

    def record(self, stream: Stream | None = None) -> None:
        self.recorded += 1
        number = self.recorded

        def job() -> None:
            self.passed, self.at = number, self._cuda.clock

        (stream or self._cuda.current_stream()).put(job)

    def query(self) -> bool:
        return self.passed == self.recorded

    def synchronize(self) -> None:
        self._cuda.run(self.query)

    def elapsed_time(self, end: Event) -> float:
        for it in (self, end):
            assert it.timed, "it keeps no time"
            assert it.recorded, "it was not recorded"
            assert it.query(), "it has not passed"
        return (end.at - self.at) / 1e6


class Stream:
    """Jobs in order, and what they wait for."""

    def __init__(self, cuda: Cuda, handle: int) -> None:
        self._cuda, self.cuda_stream = cuda, handle
        self.jobs: deque[Callable[[], None] | tuple[Event, int]] = deque()

    def put(self, job: Callable[[], None]) -> None:
        self.jobs.append(job)

    def wait_event(self, event: Event) -> None:
        self.jobs.append((event, event.recorded))

    def wait_stream(self, other: Stream) -> None:
        event = Event(self._cuda)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        self._cuda.run(lambda: not self.jobs)

    @property
    def ready(self) -> bool:
        """Whether its next job may be done."""
        first = self.jobs[0] if self.jobs else None
        return first is not None and not (isinstance(first, tuple) and first[0].passed < first[1])

    def step(self) -> None:
        job = self.jobs.popleft()
        if not isinstance(job, tuple):
            job()


class Cuda(Card):
    """A CUDA device in host memory, number 0: stands in for a `torch.device`.

    Attributes
    ----------
    eager : str
        Whose jobs are done first where either's may be: those of `copies`, of what `computes`, or of `any`.
    streams : list of Stream
        The one that computes, and those that copy.
    tensors : list of Streamed
        Those that its kernels know.
    copied : list of tuple
        Each copy's destination, address and size.
    locked : list of Tensor
        Reports.
    compiled : int
        Kernels.
    code : CUresult or None
        What copies say instead of being done.
    clock : int
        Nanoseconds.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, launch_on: Callable[[Any], Any], eager: str = "any", seed: int = 0
    ) -> None:
        super().__init__(patch, launch_on)
        self.eager, self._random = eager, random.Random(seed)
        self.streams = [Stream(self, 70)]
        self.tensors: list[Streamed] = []
        self.copied: list[tuple[int, int, int]] = []
        self.locked: list[torch.Tensor] = []
        self.compiled = 0
        self.code: Any = None
        self.clock = 0
        patch.setattr(torch.cuda, "Stream", self._stream)
        patch.setattr(torch.cuda, "Event", self._event())
        patch.setattr(torch.cuda, "current_stream", self.current_stream)
        patch.setattr(torch.cuda, "synchronize", lambda device=None: self.run())
        patch.setattr(torch, "empty", self._made(torch.empty))
        patch.setattr(torch, "zeros", self._locked(torch.zeros))
        self.driver = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
        patch.setattr(self.driver, "cuMemcpyHtoDAsync", self._copy)

    def _made(self, empty: Any) -> Any:
        def made(*size: Any, device: Any = None, **options: Any) -> torch.Tensor:
            if device is self:
                return torch.full(size, 0xEE).byte()
            return empty(*size, device=device, **options)

        return made

    def _locked(self, zeros: Any) -> Any:
        def locked(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            made = zeros(*size, **options)
            if pin_memory:
                self.locked.append(made)
            return made

        return locked

    def kernel(self, source: str, name: str, defines: dict[str, int], device: int) -> MadeKernel:
        """Count it."""
        self.compiled += 1
        return super().kernel(source, name, defines, device)

    def _event(self) -> type[Event]:
        cuda = self

        class Made(Event):
            def __init__(self, enable_timing: bool = False) -> None:
                super().__init__(cuda, enable_timing)

        return Made

    def _stream(self, device: Any) -> Stream:
        assert device is self
        assert self.current == self.index, "a stream is of the current device"
        self.streams.append(Stream(self, 100 + len(self.streams)))
        return self.streams[-1]

    def current_stream(self, device: Any = None) -> Stream:
        return self.streams[0]

    def _switch(self, index: Any) -> Any:
        return super()._switch(getattr(index, "index", index))

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Do jobs until something is true; all of them, by default."""
        while not (until() if until else not any(it.jobs for it in self.streams)):
            ready = [it for it in self.streams if it.ready]
            assert ready, "all streams wait for each other"
            if self.eager == "any":
                self._random.choice(ready).step()
            else:
                ready[-1 if self.eager == "copies" else 0].step()

    # ---- what is queued ----

    def _copy(self, to: int, address: int, size: int, stream: int) -> tuple[Any, ...]:
        assert self.current == self.index
        if self.code is not None:
            return (self.code,)

        def job() -> None:
            ctypes.memmove(to, address, size)
            self.clock += size // HOST_BYTES

        self.copied.append((to, address, size))
        next(it for it in self.streams if it.cuda_stream == stream).put(job)
        return (self.driver.CUresult.CUDA_SUCCESS,)

    def _decode_on(self, stream: int, check: bool, *arguments: int) -> None:
        made = next(it for it in self.streams if it.cuda_stream == stream)
        made.put(lambda: self._decode(check, *arguments))

    def _decode(self, check: bool, *arguments: int) -> None:
        """Do what `decode_items` does with chunks that were copied, their index map being elsewhere."""
        descriptors, count, _, base, out, status, *_ = arguments
        self.clock += DECODE_NS
        known = {it._device_tables[1].data_ptr(): it for it in self.tensors if it._device_tables}
        for row in memory(descriptors, count * items.DESCRIPTOR_BYTES).view(items._ITEM):
            it = known[int(row["tables"])]
            assert it._device_index is not None
            assert int(row["index"]) == it._device_index.data_ptr()
            assert np.array_equal(it._device_index.numpy(), it.host_reader().index)
            assert np.array_equal(it._device_tables[1].numpy(), it._device_tables[0].image)  # type: ignore[index]
            first, low, high = int(row["begin"]), int(row["low"]), int(row["high"])
            last = first + int(row["count"]) - 1
            begin, end = (it.header.word_bytes * at for at in it.header.chunk_range(first, last))
            words = np.empty(end - begin, np.uint8)
            data = memory((base + int(row["blob"]) + low) % (1 << 64), high - low).copy()
            try:
                it.host_reader().decode_bytes(first, last, data, words)
            except Corrupt as error:
                report = memory(status, 16).view("<u4")
                if check and not report[0]:
                    report[:] = [1, int(row["number"]), error.chunk or 0, 0]
                continue
            memory((out + int(row["out"]) + begin) % (1 << 64), end - begin)[:] = words
