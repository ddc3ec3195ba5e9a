"""Sparse changes applied on a GPU, to tensors that lie there."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tpde.codec.delta import CHUNK_WORDS, MAX_CLASSES, Model, print_difference
from tpde.codec.native import Bytes
from tpde.codec.pool import each
from tpde.format.constants import DTYPES
from tpde.format.delta import TensorEntry
from tpde.store import device as gpu
from tpde.store.device import Numbers
from tpde.store.diff import kind_of

if TYPE_CHECKING:
    import torch

    from tpde.cuda.delta import Changes, Lists

# Threads that read payloads, which one does at some 4 GB/s, and what each reads at least.
_READERS, _READ_BYTES = 4, 2 << 20


class SparseChange(NamedTuple):
    """A resident tensor, and a sparse change of it."""

    entry: TensorEntry
    tensor: torch.Tensor


class _Surveyed(NamedTuple):
    """A batch of changes, and its tensors' fingerprints, faults and counts of classes, on their way."""

    members: list[SparseChange]
    group: gpu.Group
    result: torch.Tensor
    work: torch.Tensor


class _Decoding(NamedTuple):
    """A batch of changes: what waits for its results, and what `write` takes."""

    members: list[SparseChange]
    group: gpu.Group
    wait: Callable[[], Bytes]
    counts: Numbers
    lists: Lists
    changes: Changes
    held: list[torch.Tensor]


def _records(members: Sequence[SparseChange]) -> tuple[Numbers, Numbers]:
    """How many changes all chunks have, and how many bytes."""
    changes, sizes = ([getattr(it.entry, name) for it in members] for name in ("changes", "sizes"))
    return np.concatenate(changes), np.concatenate(sizes)


