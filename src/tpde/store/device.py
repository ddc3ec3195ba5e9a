"""Deltas between tensors on a GPU, made and applied there: what takes a sparse change or none.

Everything else passes through the CPU, as do tensors that are not contiguous; results are the same bytes.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from tpde.codec.delta import CHUNK_WORDS, MAX_CLASSES, Model, Sparse, chunk_count, chunk_room
from tpde.codec.native import Bytes
from tpde.codec.pool import each
from tpde.errors import CompileError, MissingDependency, UnsupportedDevice
from tpde.format.constants import DTYPES
from tpde.format.container import TensorSpec
from tpde.format.delta import SAME, SPARSE, TensorEntry
from tpde.store.diff import Comparer, Kind, Wanted, kind_of
from tpde.store.payloads import Stored, is_clear
from tpde.store.states import Key

if TYPE_CHECKING:
    import torch

    from tpde.cuda.delta import Batch, Changes, Lists

_T = TypeVar("_T")
Numbers = np.ndarray[Any, Any]
"""Of any dtype."""

# One word in so many may have changed of what is encoded here: with more, changes are seldom `is_clear`.
_FEW = 8
# What batches may take on the device at a time beside their tensors, where one has several.
_ROOM = 512 << 20
# Threads that read payloads, which one does at some 4 GB/s, and what each reads at least.
_READERS, _READ_BYTES = 4, 2 << 20


@functools.cache
def can_run(device: int) -> bool:
    """Whether the kernels run on a device: `tpde[cuda]` is there, and the device is one of theirs."""
    from tpde.cuda.delta import prepare

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


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor."""
    import torch

    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _room(nbytes: int, device: torch.device) -> torch.Tensor:
    """Bytes in host memory that the device copies from and to at its full speed."""
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


class _Upload:
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


def _send(arrays: Sequence[Numbers], device: torch.device) -> tuple[torch.Tensor, list[int]]:
    """Arrays on a device, by one copy: what holds them, and their addresses there."""
    upload = _Upload([it.nbytes for it in arrays], device)
    for i, it in enumerate(arrays):
        upload.place(i)[:] = it.view(np.uint8)
    return upload.send()


def _zeros(count: int, dtype: str, device: torch.device) -> torch.Tensor:
    """Numbers on the device. Never none of them, so that there is an address."""
    import torch

    return torch.zeros(max(count, 1) * np.dtype(dtype).itemsize, dtype=torch.uint8, device=device)


def _fetch(tensor: torch.Tensor) -> Callable[[], Bytes]:
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
    return _fetch(tensor)().view(dtype)


def _starts(sizes: Numbers) -> Numbers:
    """Where each of some things begins that lie one after the other."""
    ends: Numbers = np.cumsum(sizes, dtype=np.uint64)
    return ends - sizes.astype(np.uint64)


def _by(items: Iterable[_T], key: Callable[[_T], Any]) -> dict[Any, list[_T]]:
    groups: dict[Any, list[_T]] = {}
    for it in items:
        groups.setdefault(key(it), []).append(it)
    return groups


