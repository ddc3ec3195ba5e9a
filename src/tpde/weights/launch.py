"""What every launch needs: bytes on a device, the caller's stream, and reports of damage."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Generic, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar

import numpy as np
import torch

from tpde.codec.native import Bytes
from tpde.errors import Corrupt
from tpde.format.blob_header import align

P = ParamSpec("P")  # what a work's launch takes beside addresses and stream
R_co = TypeVar("R_co", covariant=True)  # and what it returns

_ALIGN = 16  # of descriptors
_REPORT = 16  # bytes: four words for each work
# At the start of a report that is complete; while it is written, a kernel has something else there.
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


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
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


class KernelWork(Protocol[P, R_co]):
    """What one launch does: a list of blobs, rows of one, frames.

    Attributes
    ----------
    descriptors : ndarray of uint8
        What the kernels read, at a multiple of 16 on the device.
    """

    descriptors: Bytes

    def launch(
        self, descriptors: int, status: int, stream: int, /, *args: P.args, **kwargs: P.kwargs
    ) -> R_co:
        """Queue it on a stream: see `tpde.cuda.decode.WorkList.launch`."""


class Damage(NamedTuple):
    """A chunk that a kernel could not decode, or whose checksum does not match."""

    work: int  # which of those that a launch has
    item: int  # which of its items
    chunk: int


class Launch(Generic[P, R_co]):
    """Work for kernels on one device, with all that they read and write beside blobs and output.

    That is put there now, with one copy for all: a call allocates nothing, waits for nothing and may be
    recorded in a CUDA graph.

    Parameters
    ----------
    works : sequence of KernelWork
        They are launched one by one, and report damage side by side.
    device : torch.device
        With its number.
    reports : torch.Tensor, optional
        Page-locked zeros, int32, of shape `(len(works), 4)`: what kernels report is then known as soon as
        they have, and nobody waits for it. By default it is on the device.
    """

    def __init__(
        self, works: Sequence[KernelWork[P, R_co]], device: torch.device, reports: torch.Tensor | None = None
    ) -> None:
        self._index = device.index
        rows = [it.descriptors for it in works]
        starts = list(accumulate((align(row.size, _ALIGN) for row in rows), initial=0))
        end = starts.pop()
        whole = np.zeros(end if reports is not None else end + _REPORT * len(works), np.uint8)
        for at, row in zip(starts, rows, strict=True):
            whole[at : at + row.size] = row
        self._there = upload(whole, device)
        with torch.inference_mode(False):
            self._reports = self._there[end:].view(torch.int32).view(-1, 4) if reports is None else reports
        self._locked = None if reports is None else reports.numpy().view("<u4")
        first, report = self._there.data_ptr(), self._reports.data_ptr()
        self._calls = [
            (work.launch, first + at, report + _REPORT * number)
            for number, (work, at) in enumerate(zip(works, starts, strict=True))
        ]

    def __call__(self, number: int, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Queue a work, by its number, on the device's current stream; the arguments are its own."""
        launch, descriptors, report = self._calls[number]
        # As in `stream_handle` and `on_device`: a model's forward pass comes here for every block, and each
        # call of Python takes up to 1 us when it is cold.
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        if torch._C._cuda_getDevice() == self._index:
            return launch(descriptors, report, stream, *args, **kwargs)
        with torch.cuda.device(self._index):
            return launch(descriptors, report, stream, *args, **kwargs)

    def damage(self) -> Damage | None:
        """What kernels have reported since this was last asked; of several works, one at a time.

        Waits for the current stream if reports are on the device. Page-locked ones say what is known by now.
        """
        found = self._reports.cpu().numpy().view("<u4") if self._locked is None else self._locked
        for number in np.flatnonzero(found[:, 0] == REPORTED).tolist():
            _, item, low, high = found[number].tolist()
            self._reports[number].zero_()
            return Damage(number, item, high << 32 | low)
        return None

    def report(self, names: Sequence[str]) -> None:
        """Raise what `damage` tells.

        Parameters
        ----------
        names : sequence of str
            Of the items of the only work.

        Raises
        ------
        Corrupt
            Naming tensor and chunk.
        """
        found = self.damage()
        if found is not None:
            raise mismatch(
                names[found.item], found.chunk, "; the weights are damaged", hint="load them again"
            )


DecodeLaunch: TypeAlias = "Launch[[int, bool, int], None]"  # of a `WorkList`: out, check, base
RowsLaunch: TypeAlias = "Launch[[int, int, int, bool], None]"  # of `Rows`: ids, count, out, check


def locked_reports(count: int) -> torch.Tensor:
    """Page-locked zeros for what the kernels of so many works report."""
    with torch.inference_mode(False):
        return torch.zeros((count, 4), dtype=torch.int32, device="cpu", pin_memory=True)


def mismatch(name: str, chunk: int, details: str = "", *, hint: str, where: str | None = None) -> Corrupt:
    """What to raise for a chunk that a kernel reported."""
    error = Corrupt(f"its checksum does not match{details}", hint=hint, where=where, chunk=chunk)
    return error.of_tensor(name)