def _whole(members: Sequence[SparseChange]) -> list[tuple[SparseChange, int]]:
    """The changes whose records can be, on which the kernels rely, and how many words each changes."""
    counts, sizes = _records(members)
    b = DTYPES[members[0].entry.spec.dtype].word_bytes
    chunks = np.array([it.entry.changes.size for it in members])
    firsts = np.cumsum([0, *chunks[:-1]])
    words = np.full(counts.size, CHUNK_WORDS)
    last = [it.entry.spec.nbytes // b - CHUNK_WORDS * (it.entry.changes.size - 1) for it in members]
    words[firsts + chunks - 1] = last
    wrong = (counts > words) | ((counts == 0) & (sizes != 0))
    payloads = np.array([it.entry.size for it in members])
    fits = np.add.reduceat(sizes, firsts, dtype=np.uint64) == payloads
    whole = (fits & ~np.logical_or.reduceat(wrong, firsts)).tolist()
    changes = np.add.reduceat(counts, firsts, dtype=np.uint64).tolist()
    return [(it, n) for it, n, is_whole in zip(members, changes, whole, strict=True) if is_whole]


class Decoded(NamedTuple):
    """What a resident tensor is found to be."""

    fingerprint: bytes
    damaged: bool
    """The change cannot be decoded, or would lead elsewhere. So it is for a tensor that is no base of it."""


class SparseChanges:
    """Sparse changes of resident tensors on one device, under one model: being decoded, and not written yet.

    Parameters
    ----------
    members : sequence of SparseChange
        The changes. Tensors may be no bases of them: `found` says it.
    model : Model
        Which they are under.
    read : callable
        Reads the payloads of entries to where they lie one after the other.
    whole : bool
        Look at all words of the tensors. Without it at those that change, and their neighbours within 8
        bytes: their part of the fingerprints must be the bases'. The model is of one class then.
    """

    def __init__(
        self,
        members: Sequence[SparseChange],
        model: Model,
        read: Callable[[Sequence[TensorEntry], Bytes], None],
        *,
        whole: bool = True,
    ) -> None:
        import torch

        from tpde.cuda.delta import model_image

        self._kind, self._device = kind_of(members[0].entry.spec), members[0].tensor.device
        self._held, (self._image,) = gpu.send([model_image(model, encode=False)], self._device)
        self._read, self._whole = read, whole
        self._running: list[_Decoding] = []
        each_change, surveyed = 2 * (2 + self._kind[0]), list[_Surveyed]()
        with contextlib.suppress(torch.OutOfMemoryError):  # those that are left pass through the host
            for batch in gpu.batches(_whole(members), lambda it: it[0].entry.size + each_change * it[1]):
                surveyed.append(self._survey([it for it, _ in batch]))  # all: payloads are read meanwhile
        with contextlib.suppress(torch.OutOfMemoryError):
            for it in surveyed:
                self._running.append(self._decode(it))

    def _survey(self, batch: list[SparseChange]) -> _Surveyed:
        """Start to look at the tensors of some of them."""
        device, n = self._device, len(batch)
        group = gpu.Group([(it.tensor, None) for it in batch], self._kind, device)
        group.batch.prepare("write")  # which may fail, and not between two writes
        with gpu.current(device):
            result = gpu.zeros(36 * n, "u1", device)
            work = gpu.zeros(4 * (MAX_CLASSES + 1) * group.batch.chunks, "u1", device)
            if self._whole:
                sums, totals, stream = result.data_ptr(), work.data_ptr(), gpu.stream_of(device)
                group.batch.survey(*group.arrays, self._image, sums, totals, stream)
        return _Surveyed(batch, group, result, work)

    def _decode(self, it: _Surveyed) -> _Decoding:
        """Start decoding some of them."""
        import torch

        from tpde.cuda.delta import AHEAD, Changes, Lists

        device, batch, group = self._device, it.members, it.group
        counts, sizes = _records(batch)
        total, payload = int(counts.sum(dtype=np.uint64)), int(sizes.sum(dtype=np.uint64))
        arrays = counts, gpu.starts(counts), gpu.starts(sizes), sizes
        upload = gpu.Upload([*(array.nbytes for array in arrays), payload + AHEAD], device)
        for i, array in enumerate(arrays):
            upload.place(i)[:] = array.view(np.uint8)
        data = upload.place(len(arrays))
        self._read_all([member.entry for member in batch], data[:payload])
        data[payload:] = 0
        with gpu.current(device):
            sent, (changes, starts, offsets, used, at) = upload.send()
            room = [torch.empty(b * total, dtype=torch.uint8, device=device) for b in (2, self._kind[0]) * 2]
            unsorted, found = (Changes(*(part.data_ptr() for part in pair)) for pair in (room[:2], room[2:]))
            sums, bad = it.result.data_ptr(), it.result.data_ptr() + 32 * len(batch)
            totals, good = it.work.data_ptr(), it.work.data_ptr() + 4 * MAX_CLASSES * group.batch.chunks
            lists, data_at, stream = Lists(changes, starts), (at, offsets, used), gpu.stream_of(device)
            group.batch.decode(
                *group.arrays, self._image, totals, lists, data_at, unsorted, good, bad, stream
            )
            group.batch.locate(*group.arrays, self._image, good, starts, unsorted, found, sums, bad, stream)
        return _Decoding(batch, group, gpu.fetch(it.result), counts, lists, found, [sent, *room[2:]])

    def _read_all(self, entries: Sequence[TensorEntry], out: Bytes) -> None:
        """Read payloads by several threads."""
        ends = np.cumsum([0, *(it.size for it in entries)])
        parts = min(_READERS, len(entries), 1 + out.size // _READ_BYTES)
        # Where parts begin: entries that lie at about equal distances.
        cuts = np.unique(np.searchsorted(ends, np.linspace(0, out.size, parts + 1))).tolist()

        def read(number: int) -> None:
            first, last = cuts[number], cuts[number + 1]
            self._read(entries[first:last], out[ends[first] : ends[last]])

        each(read, range(len(cuts) - 1), seconds=out.size / 4e9, threads=parts)

    @functools.cached_property
    def found(self) -> dict[str, Decoded]:
        """What the tensors are, by name.

        Those that are not there pass through the host: the device had no memory, or the records of a change
        cannot be. So do those that may be no bases, or are damaged, unless all of their words were looked at.
        """
        found = {}
        for it in self._running:
            n, result = len(it.members), it.wait()
            rows = result[: 32 * n].view("<u8").reshape(-1, 4)
            prints, made = rows[:, :2], rows[:, :2] + rows[:, 2:]
            bad = result[32 * n :].view("<u4") != 0
            for i, member in enumerate(it.members):
                entry = member.entry
                if self._whole:
                    damaged = bool(bad[i]) or made[i].tobytes() != entry.target
                    found[entry.name] = Decoded(prints[i].tobytes(), damaged)
                elif not bad[i] and made[i].tobytes() == print_difference(entry.target, entry.base):
                    found[entry.name] = Decoded(entry.base, False)
        return found

    def write(self, names: Collection[str]) -> None:
        """Write the changes of some tensors where they lie; PyTorch counts each as a change in place.

        Parameters
        ----------
        names : collection of str
            Which: `found` must say that they are the bases, and that their changes are not damaged.
        """
        import torch

        for it in self._running:
            for member in it.members:  # first: one that is too much does no harm
                if member.entry.name in names and not member.tensor.is_inference():
                    torch.autograd.graph.increment_version(member.tensor)
        for it in self._running:
            others = [i for i, member in enumerate(it.members) if member.entry.name not in names]
            lists, counts = it.lists, it.counts.copy()
            for i in others:
                counts[it.group.chunks_of(i)] = 0
            if others:
                _sent, (changes,) = gpu.send([counts], self._device)
                lists = lists._replace(counts=changes)
            with gpu.current(self._device):
                it.group.batch.write(*it.group.arrays, lists, it.changes, gpu.stream_of(self._device))
