"""Sparse changes of tensors, coded as deltas have them: a few bits for each word that changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tpde.codec.delta import CHUNK_WORDS, MAX_CLASSES, ChangeModel, Sparse, chunk_count
from tpde.codec.native import Bytes
from tpde.cuda import backend
from tpde.errors import InvalidInput
from tpde.files.thread_count import default_threads
from tpde.format.blob_header import align
from tpde.frameworks import on_device, stream_of
from tpde.weights.launch import capturing, upload
from tpde.weights.source import Decoder

if TYPE_CHECKING:
    from tpde.cuda.delta_kernels import DeltaBatch

_COUNTED = 4 * (MAX_CLASSES + 1)  # bytes a chunk: words of each class, and changes that were read
# What a launch takes beside the weights for changes that are not coded: 8 bytes each of bf16. A block of an
# 8 B Llama has 7.6 million of them if 3.5 % changed, its head 18 million.
_SCRATCH_BYTES = 64 << 20


def by_kernels(device: torch.device) -> bool:
    """Whether kernels decode changes on a device, not the CPU core."""
    return device.type == backend.current().kind


class Coding:
    """A model of changes (docs/delta.md 2), and its images on devices.

    Parameters
    ----------
    model : ChangeModel
        The model.
    """

    def __init__(self, model: ChangeModel) -> None:
        self.model = model
        self._images: dict[torch.device, Tensor] = {}

    def image(self, device: torch.device) -> Tensor:
        """What kernels decode with."""
        from tpde.cuda.delta_kernels import model_image

        if device not in self._images:
            self._images[device] = upload(model_image(self.model, encode=False), device)
        return self._images[device]


class CodedChange:
    """A sparse change of one tensor, checked before: nothing of it is compared when it is decoded.

    Parameters
    ----------
    coding : Coding
        The model that it is under.
    records : Sparse
        The change; of its data only the records of chunks are kept.
    data : torch.Tensor
        The bytes of all chunks on the device, uint8, with `cuda.delta_kernels.AHEAD` more.
    """

    def __init__(self, coding: Coding, records: Sparse, data: Tensor) -> None:
        self.coding, self.changes, self.sizes, self.data = coding, records.changes, records.sizes, data
        self._address = data.data_ptr()  # shared memory is another for the same tensor
        ends = np.cumsum(self.sizes, dtype=np.uint64)
        self.starts = ends - self.sizes  # in the data

    @classmethod
    def on(cls, device: torch.device, coding: Coding, sparse: Sparse) -> CodedChange:
        """A change whose bytes are brought to a device."""
        from tpde.cuda.delta_kernels import AHEAD

        data = np.concatenate([sparse.data, np.zeros(AHEAD, np.uint8)])
        return cls(coding, sparse, upload(data, device))

    @property
    def word_bytes(self) -> int:
        """Of a word of the tensor."""
        return self.coding.model.word_bytes

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on its device, but for its model."""
        # The records of chunks are there twice, for a block, and for the weight alone; and so is what is
        # counted of the words beneath.
        return self.data.numel() + 2 * (24 + _COUNTED) * self.changes.size

    def moved(self, fn: Callable[[Tensor], Tensor]) -> CodedChange:
        """The same where a function moves its bytes; itself where they stay."""
        data = fn(self.data)
        if data is self.data and data.data_ptr() == self._address:
            return self
        return CodedChange(self.coding, Sparse(np.empty(0, np.uint8), self.changes, self.sizes), data)

    def apply_on_host(self, words: Bytes, first: int = 0) -> None:
        """Change words of whole chunks, from chunk `first` on, in host memory."""
        part = slice(first, first + chunk_count(words.size // self.word_bytes))
        begin = int(self.starts[part][0]) if words.size else 0
        end = begin + int(self.sizes[part].sum(dtype=np.uint64))
        data = self.data[begin:end].cpu().numpy()
        records = np.ascontiguousarray(self.changes[part]), np.ascontiguousarray(self.sizes[part])
        self.coding.model.apply(Sparse(data, *records), words, default_threads())


class CodedPiece(NamedTuple):
    """Chunks `first` to `last` of a change, whose words begin at byte `at` of a buffer.

    `words` is how many they have.
    """

    change: CodedChange
    first: int
    last: int
    at: int
    words: int

    @classmethod
    def whole(cls, change: CodedChange, nbytes: int, at: int) -> CodedPiece:
        """All of a tensor's chunks."""
        return cls(change, 0, change.changes.size, at, nbytes // change.word_bytes)

    @property
    def changes(self) -> int:
        """How many words change."""
        return int(self.change.changes[self.first : self.last].sum(dtype=np.uint64))

    def cut(self, most: int) -> Iterator[CodedPiece]:
        """Pieces that have at most so many changes, or one chunk."""
        sums = np.cumsum(self.change.changes[self.first : self.last], dtype=np.uint64)
        first, before = self.first, 0
        while first < self.last:
            fits = int(np.searchsorted(sums, before + most, "right")) + self.first
            last = min(max(fits, first + 1), self.last)
            skipped = (first - self.first) * CHUNK_WORDS
            words = min((last - first) * CHUNK_WORDS, self.words - skipped)
            yield CodedPiece(self.change, first, last, self.at + skipped * self.change.word_bytes, words)
            before, first = int(sums[last - 1 - self.first]), last


class _Pieces:
    """Changes under one model that are decoded, and written to a buffer on a GPU, by three launches.

    All that they read is on the device from now on, but for where the buffer lies, which each call computes
    there: a call copies nothing from the host, waits for nothing and may be recorded in a CUDA graph. The
    words beneath are always the same, so that they are counted by the first call of each stream alone.
    """

    def __init__(self, pieces: Sequence[CodedPiece], device: torch.device) -> None:
        from tpde.cuda.delta_kernels import DeltaBatch, Pair

        coding = pieces[0].change.coding
        model = coding.model
        self._device, self._image, self._word = device, coding.image(device), model.word_bytes
        self._held = [it.change.data for it in pieces]
        parts = [slice(it.first, it.last) for it in pieces]
        counts = np.concatenate([it.change.changes[part] for it, part in zip(pieces, parts, strict=True)])
        sizes = np.concatenate([it.change.sizes[part] for it, part in zip(pieces, parts, strict=True)])
        self._data = min(it.data_ptr() for it in self._held)
        starts = [
            it.change.starts[part] + np.uint64(it.change.data.data_ptr() - self._data)
            for it, part in zip(pieces, parts, strict=True)
        ]
        self._count = int(counts.sum(dtype=np.uint64))
        lists = np.cumsum(counts, dtype=np.uint64) - counts
        rows = [Pair(it.at, 0, it.words) for it in pieces]
        self._batch: DeltaBatch = DeltaBatch(rows, model.word_bytes, model.rotate, device.index or 0)
        for name in ("survey", "decode", "locate", "write"):
            self._batch.prepare(name)
        arrays = [counts, lists, np.concatenate(starts), sizes, self._batch.whose, self._batch.items]
        places = list(accumulate((align(it.nbytes, 16) for it in arrays), initial=0))
        # What is counted; and what is said of fingerprints and of damage, which was all checked before.
        room = np.zeros(places[-1] + _COUNTED * counts.size + 36 * len(rows), np.uint8)
        for at, it in zip(places, arrays, strict=False):
            room[at : at + it.nbytes] = it.view(np.uint8)
        self._there = upload(room, device)
        self._places = [self._there.data_ptr() + at for at in places]
        items = self._there[places[-2] : places[-1]].view(torch.int64).view(-1, len(Pair._fields) + 1)
        self._surveyed: set[int] = set()  # streams, on which what was counted is there
        self._items, self._based = items, torch.zeros_like(items)  # which are addresses in the buffer
        self._based[:, Pair._fields.index("base")] = 1

    def __call__(self, out: Tensor) -> None:
        """Change the tensors in a buffer of bytes, on the current stream."""
        from tpde.cuda.delta_kernels import Changes, Lists

        with on_device(self._device):
            placed = torch.add(self._items, self._based, alpha=out.data_ptr())
            items, stream = placed.data_ptr(), stream_of(self._device)
            room = [
                torch.empty(size * self._count, dtype=torch.uint8, device=self._device)
                for size in (2, self._word) * 2
            ]
            unsorted, found = (Changes(*(it.data_ptr() for it in pair)) for pair in (room[:2], room[2:]))
            counts, lists, starts, sizes, whose, _, totals = self._places
            sums = totals + 4 * MAX_CLASSES * self._batch.chunks
            good = sums + 32 * len(self._items)
            bad, image = good + 4 * self._batch.chunks, self._image.data_ptr()
            if stream not in self._surveyed:
                self._batch.survey(items, whose, image, sums, totals, stream)
                if not capturing(self._device):  # else it has not run yet
                    self._surveyed.add(stream)
            data, listed = (self._data, starts, sizes), Lists(counts, lists)
            self._batch.decode(items, whose, image, totals, listed, data, unsorted, good, bad, stream)
            self._batch.locate(items, whose, image, good, lists, unsorted, found, sums, 0, bad, stream)
            self._batch.write(items, whose, listed, found, stream)


def changing(pieces: Sequence[CodedPiece], device: torch.device) -> list[Decoder]:
    """What changes tensors in a buffer of bytes on a device, one call after the other.

    Parameters
    ----------
    pieces : sequence of CodedPiece
        Their words; none may overlap.
    device : torch.device
        Where the changes are, and the buffer will be.

    Raises
    ------
    InvalidInput
        If changes are elsewhere, and kernels would read them.
    """
    if not by_kernels(device):

        def change(out: Tensor) -> None:
            words = out.numpy()
            for it in pieces:
                it.change.apply_on_host(words[it.at : it.at + it.words * it.change.word_bytes], it.first)

        return [change]
    for it in pieces:
        if it.change.data.device != device:
            raise InvalidInput(
                f"a delta's changes are on {it.change.data.device}, the weight that they change on {device}",
                hint="move the whole model to one device",
            )
    made: list[Decoder] = []
    for members in _by_coding(pieces).values():
        most = _SCRATCH_BYTES // (2 * (2 + members[0].change.word_bytes))
        batch: list[CodedPiece] = []
        held = 0
        for it in (part for piece in members for part in piece.cut(most)):
            if batch and held + it.changes > most:
                made.append(_Pieces(batch, device))
                batch, held = [], 0
            if it.changes:
                batch.append(it)
                held += it.changes
        if batch:
            made.append(_Pieces(batch, device))
    return made


def _by_coding(pieces: Sequence[CodedPiece]) -> dict[int, list[CodedPiece]]:
    groups: dict[int, list[CodedPiece]] = {}
    for it in pieces:
        groups.setdefault(id(it.change.coding), []).append(it)
    return groups