class _Group:
    """Tensors of one kind of words on one device, and the arrays that launches take."""

    def __init__(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor | None]], kind: Kind, device: torch.device
    ) -> None:
        from tpde.cuda.delta import Batch, Pair

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
        self.batch: Batch = Batch(rows, *kind, device.index or 0)
        self.firsts = np.cumsum([0, *(chunk_count(it.words) for it in rows)])
        self._sent, (items, whose) = _send([self.batch.items, self.batch.whose], device)
        self.arrays = items, whose
        """Addresses of what every launch takes."""

    def chunks_of(self, number: int) -> slice:
        """The chunks of a tensor among those of the group."""
        return slice(int(self.firsts[number]), int(self.firsts[number + 1]))


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Fingerprints of resident tensors, by name (delta.md 4)."""
    found: dict[str, bytes] = {}
    for device, names in _by(tensors, lambda name: tensors[name].device).items():
        # Bytes have no kind of words: one launch takes all.
        group = _Group([(tensors[name], None) for name in names], (1, 0), device)
        with current(device):
            sums = _zeros(4 * len(names), "<u8", device)
            group.batch.survey(*group.arrays, 0, sums.data_ptr(), 0, stream_of(device))
            rows = _download(sums, "<u8").reshape(-1, 4)
        found.update((name, row[:2].tobytes()) for name, row in zip(names, rows, strict=True))
    return found


# ---- making


class _Prints:
    """Fingerprints, how many words of each chunk differ, and whether targets vary: on their way."""

    def __init__(self, group: _Group) -> None:
        self._group = group  # whose arrays the launch reads
        n = len(group.firsts) - 1
        sizes = 32 * n, 4 * group.batch.chunks, 4 * n
        self._ends = np.cumsum(sizes)
        with current(group.device):
            made = _zeros(int(self._ends[-1]), "u1", group.device)
            sums = made.data_ptr()
            counts, varied = sums + int(self._ends[0]), sums + int(self._ends[1])
            group.batch.prints(*group.arrays, sums, counts, varied, stream_of(group.device))
            self._wait = _fetch(made)

    def wait(self) -> tuple[list[tuple[bytes, bytes]], Numbers, Numbers]:
        """Both fingerprints of each tensor, changes of each chunk, and which targets vary."""
        sums, counts, varied = np.split(self._wait(), self._ends[:2])
        pairs = [(row[:2].tobytes(), row[2:].tobytes()) for row in sums.view("<u8").reshape(-1, 4)]
        return pairs, counts.view("<u4"), varied.view("<u4") != 0


class _Compared(NamedTuple):
    """A tensor of a group: its changes in all chunks, fingerprints, and whether its target varies."""

    name: str
    counts: Numbers
    changes: int
    base: bytes
    target: bytes
    varied: bool


class _Encoded(NamedTuple):
    """The bytes of all chunks of a group, how many each has, and which have changed meanwhile."""

    data: Bytes
    sizes: Numbers
    wrong: Numbers


class DeviceComparer:
    """Compares resident tensors where they are, and what else there is on the CPU.

    Parameters
    ----------
    host : Comparer
        Compares the same states on the CPU.
    pairs : mapping of str to (torch.Tensor, torch.Tensor)
        Resident tensors by name, in both states: of one dtype and shape, on one device.
    specs : mapping of str to TensorSpec
        What they are.
    """

    def __init__(
        self,
        host: Comparer,
        pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        specs: Mapping[str, TensorSpec],
    ) -> None:
        self._host, self._pairs, self._specs = host, pairs, specs
        self._found: dict[str, tuple[TensorEntry, Stored] | None] = {}
        self._coming: Iterator[tuple[str, tuple[TensorEntry, Stored]]] | None = None

    def _place(self, name: str) -> tuple[torch.device, Kind]:
        return self._pairs[name][0].device, kind_of(self._specs[name])

    @functools.cached_property
    def _running(self) -> list[tuple[list[str], _Group, _Prints]]:
        """All resident tensors, which are being compared from the first use on."""
        running = []
        for (device, kind), names in _by(sorted(self._pairs), self._place).items():  # as they are asked for
            group = _Group([self._pairs[name] for name in names], kind, device)
            running.append((names, group, _Prints(group)))
        return running

    def chunks(self, wanted: Sequence[Wanted]) -> list[tuple[Bytes, Bytes]]:
        """Some chunks' bytes of tensors in both states."""
        import torch

        found: dict[int, list[tuple[Bytes, Bytes]]] = {}
        copies = []
        resident = [(i, it) for i, it in enumerate(wanted) if it.key[1] in self._pairs]
        for device, mine in _by(resident, lambda it: self._place(it[1].key[1])[0]).items():
            pairs = [(i, it.ranges, tuple(map(_flat, self._pairs[it.key[1]]))) for i, it in mine]
            with current(device):
                both = [torch.cat([one[n][a:b] for _, rs, one in pairs for a, b in rs]) for n in (0, 1)]
                copies.append((pairs, [_fetch(it) for it in both]))
        _ = self._running  # while these are copied and looked at
        for pairs, waits in copies:
            old, new, at = waits[0](), waits[1](), 0
            for i, ranges, _ in pairs:
                ends = np.cumsum([at, *(b - a for a, b in ranges)])
                found[i] = [(old[a:b], new[a:b]) for a, b in itertools.pairwise(map(int, ends))]
                at = int(ends[-1])
        for i, it in enumerate(wanted):
            if i not in found:
                found[i] = self._host.chunks([it])
        return [pair for i in range(len(wanted)) for pair in found[i]]

    def compare(self, key: Key, base: Key | None, models: Mapping[Kind, Model]) -> tuple[TensorEntry, Stored]:
        """How a tensor is stored. What is resident comes in an order of its own."""
        if self._coming is None:
            compared = (self._compare(*running, models) for running in self._running)
            self._coming = itertools.chain.from_iterable(compared)
        while key[1] in self._pairs and key[1] not in self._found:
            name, found = next(self._coming, (key[1], None))
            self._found[name] = found
        found = self._found.pop(key[1], None)
        return self._host.compare(key, base, models) if found is None else found

    def _compare(
        self, names: list[str], group: _Group, running: _Prints, models: Mapping[Kind, Model]
    ) -> Iterator[tuple[str, tuple[TensorEntry, Stored]]]:
        """Those that are the same, or whose sparse changes are clearly the best."""
        prints, counts, varied = running.wait()
        changes, few = np.add.reduceat(counts, group.firsts[:-1], dtype=np.uint64).tolist(), []
        for i, name in enumerate(names):
            it = _Compared(name, counts[group.chunks_of(i)], changes[i], *prints[i], bool(varied[i]))
            if not it.changes:
                yield name, (self._entry(it), Stored(SAME, np.zeros(0, np.uint8)))
            elif (
                group.kind[1] and it.varied and it.changes * _FEW * group.kind[0] <= self._specs[name].nbytes
            ):
                few.append(it)
        if few:
            yield from self._encode(group, few, models[group.kind])

    def _entry(self, it: _Compared) -> TensorEntry:
        return TensorEntry(it.name, self._specs[it.name], SAME, base=it.base, target=it.target)

    def _encode(
        self, group: _Group, members: list[_Compared], model: Model
    ) -> Iterator[tuple[str, tuple[TensorEntry, Stored]]]:
        from tpde.cuda.delta import model_image, most_bytes

        most = most_bytes(group.kind[0])
        _held, (image,) = _send([model_image(model, encode=True)], group.device)
        running: collections.deque[tuple[list[_Compared], _Group, Callable[[], _Encoded | None]]]
        running = collections.deque()
        # Two at a time: while one's bytes are taken, the device encodes the next.
        for batch in _batches(members, lambda it: 2 * (8 + most) * it.changes):
            part = _Group([self._pairs[it.name] for it in batch], group.kind, group.device)
            counts = np.concatenate([it.counts for it in batch])
            running.append((batch, part, _encoding(part, image, counts, most)))
            if len(running) > 1:
                yield from self._stored(*running.popleft())
        for it in running:
            yield from self._stored(*it)

    def _stored(
        self, batch: list[_Compared], group: _Group, wait: Callable[[], _Encoded | None]
    ) -> Iterator[tuple[str, tuple[TensorEntry, Stored]]]:
        made = wait()
        if made is None:
            return  # these pass through the host
        data, sizes, wrong = made
        ends = np.cumsum(sizes, dtype=np.uint64)
        for i, it in enumerate(batch):
            own, nbytes = group.chunks_of(i), self._specs[it.name].nbytes
            begin = int(ends[own.start - 1]) if own.start else 0
            sparse = Sparse(data[begin : int(ends[own.stop - 1])], it.counts, sizes[own])
            fits = int(sparse.sizes.max()) <= chunk_room(nbytes, sparse.sizes.size)
            if fits and not wrong[own].any() and is_clear(self._specs[it.name], sparse):
                yield it.name, (self._entry(it), Stored(SPARSE, sparse.data, sparse))


