"""What deltas on a GPU have in common: which tensors they are of, and what is brought there and back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tpde.codec.delta import chunk_count
from tpde.codec.native import Bytes
from tpde.errors import CompileError, MissingDependency, UnsupportedDevice
from tpde.store.delta_writer import Kind

if TYPE_CHECKING:
    import torch

    from tpde.cuda.delta_kernels import DeltaBatch

_T = TypeVar("_T")
Numbers = np.ndarray[Any, Any]
"""Of any dtype."""

# What batches may take on the device at a time beside their tensors, where one has several.
_ROOM = 512 << 20


@functools.cache
def can_run(device: int) -> bool:
    """Whether the kernels run on a device: `tpde[cuda]` is there, and the device is one of theirs."""
    from tpde.cuda.delta_kernels import prepare

    try:
        prepare(device)
    except (MissingDependency, UnsupportedDevice, CompileError):
        return False
    return True


def is_resident(tensor: torch.Tensor) -> bool:
    """Whether the words of a tensor lie one after the other on a GPU that runs the kernels."""
    plain = tensor.is_cuda and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    return plain and has_words(tensor) and can_run(tensor.device.index)


def has_words(tensor: torch.Tensor) -> bool:
    """Whether a contiguous tensor has words: its storage may have been freed, or begin at an odd place."""
    size = tensor.element_size()
    held = tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + tensor.numel()) * size
    return held and tensor.numel() > 0 and tensor.data_ptr() % size == 0


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A device as the current one, which launches go to."""
    import torch

    return torch.cuda.device(device)


def stream_of(device: torch.device) -> int:
    """The handle of a device's current stream."""
    import torch

    return int(torch.cuda.current_stream(device).cuda_stream)


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

    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


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


def send(arrays: Sequence[Numbers], device: torch.device) -> tuple[torch.Tensor, list[int]]:
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

    with current(tensor.device):
        room = _room(tensor.numel(), tensor.device)
        room.copy_(tensor, non_blocking=True)
        if tensor.device.type != "cuda":
            return room.numpy
        event = torch.cuda.current_stream(tensor.device).record_event()

    def wait() -> Bytes:
        event.synchronize()
        return room.numpy()

    return wait


def _download(tensor: torch.Tensor, dtype: str) -> Numbers:
    return fetch(tensor)().view(dtype)


def starts(sizes: Numbers) -> Numbers:
    """Where each of some things begins that lie one after the other."""
    ends: Numbers = np.cumsum(sizes, dtype=np.uint64)
    return ends - sizes.astype(np.uint64)


def by(items: Iterable[_T], key: Callable[[_T], Any]) -> dict[Any, list[_T]]:
    """Items by what they have in common, in the order of the first of each."""
    groups: dict[Any, list[_T]] = {}
    for it in items:
        groups.setdefault(key(it), []).append(it)
    return groups


class Group:
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
        self._sent, (items, whose) = send([self.batch.items, self.batch.whose], device)
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
        with contextlib.suppress(torch.OutOfMemoryError), current(device):
            # Bytes have no kind of words: one launch takes all.
            group = Group([(tensors[name], None) for name in names], (1, 0), device)
            sums = zeros(4 * len(names), "<u8", device)
            group.batch.survey(*group.arrays, 0, sums.data_ptr(), 0, stream_of(device))
            rows = _download(sums, "<u8").reshape(-1, 4)
            found.update((name, row[:2].tobytes()) for name, row in zip(names, rows, strict=True))
    return found


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
