"""What every launch needs: bytes on a device, the caller's stream, and reports of damage."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from tpde.codec.native import Bytes
from tpde.errors import Corrupt

# At the start of a status that is complete; while it is written, a kernel has something else there.
REPORTED = 1

_HERE = contextlib.nullcontext()


def capturing(device: torch.device) -> bool:
    """Whether the current stream is recording a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def stream_handle(device: torch.device) -> int:
    """Handle of a CUDA device's current stream.

    As compiled code asks for it: `torch.cuda.current_stream` makes an object each time, and a model's forward
    pass asks twice for every block.
    """
    assert device.index is not None
    return torch._C._cuda_getCurrentRawStream(device.index)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a device the current one: the default stream, whose handle is 0, is the current device's."""
    if torch._C._cuda_getDevice() == device.index:
        return _HERE
    return torch.cuda.device(device)


def upload(data: Bytes, device: torch.device) -> torch.Tensor:
    """Bytes on a device; at least 16, since an empty tensor has no address."""
    padded = np.zeros(max(data.size, 16), np.uint8)
    padded[: data.size] = data
    with torch.inference_mode(False):
        return torch.from_numpy(padded).to(device)


class _Named(Protocol):
    name: str


def raise_damage(status: torch.Tensor, items: Sequence[_Named]) -> None:
    """Raise `Corrupt` if a kernel reported a damaged chunk in `status`.

    Waits for the current stream if `status` is on a device. In page-locked memory, it says what is
    known by now.
    """
    found, number, low, high = np.frombuffer(status.cpu().numpy()[:16].tobytes(), "<u4").tolist()
    if found != REPORTED:
        return
    status.zero_()
    name, chunk = items[number].name, high << 32 | low
    raise Corrupt(
        f"`{name}`: chunk {chunk}: its checksum does not match; the weights are damaged, load them again",
        tensor=name,
        chunk=chunk,
    )