def _batches(items: Sequence[_T], takes: Callable[[_T], int]) -> Iterator[list[_T]]:
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


def _encoding(group: _Group, image: int, counts: Numbers, most: int) -> Callable[[], _Encoded | None]:
    """Start encoding a group; what is returned waits for it. It gives None if the device has no memory."""
    import torch

    try:
        steps = _encoded(group, image, counts, most)
        next(steps)
    except torch.OutOfMemoryError:
        return lambda: None

    def wait() -> _Encoded | None:
        try:
            return next(steps)
        except torch.OutOfMemoryError:
            return None

    return wait


def _encoded(group: _Group, image: int, counts: Numbers, most: int) -> Iterator[_Encoded | None]:
    """Start encoding a group and give None, then the result."""
    import torch

    from tpde.cuda.delta import CHANGED, Lists

    device, total = group.device, int(counts.sum(dtype=np.uint64))
    room = (counts.astype(np.uint64) * most + 3) // 4  # of each chunk, in units of 4 bytes
    _held, (changes, starts, places) = _send([counts, _starts(counts), _starts(room)], device)
    with current(device):
        out = _zeros(int(room.sum()) + 1, "<u4", device)
        sizes = _zeros(counts.size, "<u4", device)
        scratch = torch.empty(8 * total, dtype=torch.uint8, device=device)
        group.batch.encode(
            *group.arrays,
            image,
            Lists(changes, starts),
            places,
            scratch.data_ptr(),
            out.data_ptr(),
            sizes.data_ptr(),
            stream_of(group.device),
        )
        wait = _fetch(sizes)
    yield None
    with current(device):
        found: Numbers = wait().view("<u4")
        wrong = found == CHANGED
        found = np.where(wrong, np.uint32(0), found)
        data = torch.empty(int(found.sum(dtype=np.uint64)), dtype=torch.uint8, device=device)
        _used, (used, offsets) = _send([found, _starts(found)], device)
        group.batch.gather(out.data_ptr(), places, used, offsets, data.data_ptr(), stream_of(group.device))
        yield _Encoded(_fetch(data)(), found, wrong)


