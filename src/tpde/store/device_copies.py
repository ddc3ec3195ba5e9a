"""Streams of a GPU, its memory, and what is copied there and back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tpde.codec.native import Bytes
from tpde.frameworks import on_device

if TYPE_CHECKING:
    import torch

HostArray = np.ndarray[Any, Any]
"""Of any dtype."""


@functools.cache
def _side_stream(device: torch.device) -> Any:
    """One for each device: PyTorch keeps freed memory for the stream that it was taken on."""
    import torch

    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def beside(device: torch.device, event: torch.cuda.Event | None) -> Iterator[None]:
    """A stream beside the current one as the current one, which waits for `event` first.

    What is launched there need not wait for what comes on the other stream after the event, and goes before
    what of it has not begun. The caller keeps what it uses until that is done.
    """
    import torch

    if event is None:
        yield
        return
    stream = _side_stream(device)
    stream.wait_event(event)
    with torch.cuda.stream(stream):
        yield


def mark(device: torch.device) -> torch.cuda.Event | None:
    """An event on a device's current stream; None if it has no streams."""
    import torch

    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor."""
    import torch

    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _room(nbytes: int, device: torch.device) -> torch.Tensor:
    """Bytes in host memory that the device copies from and to at its full speed."""
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")


class Upload:
    """Arrays that go to a device in one copy.

    Parameters
    ----------
    sizes : sequence of int
        Bytes of each. Each begins at a multiple of 16 there.
    device : torch.device
        Where they go.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        ends = np.cumsum([0, *(-(-size // 16) * 16 for size in sizes)])
        self._places = [(int(at), size) for at, size in zip(ends, sizes, strict=False)]
        self._room, self._device = _room(int(ends[-1]), device), device
        self._host: Bytes = self._room.numpy()

    def place(self, number: int) -> Bytes:
        """Where the bytes of an array are written."""
        at, size = self._places[number]
        return self._host[at : at + size]

    def send(self) -> tuple[torch.Tensor, list[int]]:
        """Copy them: what holds them on the device, and their addresses there."""
        there = self._room.to(self._device, non_blocking=True, copy=True)
        return there, [there.data_ptr() + at for at, _ in self._places]


def send(arrays: Sequence[HostArray], device: torch.device) -> tuple[torch.Tensor, list[int]]:
    """Arrays on a device, by one copy: what holds them, and their addresses there."""
    upload = Upload([it.nbytes for it in arrays], device)
    for i, it in enumerate(arrays):
        upload.place(i)[:] = it.view(np.uint8)
    return upload.send()


def zeros(count: int, dtype: str, device: torch.device) -> torch.Tensor:
    """Numbers on the device. Never none of them, so that there is an address."""
    import torch

    return torch.zeros(max(count, 1) * np.dtype(dtype).itemsize, dtype=torch.uint8, device=device)


def fetch(tensor: torch.Tensor) -> Callable[[], Bytes]:
    """Start a copy of bytes to the host; what is returned waits for it, not for what is launched later."""
    import torch

    with on_device(tensor.device):
        room = _room(tensor.numel(), tensor.device)
        room.copy_(tensor, non_blocking=True)
        if tensor.device.type != "cuda":
            return room.numpy
        event = torch.cuda.current_stream(tensor.device).record_event()

    def wait() -> Bytes:
        event.synchronize()
        return room.numpy()

    return wait


def starts(sizes: HostArray) -> HostArray:
    """Where each of some things begins that lie one after the other."""
    ends: HostArray = np.cumsum(sizes, dtype=np.uint64)
    return ends - sizes.astype(np.uint64)
