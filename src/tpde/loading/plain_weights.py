"""Weights that a plan keeps plain."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import nn

from tpde.format.blob_header import align
from tpde.format.constants import ALIGN_BLOB
from tpde.loading.assignment import assign
from tpde.loading.checkpoint_files import Stored
from tpde.loading.reading import Reader, Reading
from tpde.loading.runs import Run
from tpde.memory.device_memory import allocate
from tpde.streaming.streamed_source import Streamed, put_on_device
from tpde.weights.launch import Launch
from tpde.weights.resident import Resident
from tpde.weights.source import decoder

SCRATCH_BYTES = 512 << 20  # packed, on the device at a time, where there is room: half is read, half decoded
SCRATCH_LEAST = 20 << 20  # smaller memory shares a segment of the caching allocator, and does not go back


class _Wanted(NamedTuple):
    """A blob, and where in its parameter it goes."""

    name: str
    part: Stored
    at: int
    last: bool  # of its parameter

    @property
    def room(self) -> int:
        return align(self.part.extent.size, ALIGN_BLOB)


def _batches(runs: Mapping[str, Run[Stored]], room: int) -> Iterator[list[_Wanted]]:
    """Blobs to be read at a time, of the largest parameters first; several only if they fit into `room`."""
    batch: list[_Wanted] = []
    for name, run in sorted(runs.items(), key=lambda item: -item[1].nbytes):
        at = 0
        for i, part in enumerate(run.parts):
            wanted = _Wanted(name, part, at, i + 1 == len(run.parts))
            at += part.nbytes
            if batch and sum(it.room for it in batch) + wanted.room > room:
                yield batch
                batch = []
            batch.append(wanted)
    if batch:
        yield batch


class _Scratch:
    """Device memory for blobs until they are decoded: batches take turns at its two ends.

    One buffer, in a segment of its own that goes back whole. It shrinks with what is left to decode: at the
    end all plain weights are there, and maybe no more room than for these.

    Parameters
    ----------
    sizes : sequence of int
        Of the batches, in order.
    room : int
        Bytes that it may have whatever is left. For larger batches, it has at most twice what the largest of
        them takes.
    device : torch.device
        Where.

    Attributes
    ----------
    both : list of bool
        For each batch, whether there is room for it and the next one.
    """

    def __init__(self, sizes: Sequence[int], room: int, device: torch.device) -> None:
        self._sizes, self._room, self._device = sizes, room, device
        self.both = [a + b <= room for a, b in pairwise((*sizes, room + 1))]
        needs = [a + b * both for a, b, both in zip(sizes, (*sizes[1:], 0), self.both, strict=True)]
        self._left = list(accumulate(reversed(needs), max))[::-1]  # the most that is needed from each on
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def place(self, number: int, batch: Sequence[_Wanted]) -> list[torch.Tensor]:
        """Memory for the blobs of a batch. That of the one before stays if there is room for both."""
        left, have = self._left[number], self._memory.numel()
        most = self._room if left <= self._room else max(2 * left, SCRATCH_LEAST)
        if not left <= have <= most:  # never if there was room for both
            self.free()
            self._memory = allocate(left, self._device, "the room that plain weights are decoded from")
        begin = self._memory.numel() - self._sizes[number] if number % 2 else 0
        starts = accumulate((it.room for it in batch), initial=begin)
        return [self._memory[at : at + it.part.extent.size] for at, it in zip(starts, batch, strict=False)]

    def free(self) -> None:
        """Give it back; nothing else may hold any of it."""
        self._memory = self._memory.new_empty(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class _Decoder:
    """Decodes batches of blobs into parameters of a model, and puts these there.

    Headers, tables and index maps are read from the files, of all batches now: later, other threads read, and
    each call that lets them run waits for its turn again.
    """

    def __init__(
        self,
        model: nn.Module,
        runs: Mapping[str, Run[Stored]],
        device: torch.device,
        batches: Iterable[Sequence[_Wanted]],
    ) -> None:
        self._model, self._runs, self._device = model, runs, device
        self._flat = torch.empty(0, dtype=torch.uint8, device=device)  # of a parameter that is not complete
        parts = [it.part for batch in batches for it in batch] if device.type == "cuda" else []
        self._opened = {part: part.checked(Streamed(part.extent, None, device, None)) for part in parts}

    def __call__(self, batch: Sequence[_Wanted], blobs: Sequence[torch.Tensor]) -> None:
        rooms = [self._room(it) for it in batch]
        opened = [self._opened.pop(it.part, None) for it in batch]
        put_on_device([it for it in opened if it is not None])
        together = []
        for it, blob, room, tensor in zip(batch, blobs, rooms, opened, strict=True):
            if tensor is not None and tensor.decodable():
                together.append((it.part, tensor, blob, room))
            else:
                packed = it.part.checked(Resident(blob, it.part.name))
                decoder([(packed, 0)])(room)
        if together:
            self._launch(*zip(*together, strict=True))

    def _room(self, it: _Wanted) -> torch.Tensor:
        """Where a blob goes, decoded: in its parameter, which the model gets when the last part has room."""
        run = self._runs[it.name]
        if not it.at:
            size = align(max(run.nbytes, 1), ALIGN_BLOB)
            self._flat = allocate(size, self._device, f"`{it.name}`, decoded,")
        flat = self._flat
        if it.last:
            assign(self._model, it.name, flat[: run.nbytes].view(run.dtype).view(run.shape))
        return flat[it.at :]

    def _launch(
        self,
        parts: Sequence[Stored],
        tensors: Sequence[Streamed],
        blobs: Sequence[torch.Tensor],
        rooms: Sequence[torch.Tensor],
    ) -> None:
        """Decode blobs with one launch, wherever their tensors go, and wait for it."""
        from tpde.cuda.decode import WorkList

        assert self._device.index is not None
        first = min(room.data_ptr() for room in rooms)
        work = WorkList(
            [
                tensor.span_item(room.data_ptr() - first, None, blob.data_ptr())
                for tensor, blob, room in zip(tensors, blobs, rooms, strict=True)
            ],
            self._device.index,
        )
        launch = Launch([work], self._device)
        launch(0, first, True, 0)
        launch.report([it.name for it in parts])


def decode_runs(
    model: nn.Module,
    runs: Mapping[str, Run[Stored]],
    device: torch.device,
    progress: Callable[[int], None] | None,
    room: int = SCRATCH_BYTES,
    make_reader: Callable[[torch.device], Reader] = Reader,
) -> None:
    """Put parameters into a model plain, a few tensors of the files at a time; others are read meanwhile.

    Parameters
    ----------
    model : nn.Module
        Whose parameters they are.
    runs : mapping of str to Run
        The parameters, as runs of `Stored`.
    device : torch.device
        Where they go.
    progress : callable, optional
        Called with numbers of bytes read.
    room : int
        Bytes of device memory beside the parameters, for what is packed. More are taken for a blob that is
        larger, one at a time.
    make_reader : callable, optional
        Makes what reads the files.

    Raises
    ------
    Truncated
        If a file ends before a blob does.
    Corrupt
        Naming tensor and chunk.
    OutOfMemory
        If one does not fit.
    """
    if not runs:
        return
    room = min(room, SCRATCH_BYTES)
    batches = list(_batches(runs, room // 2))
    scratch = _Scratch([sum(it.room for it in batch) for batch in batches], room, device)
    decode = _Decoder(model, runs, device, batches)
    begun: deque[tuple[list[torch.Tensor], Reading]] = deque()

    with torch.inference_mode(False), make_reader(device) as reader:

        def begin(number: int) -> None:
            blobs = scratch.place(number, batches[number])
            begun.append((blobs, reader.begin(blobs, [it.part.extent for it in batches[number]])))

        for number, batch in enumerate(batches):
            if not begun:
                begin(number)
            if scratch.both[number]:
                begin(number + 1)
            blobs, reading = begun.popleft()
            reading.wait()
            decode(batch, blobs)
            del blobs
            if progress is not None:
                progress(sum(it.part.extent.size for it in batch))
    scratch.free()
