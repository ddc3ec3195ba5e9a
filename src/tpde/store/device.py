"""Deltas between tensors on a GPU, made and applied there: what takes a sparse change or none.

Everything else passes through the CPU, as do tensors that are not contiguous; results are the same bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from tpde.codec.delta import CHUNK_WORDS, Model, Sparse, chunk_count, chunk_room
from tpde.codec.native import Bytes
from tpde.errors import CompileError, MissingDependency, UnsupportedDevice
from tpde.format.constants import DTYPES
from tpde.format.container import TensorSpec
from tpde.format.delta import SAME, SPARSE, TensorEntry
from tpde.store.diff import Comparer, Kind, kind_of
from tpde.store.payloads import Stored, is_clear
from tpde.store.states import Key

if TYPE_CHECKING:
    import torch

    from tpde.cuda.delta import Batch

_T = TypeVar("_T")
Numbers = np.ndarray[Any, Any]
"""Of any dtype."""

# One word in so many may have changed of what is encoded here: with more, changes are seldom `is_clear`.
_FEW = 8
# What a batch may take on the device beside its tensors, where it has more than one.
_ROOM = 256 << 20


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


def current(device: torch.device) -> AbstractContextManager[object]:
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


def _upload(data: Numbers, device: torch.device) -> torch.Tensor:
    import torch

    return torch.from_numpy(data.view(np.uint8)).to(device)


def _zeros(count: int, dtype: str, device: torch.device) -> torch.Tensor:
    """Numbers on the device. Never none of them, so that there is an address."""
    import torch

    return torch.zeros(max(count, 1) * np.dtype(dtype).itemsize, dtype=torch.uint8, device=device)


def _download(tensor: torch.Tensor, dtype: str) -> Numbers:
    data: Bytes = tensor.cpu().numpy()
    return data.view(dtype)


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
        self._arrays = _upload(self.batch.items, device), _upload(self.batch.whose, device)

    @property
    def arrays(self) -> tuple[int, int]:
        """Addresses of what every launch takes."""
        return self._arrays[0].data_ptr(), self._arrays[1].data_ptr()

    def chunks_of(self, number: int) -> slice:
        """The chunks of a tensor among those of the group."""
        return slice(int(self.firsts[number]), int(self.firsts[number + 1]))


class _Prints:
    """Fingerprints, how many words of each chunk differ, and whether targets vary: on their way."""

    def __init__(self, group: _Group) -> None:
        self._group = group  # whose arrays the launch reads
        n = len(group.firsts) - 1
        with current(group.device):
            self._sums = _zeros(4 * n, "<u8", group.device)
            self._counts = _zeros(group.batch.chunks, "<u4", group.device)
            self._varied = _zeros(n, "<u4", group.device)
            sums, counts, varied = (it.data_ptr() for it in (self._sums, self._counts, self._varied))
            group.batch.prints(*group.arrays, sums, counts, varied, stream_of(group.device))

    def wait(self) -> tuple[list[tuple[bytes, bytes]], Numbers, Numbers]:
        """Both fingerprints of each tensor, changes of each chunk, and which targets vary."""
        sums = _download(self._sums, "<u8").reshape(-1, 4)
        pairs = [(row[:2].tobytes(), row[2:].tobytes()) for row in sums]
        return pairs, _download(self._counts, "<u4"), _download(self._varied, "<u4") != 0


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Fingerprints of resident tensors, by name (delta.md 4)."""
    found: dict[str, bytes] = {}
    for device, names in _by(tensors, lambda name: tensors[name].device).items():
        # Bytes have no kind of words: one launch takes all.
        prints, _, _ = _Prints(_Group([(tensors[name], None) for name in names], (1, 0), device)).wait()
        found.update(zip(names, (base for base, _ in prints), strict=True))
    return found


# ---- making


