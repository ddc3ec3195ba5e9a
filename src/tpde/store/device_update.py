"""Sparse changes applied on a GPU, to tensors that lie there."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tpde.codec.delta import CHUNK_WORDS, MAX_CLASSES, ChangeModel
from tpde.codec.native import Bytes
from tpde.codec.pool import begin, each
from tpde.format.constants import DTYPES
from tpde.format.delta_head import TensorEntry
from tpde.frameworks import on_device, stream_of
from tpde.store import device_copies as gpu
from tpde.store.comparer import kind_of
from tpde.store.device_copies import HostArray
from tpde.store.device_deltas import DeviceGroup, batches

if TYPE_CHECKING:
    import torch

    from tpde.cuda.delta_kernels import Changes, Lists

# Threads that read payloads, which one does at some 4 GB/s, and what each reads at least.
_READERS, _READ_BYTES = 4, 2 << 20


class SparseChange(NamedTuple):
    """A resident tensor, and a sparse change of it."""

    entry: TensorEntry
    tensor: torch.Tensor


class _Decoding(NamedTuple):
    """Changes that are decoded together: the members that they are of, and what `write` takes."""

    members: range
    group: DeviceGroup
    counts: HostArray
    lists: Lists
    changes: Changes
    held: list[torch.Tensor]


class _Records(NamedTuple):
    """Records of all chunks of some changes, one change after the other."""

    counts: HostArray
    """How many words of each chunk change."""
    sizes: HostArray
    """How many bytes say so."""

    @classmethod
    def of(cls, members: Sequence[SparseChange]) -> _Records:
        """Those of some changes."""
        changes, sizes = ([getattr(it.entry, name) for it in members] for name in ("changes", "sizes"))
        return cls(np.concatenate(changes), np.concatenate(sizes))


def _whole(members: Sequence[SparseChange], records: _Records) -> tuple[list[bool], list[int]]:
    """Whether the records of each can be, on which the kernels rely, and how many words it changes."""
    counts, sizes = records
    b = DTYPES[members[0].entry.spec.dtype].word_bytes
    chunks = np.array([it.entry.changes.size for it in members])
    firsts = np.cumsum([0, *chunks[:-1]])
    words = np.full(counts.size, CHUNK_WORDS)
    last = [it.entry.spec.nbytes // b - CHUNK_WORDS * (it.entry.changes.size - 1) for it in members]
    words[firsts + chunks - 1] = last
    wrong = (counts > words) | ((counts == 0) & (sizes != 0))
    payloads = np.array([it.entry.size for it in members])
    fits = np.add.reduceat(sizes, firsts, dtype=np.uint64) == payloads
    changes: list[int] = np.add.reduceat(counts, firsts, dtype=np.uint64).tolist()
    return (fits & ~np.logical_or.reduceat(wrong, firsts)).tolist(), changes


class FoundTensor(NamedTuple):
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
    model : ChangeModel
        Which they are under.
    read : callable
        Reads the payloads of entries to where they lie one after the other.
    whole : bool
        Look at all words of the tensors. Without it at those that change: they must have the checks that
        were written. The model is of one class then.
    """

    def __init__(
        self,
        members: Sequence[SparseChange],
        model: ChangeModel,
        read: Callable[[Sequence[TensorEntry], Bytes], None],
        *,
        whole: bool = True,
    ) -> None:
        import torch

        from tpde.cuda.delta_kernels import model_image

        self._members, self._kind = members, kind_of(members[0].entry.spec)
        self._device = members[0].tensor.device
        self._read, self._whole = read, whole
        self._running: list[_Decoding] = []
        self._chosen: list[_Decoding] = []  # of which `write` writes
        self._names: set[str] = set()  # of the tensors of these
        with contextlib.suppress(torch.OutOfMemoryError):  # those that are left pass through the host
            self._held, (self._image,) = gpu.send([model_image(model, encode=False)], self._device)
            self._survey()
            self._records = _Records.of(members)
            for batch in self._batches():
                self._running.append(self._decode(batch))
        if self._running:
            self._wait = gpu.fetch(self._result)

    def _survey(self) -> None:
        """Start to look at all tensors: payloads are read meanwhile."""
        device, n = self._device, len(self._members)
        self._group = DeviceGroup([(it.tensor, None) for it in self._members], self._kind, device)
        self._group.batch.prepare("write")  # which may fail, and not between two writes
        with on_device(device):
            self._result = gpu.zeros(44 * n, "u1", device)  # four sums of each, checks, and faults
            self._totals = gpu.zeros(MAX_CLASSES * self._group.batch.chunks, "<u4", device)
            if self._whole:
                sums, totals, stream = self._result.data_ptr(), self._totals.data_ptr(), stream_of(device)
                self._group.batch.survey(*self._group.arrays, self._image, sums, totals, stream)

    def _batches(self) -> Iterator[range]:
        """Neighbours whose records can be, as many at a time as there is room for."""
        whole, changes = _whole(self._members, self._records)
        takes = [
            it.entry.size + 2 * (2 + self._kind[0]) * count
            for it, count in zip(self._members, changes, strict=True)
        ]
        for can_be, run in itertools.groupby(range(len(whole)), whole.__getitem__):
            if can_be:
                for batch in batches(list(run), takes.__getitem__):
                    yield range(batch[0], batch[-1] + 1)

    def _decode(self, batch: range) -> _Decoding:
        """Start decoding some of them."""
        import torch

        from tpde.cuda.delta_kernels import AHEAD, Changes, Lists

        device, members, group = self._device, self._members[batch.start : batch.stop], self._group
        if len(batch) < len(self._members):
            group = DeviceGroup([(it.tensor, None) for it in members], self._kind, device)
        here = slice(*(int(self._group.firsts[i]) for i in (batch.start, batch.stop)))
        counts, sizes = (it[here] for it in self._records)
        payload = sum(it.entry.size for it in members)
        upload = gpu.Upload(
            [counts.nbytes, 8 * counts.size, 8 * counts.size, sizes.nbytes, payload + AHEAD], device
        )
        data = upload.place(4)
        read = functools.partial(self._read_all, [it.entry for it in members], data[:payload])
        wait = begin(read, seconds=payload / 4e9)
        try:
            for i, array in enumerate((counts, gpu.starts(counts), gpu.starts(sizes), sizes)):
                upload.place(i)[:] = array.view(np.uint8)
            total = int(counts.sum(dtype=np.uint64))
            data[payload:] = 0
        finally:
            wait()
        with on_device(device):
            sent, (changes, starts, offsets, used, at) = upload.send()
            room = [torch.empty(b * total, dtype=torch.uint8, device=device) for b in (2, self._kind[0]) * 2]
            unsorted, found = (Changes(*(part.data_ptr() for part in pair)) for pair in (room[:2], room[2:]))
            whole_chunks = gpu.zeros(group.batch.chunks, "<u4", device)
            sums = self._result.data_ptr() + 32 * batch.start
            checks = self._result.data_ptr() + 32 * len(self._members) + 8 * batch.start
            bad = self._result.data_ptr() + 40 * len(self._members) + 4 * batch.start
            totals = self._totals.data_ptr() + 4 * MAX_CLASSES * int(self._group.firsts[batch.start])
            good, stream = whole_chunks.data_ptr(), stream_of(device)
            lists, data_at = Lists(changes, starts), (at, offsets, used)
            group.batch.decode(
                *group.arrays, self._image, totals, lists, data_at, unsorted, good, bad, stream
            )
            results = sums, checks, bad
            group.batch.locate(*group.arrays, self._image, good, starts, unsorted, found, *results, stream)
        return _Decoding(batch, group, counts, lists, found, [sent, *room[2:]])

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
    def found(self) -> dict[str, FoundTensor]:
        """What the tensors are, by name.

        Those that are not there pass through the host: the device had no memory, or the records of a change
        cannot be. So do those that may be no bases, or are damaged, unless all of their words were looked at.
        """
        found: dict[str, FoundTensor] = {}
        if not self._running:
            return found
        n, result = len(self._members), self._wait()
        rows = result[: 32 * n].view("<u8").reshape(-1, 4)
        prints, made = rows[:, :2], (rows[:, :2] + rows[:, 2:]).tobytes()
        checks = result[32 * n : 40 * n].view("<u8").tolist()
        bad = (result[40 * n :].view("<u4") != 0).tolist()
        for i in itertools.chain.from_iterable(it.members for it in self._running):
            entry, after = self._members[i].entry, made[16 * i : 16 * i + 16]
            if self._whole:
                found[entry.name] = FoundTensor(prints[i].tobytes(), bad[i] or after != entry.target)
            elif not bad[i] and checks[i] == entry.check:
                found[entry.name] = FoundTensor(entry.base, False)
        return found

    def choose(self, names: Collection[str]) -> set[str]:
        """Choose what is written, and bring what that takes to the device: `write` allocates nothing.

        Parameters
        ----------
        names : collection of str
            Tensors that may be: `found` says that they are the bases, and that their changes are not damaged.

        Returns
        -------
        set of str
            Those of them that are. The others pass through the host: the device had no memory.
        """
        import torch

        chosen: set[str] = set()
        for it in self._running:
            mine = [i for i in it.members if self._members[i].entry.name in names]
            if not mine:
                continue
            with contextlib.suppress(torch.OutOfMemoryError):
                lists, held = it.lists, it.held
                if len(mine) < len(it.members):
                    counts = np.zeros_like(it.counts)
                    for i in mine:
                        own = it.group.chunks_of(i - it.members.start)
                        counts[own] = it.counts[own]
                    sent, (changes,) = gpu.send([counts], self._device)
                    lists, held = lists._replace(counts=changes), [*held, sent]
                self._chosen.append(it._replace(lists=lists, held=held))
                chosen.update(self._members[i].entry.name for i in mine)
        self._names = chosen
        return chosen

    def write(self) -> None:
        """Write the changes that were chosen where they lie; PyTorch counts each as a change in place."""
        import torch

        for member in self._members:  # first: one that is too much does no harm
            if member.entry.name in self._names and not member.tensor.is_inference():
                torch.autograd.graph.increment_version(member.tensor)
        for it in self._chosen:
            with on_device(self._device):
                it.group.batch.write(*it.group.arrays, it.lists, it.changes, stream_of(self._device))
