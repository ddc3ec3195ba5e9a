"""What deltas on a GPU have in common: which tensors they are of, and in what groups and batches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tpde.codec.delta import chunk_count
from tpde.cuda import backend
from tpde.errors import CompileError, MissingDependency, UnsupportedDevice
from tpde.frameworks import has_words, on_device, stream_of
from tpde.store import device_copies as gpu
from tpde.store.comparer import Kind

if TYPE_CHECKING:
    import torch

    from tpde.cuda.delta_kernels import DeltaBatch

_T = TypeVar("_T")

# What batches may take on the device at a time beside their tensors, where one has several.
_ROOM = 512 << 20


@functools.cache
def can_run(runs: backend.Backend, device: int) -> bool:
    """Whether the kernels of a back end run on a device: `tpde[cuda]` is there, and it is one of theirs."""
    from tpde.cuda.delta_kernels import prepare

    try:
        prepare(device)
    except (MissingDependency, UnsupportedDevice, CompileError):
        return False
    return True


def is_resident(tensor: torch.Tensor) -> bool:
    """Whether the words of a tensor lie one after the other on a GPU that runs the kernels."""
    runs = backend.current()
    if tensor.device.type != runs.kind or not has_words(tensor):
        return False
    plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    return plain and can_run(runs, tensor.device.index or 0)


class DeviceGroup:
    """Tensors of one kind of words on one device, and the arrays that launches take."""

    def __init__(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor | None]], kind: Kind, device: torch.device
    ) -> None:
        from tpde.cuda.delta_kernels import DeltaBatch, Pair

        self.device, self.kind = device, kind
        self._pairs = pairs  # whose memory launches read
        rows = [
            Pair(
                old.data_ptr(),
                0 if new is None else new.data_ptr(),
                old.numel() * old.element_size() // kind[0],
            )
            for old, new in pairs
        ]
        self.batch: DeltaBatch = DeltaBatch(rows, *kind, device.index or 0)
        self.firsts = np.cumsum([0, *(chunk_count(it.words) for it in rows)])
        self._sent, (items, whose) = gpu.send([self.batch.items, self.batch.whose], device)
        self.arrays = items, whose
        """Addresses of what every launch takes."""

    def chunks_of(self, number: int) -> slice:
        """The chunks of a tensor among those of the group."""
        return slice(int(self.firsts[number]), int(self.firsts[number + 1]))


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Fingerprints of resident tensors, by name (delta.md 4): of those whose device has memory for them."""
    import torch

    found: dict[str, bytes] = {}
    for device, names in by(tensors, lambda name: tensors[name].device).items():
        with contextlib.suppress(torch.OutOfMemoryError), on_device(device):
            # Bytes have no kind of words: one launch takes all.
            group = DeviceGroup([(tensors[name], None) for name in names], (1, 0), device)
            sums = gpu.zeros(4 * len(names), "<u8", device)
            group.batch.survey(*group.arrays, 0, sums.data_ptr(), 0, stream_of(device))
            rows = _download(sums, "<u8").reshape(-1, 4)
            found.update((name, row[:2].tobytes()) for name, row in zip(names, rows, strict=True))
    return found


def _download(tensor: torch.Tensor, dtype: str) -> gpu.HostArray:
    return gpu.fetch(tensor)().view(dtype)


def by(items: Iterable[_T], key: Callable[[_T], Any]) -> dict[Any, list[_T]]:
    """Items by what they have in common, in the order of the first of each."""
    groups: dict[Any, list[_T]] = {}
    for it in items:
        groups.setdefault(key(it), []).append(it)
    return groups


def batches(items: Sequence[_T], takes: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Items one after the other, in batches that take at most `_ROOM`, or of one."""
    batch: list[_T] = []
    held = 0
    for it in items:
        more = takes(it)
        if batch and held + more > _ROOM:
            yield batch
            batch, held = [], 0
        batch.append(it)
        held += more
    if batch:
        yield batch