class _Compared(NamedTuple):
    """A tensor of a group: its changes in all chunks, fingerprints, and whether its target varies."""

    name: str
    counts: Numbers
    base: bytes
    target: bytes
    varied: bool


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
        self._running: list[tuple[list[str], _Group, _Prints]] = []
        self._found: dict[str, tuple[TensorEntry, Stored]] = {}
        for (device, kind), names in _by(pairs, self._place).items():
            group = _Group([pairs[name] for name in names], kind, device)
            self._running.append((names, group, _Prints(group)))

    def _place(self, name: str) -> tuple[torch.device, Kind]:
        return self._pairs[name][0].device, kind_of(self._specs[name])

    def chunks(self, base: Key, key: Key, ranges: list[tuple[int, int]]) -> list[tuple[Bytes, Bytes]]:
        """Some chunks' bytes of a tensor in both states."""
        if key[1] not in self._pairs:
            return self._host.chunks(base, key, ranges)
        old, new = (_flat(it) for it in self._pairs[key[1]])
        return [(old[a:b].cpu().numpy(), new[a:b].cpu().numpy()) for a, b in ranges]

    def compare(self, key: Key, base: Key | None, models: Mapping[Kind, Model]) -> tuple[TensorEntry, Stored]:
        """How a tensor is stored. At the first one all that are resident are compared."""
        for running in self._running:
            self._found.update(self._compare(*running, models))
        self._running = []
        found = self._found.pop(key[1], None)
        return self._host.compare(key, base, models) if found is None else found

    def _compare(
        self, names: list[str], group: _Group, running: _Prints, models: Mapping[Kind, Model]
    ) -> Iterator[tuple[str, tuple[TensorEntry, Stored]]]:
        """Those that are the same, or whose sparse changes are clearly the best."""
        prints, counts, varied = running.wait()
        few = []
        for i, name in enumerate(names):
            it = _Compared(name, counts[group.chunks_of(i)], *prints[i], bool(varied[i]))
            changes = int(it.counts.sum(dtype=np.uint64))
            if not changes:
                yield name, (self._entry(it), Stored(SAME, np.zeros(0, np.uint8)))
            elif group.kind[1] and it.varied and changes * _FEW * group.kind[0] <= self._specs[name].nbytes:
                few.append(it)
        if few:
            yield from self._encode(group, few, models[group.kind])

    def _entry(self, it: _Compared) -> TensorEntry:
        return TensorEntry(it.name, self._specs[it.name], SAME, base=it.base, target=it.target)

    def _encode(
        self, group: _Group, members: list[_Compared], model: Model
    ) -> Iterator[tuple[str, tuple[TensorEntry, Stored]]]:
        import torch

        from tpde.cuda.delta import model_image, most_bytes

        image, most = _upload(model_image(model, encode=True), group.device), most_bytes(group.kind[0])
        for batch in _batches(members, lambda it: (8 + most) * int(it.counts.sum())):
            part = _Group([self._pairs[it.name] for it in batch], group.kind, group.device)
            try:
                data, sizes, wrong = _encoded(part, image, np.concatenate([it.counts for it in batch]), most)
            except torch.OutOfMemoryError:
                continue  # these pass through the host
            ends = np.cumsum(sizes, dtype=np.uint64)
            for i, it in enumerate(batch):
                own, nbytes = part.chunks_of(i), self._specs[it.name].nbytes
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
        if batch and held + takes(it) > _ROOM:
            yield batch
            batch, held = [], 0
        batch.append(it)
        held += takes(it)
    if batch:
        yield batch


def _encoded(
    group: _Group, image: torch.Tensor, counts: Numbers, most: int
) -> tuple[Bytes, Numbers, Numbers]:
    """The bytes of all chunks of a group, how many each has, and which have changed meanwhile."""
    import torch

    from tpde.cuda.delta import CHANGED, Lists

    device, total = group.device, int(counts.sum(dtype=np.uint64))
    room = (counts.astype(np.uint64) * most + 3) // 4  # of each chunk, in units of 4 bytes
    changes, starts, places = (_upload(it, device) for it in (counts, _starts(counts), _starts(room)))
    with current(device):
        out = _zeros(int(room.sum()) + 1, "<u4", device)
        sizes = _zeros(counts.size, "<u4", device)
        scratch = torch.empty(8 * total, dtype=torch.uint8, device=device)
        group.batch.encode(
            *group.arrays,
            image.data_ptr(),
            Lists(changes.data_ptr(), starts.data_ptr()),
            places.data_ptr(),
            scratch.data_ptr(),
            out.data_ptr(),
            sizes.data_ptr(),
            stream_of(group.device),
        )
        found = _download(sizes, "<u4")
        wrong = found == CHANGED
        found = np.where(wrong, np.uint32(0), found)
        data = torch.empty(int(found.sum(dtype=np.uint64)), dtype=torch.uint8, device=device)
        used, offsets = _upload(found, device), _upload(_starts(found), device)
        where = out.data_ptr(), places.data_ptr(), used.data_ptr(), offsets.data_ptr()
        group.batch.gather(*where, data.data_ptr(), stream_of(group.device))
        return data.cpu().numpy(), found, wrong


# ---- applying


class SparseChange(NamedTuple):
    """A resident tensor that is the base of a sparse change, and the change."""

    entry: TensorEntry
    tensor: torch.Tensor
    data: Bytes