# ---- applying


class SparseChange(NamedTuple):
    """A resident tensor, and a sparse change of it."""

    entry: TensorEntry
    tensor: torch.Tensor


class _Surveyed(NamedTuple):
    """A batch of changes, and its tensors' fingerprints, faults and counts of classes, on their way."""

    members: list[SparseChange]
    group: _Group
    result: torch.Tensor
    work: torch.Tensor


class _Decoding(NamedTuple):
    """A batch of changes: what waits for its results, and what `write` takes."""

    members: list[SparseChange]
    group: _Group
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
    """

    def __init__(
        self,
        members: Sequence[SparseChange],
        model: Model,
        read: Callable[[Sequence[TensorEntry], Bytes], None],
    ) -> None:
        import torch

        from tpde.cuda.delta import model_image

        self._kind, self._device = kind_of(members[0].entry.spec), members[0].tensor.device
        self._held, (self._image,) = _send([model_image(model, encode=False)], self._device)
        self._read = read
        self._running: list[_Decoding] = []
        each_change, surveyed = 2 * (2 + self._kind[0]), list[_Surveyed]()
        with contextlib.suppress(torch.OutOfMemoryError):  # those that are left pass through the host
            for batch in _batches(_whole(members), lambda it: it[0].entry.size + each_change * it[1]):
                surveyed.append(
                    self._survey([it for it, _ in batch])
                )  # all at first: payloads are read meanwhile
        with contextlib.suppress(torch.OutOfMemoryError):
            for it in surveyed:
                self._running.append(self._decode(it))

    def _survey(self, batch: list[SparseChange]) -> _Surveyed:
        """Start to look at the tensors of some of them."""
        device, n = self._device, len(batch)
        group = _Group([(it.tensor, None) for it in batch], self._kind, device)
        group.batch.prepare("write")  # which may fail, and not between two writes
        with current(device):
            result = _zeros(36 * n, "u1", device)
            work = _zeros(4 * (MAX_CLASSES + 1) * group.batch.chunks, "u1", device)
            totals = work.data_ptr()
            group.batch.survey(*group.arrays, self._image, result.data_ptr(), totals, stream_of(device))
        return _Surveyed(batch, group, result, work)

    def _decode(self, it: _Surveyed) -> _Decoding:
        """Start decoding some of them."""
        import torch

        from tpde.cuda.delta import AHEAD, Changes, Lists

        device, batch, group = self._device, it.members, it.group
        counts, sizes = _records(batch)
        total, payload = int(counts.sum(dtype=np.uint64)), int(sizes.sum(dtype=np.uint64))
        arrays = counts, _starts(counts), _starts(sizes), sizes
        upload = _Upload([*(array.nbytes for array in arrays), payload + AHEAD], device)
        for i, array in enumerate(arrays):
            upload.place(i)[:] = array.view(np.uint8)
        data = upload.place(len(arrays))
        self._read_all([member.entry for member in batch], data[:payload])
        data[payload:] = 0
        with current(device):
            sent, (changes, starts, offsets, used, at) = upload.send()
            room = [torch.empty(b * total, dtype=torch.uint8, device=device) for b in (2, self._kind[0]) * 2]
            unsorted, found = (Changes(*(part.data_ptr() for part in pair)) for pair in (room[:2], room[2:]))
            sums, bad = it.result.data_ptr(), it.result.data_ptr() + 32 * len(batch)
            totals, good = it.work.data_ptr(), it.work.data_ptr() + 4 * MAX_CLASSES * group.batch.chunks
            lists, data_at, stream = Lists(changes, starts), (at, offsets, used), stream_of(device)
            group.batch.decode(
                *group.arrays, self._image, totals, lists, data_at, unsorted, good, bad, stream
            )
            group.batch.locate(*group.arrays, self._image, good, starts, unsorted, found, sums, bad, stream)
        return _Decoding(batch, group, _fetch(it.result), counts, lists, found, [sent, *room[2:]])

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
        cannot be.
        """
        found = {}
        for it in self._running:
            n, result = len(it.members), it.wait()
            rows = result[: 32 * n].view("<u8").reshape(-1, 4)
            prints, made = rows[:, :2], rows[:, :2] + rows[:, 2:]
            bad = result[32 * n :].view("<u4") != 0
            for i, member in enumerate(it.members):
                damaged = bool(bad[i]) or made[i].tobytes() != member.entry.target
                found[member.entry.name] = Decoded(prints[i].tobytes(), damaged)
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
                _sent, (changes,) = _send([counts], self._device)
                lists = lists._replace(counts=changes)
            with current(self._device):
                it.group.batch.write(*it.group.arrays, lists, it.changes, stream_of(self._device))
