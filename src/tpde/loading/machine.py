"""What a machine has for weights that travel: its GPUs, room on them, host memory, disks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, cast

import torch

from tpde.host.disk import READERS, ReadAhead
from tpde.host.feed import Feed, Filled
from tpde.host.page_lock import CudaPageLock
from tpde.host.pinned import HostMemory
from tpde.io.sources import Extent
from tpde.streaming.cuda_device import CudaDevice, Device
from tpde.streaming.trace import Trace, start_trace


class Machine(Protocol):
    """What opens them. Whoever asks closes what it gets."""

    def gpu(self, number: int | None = None) -> torch.device | None:
        """A GPU, by default the one that PyTorch uses; None if it is not there."""

    def device(self, device: torch.device, size: int, beside: Device | None = None) -> Device:
        """Take room on a device.

        Parameters
        ----------
        device : torch.device
            With its number.
        size : int
            Bytes.
        beside : Device, optional
            What brings other weights of the same model there.

        Raises
        ------
        OutOfMemory
            If there is no room.
        """

    def memory(
        self, extents: Sequence[Extent], device: torch.device, progress: Callable[[int], None] | None
    ) -> Filled:
        """Host memory for parts of files, in the order in which they are wanted first.

        Parameters
        ----------
        extents : sequence of Extent
            The parts. Their files must stay open.
        device : torch.device
            That they are copied to.
        progress : callable or None
            Called with numbers of bytes that are there, in the background.

        Raises
        ------
        Truncated
            If a file ends too early.
        """

    def disk(self, buffers: int, piece: int, device: torch.device) -> Feed:
        """What reads files each time.

        Parameters
        ----------
        buffers : int
            How many pieces it holds.
        piece : int
            Bytes of a piece, at most.
        device : torch.device
            That they are copied to.

        Raises
        ------
        OutOfMemory, UnsupportedDevice
            If there is no memory to read to, or it has to be locked and cannot be.
        """

    def start_trace(self, device: torch.device) -> Trace:
        """Start to note when things happen on a device; waits for it."""


class CudaMachine:
    """The machine that this process runs on, and its CUDA devices."""

    def gpu(self, number: int | None = None) -> torch.device | None:
        """One that PyTorch can use."""
        if not torch.cuda.is_available():
            return None
        number = torch.cuda.current_device() if number is None else number
        return torch.device("cuda", number) if number < torch.cuda.device_count() else None

    def device(self, device: torch.device, size: int, beside: Device | None = None) -> Device:
        """Room on a CUDA device; `beside` is of this machine, too."""
        return CudaDevice(device, size, beside=cast("CudaDevice | None", beside))

    def memory(
        self, extents: Sequence[Extent], device: torch.device, progress: Callable[[int], None] | None
    ) -> Filled:
        """Page-locked memory: see `tpde.host.pinned`."""
        return HostMemory(extents, CudaPageLock(device.index or 0), progress=progress)

    def disk(self, buffers: int, piece: int, device: torch.device) -> Feed:
        """Threads that read past the page cache: see `tpde.host.disk`."""
        return ReadAhead(buffers, piece, READERS, CudaPageLock(device.index or 0))

    def start_trace(self, device: torch.device) -> Trace:
        """By its events: see `tpde.streaming.trace`."""
        return start_trace(device)


_current: ContextVar[Machine | None] = ContextVar("tpde_machine", default=None)


def current() -> Machine:
    """The machine that models are loaded on.

    Libraries load them, through which nobody can hand it on.
    """
    return _current.get() or CudaMachine()


@contextmanager
def loading_on(machine: Machine) -> Iterator[None]:
    """Load models on another machine within this context: one that is simulated."""
    token = _current.set(machine)
    try:
        yield
    finally:
        _current.reset(token)