def _is_whole(it: SparseChange) -> bool:
    """Whether the records of a change's chunks can be: the kernels rely on it."""
    counts, sizes, b = it.entry.changes, it.entry.sizes, DTYPES[it.entry.spec.dtype].word_bytes
    words = np.full(counts.size, CHUNK_WORDS)
    words[-1:] = it.entry.spec.nbytes // b - CHUNK_WORDS * (counts.size - 1)
    return bool(
        int(sizes.sum(dtype=np.uint64)) == it.data.size
        and (counts <= words).all()
        and not sizes[counts == 0].any()
    )


class SparseChanges:
    """Sparse changes of resident tensors on one device, under one model: decoded, and not written yet.

    Parameters
    ----------
    members : sequence of SparseChange
        The changes. The tensors are the bases that these were made from.
    model : Model
        Which they are under.

    Attributes
    ----------
    members : list of SparseChange
        Those that are decoded, for which the device had memory.
    damaged : tuple of SparseChange
        Those that cannot be, or whose targets have another fingerprint than was written. If there are any,
        nothing may be written.
    """

    def __init__(self, members: Sequence[SparseChange], model: Model) -> None:
        import torch

        from tpde.cuda.delta import model_image

        self.members: list[SparseChange] = []
        self._kind, self._device = kind_of(members[0].entry.spec), members[0].tensor.device
        self._ready: list[tuple[_Group, list[torch.Tensor]]] = []
        image = _upload(model_image(model, encode=False), self._device)
        whole, damaged, each = list[SparseChange](), list[SparseChange](), 2 * (2 + self._kind[0])
        for it in members:
            (whole if _is_whole(it) else damaged).append(it)
        for batch in _batches(whole, lambda it: it.data.size + each * int(it.entry.changes.sum())):
            try:
                damaged += self._decode(batch, image)
            except torch.OutOfMemoryError:
                continue  # these pass through the host
            self.members += batch
        self.damaged = tuple(damaged)

    def _decode(self, batch: list[SparseChange], image: torch.Tensor) -> list[SparseChange]:
        """Decode some of them; returns those that are damaged."""
        import torch

        from tpde.cuda.delta import AHEAD, Found, Lists

        device = self._device
        group = _Group([(it.tensor, None) for it in batch], self._kind, device)
        group.batch.prepare("write")  # which may fail, and not between two writes
        counts = np.concatenate([it.entry.changes for it in batch])
        sizes = np.concatenate([it.entry.sizes for it in batch])
        data = np.concatenate([*(it.data for it in batch), np.zeros(AHEAD, np.uint8)])
        total, n = int(counts.sum(dtype=np.uint64)), len(batch)
        kept = [_upload(it, device) for it in (counts, _starts(counts))]
        read = [_upload(it, device) for it in (data, _starts(sizes), sizes)]
        lists = Lists(*(it.data_ptr() for it in kept))
        with current(device):
            room = [
                torch.empty(size * total, dtype=torch.uint8, device=device) for size in (2, self._kind[0]) * 2
            ]
            unsorted, found = (Found(*(it.data_ptr() for it in pair)) for pair in (room[:2], room[2:]))
            sums, bad = _zeros(4 * n, "<u8", device), torch.full((n,), -1, dtype=torch.int32, device=device)
            group.batch.decode(
                *group.arrays,
                image.data_ptr(),
                lists,
                (read[0].data_ptr(), read[1].data_ptr(), read[2].data_ptr()),
                unsorted,
                found,
                sums.data_ptr(),
                bad.data_ptr(),
                stream_of(group.device),
            )
        self._ready.append((group, [*kept, *room[2:]]))
        added = _download(sums, "<u8").reshape(-1, 4)[:, 2:]
        wrong = _download(bad, "<u4") != np.uint32(0xFFFFFFFF)
        for i, it in enumerate(batch):
            wrong[i] |= (np.frombuffer(it.entry.base, "<u8") + added[i]).tobytes() != it.entry.target
        return [it for it, is_wrong in zip(batch, wrong, strict=True) if is_wrong]

    def write(self) -> None:
        """Write all changes where the tensors lie; PyTorch counts each as a change in place."""
        import torch

        from tpde.cuda.delta import Found, Lists

        for it in self.members:  # first: one that is too much does no harm
            if not it.tensor.is_inference():
                torch.autograd.graph.increment_version(it.tensor)
        for group, (counts, starts, positions, words) in self._ready:
            with current(self._device):
                group.batch.write(
                    *group.arrays,
                    Lists(counts.data_ptr(), starts.data_ptr()),
                    Found(positions.data_ptr(), words.data_ptr()),
                    stream_of(group.device),
                )
