"""Deltas made on a GPU, of tensors that lie there in both states: what has not changed, or sparsely.

Everything else passes through the CPU, as do tensors that are not contiguous, and those that the device has
no memory for; the bytes are the same.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tpde.codec.delta import ChangeModel, Sparse, chunk_room
from tpde.codec.native import Bytes
from tpde.format.container import TensorSpec
from tpde.format.delta_head import SAME, SPARSE, TensorEntry
from tpde.frameworks import on_device, stream_of
from tpde.store import device_copies as gpu
from tpde.store.comparer import Comparer, Kind, Wanted, kind_of
from tpde.store.device_copies import HostArray
from tpde.store.device_deltas import DeviceGroup, batches, by
from tpde.store.payloads import TensorPayload, is_clear
from tpde.store.states import Key

if TYPE_CHECKING:
    import torch

# One word in so many may have changed of what is encoded here: with more, changes are seldom `is_clear`.
_FEW = 8
_AHEAD = 3  # batches on the device


class _Prints:
    """Fingerprints, how many words of each chunk differ, and whether targets vary: on their way."""

    def __init__(self, group: DeviceGroup) -> None:
        self._group = group  # whose arrays the launch reads
        n = len(group.firsts) - 1
        sizes = 32 * n, 4 * group.batch.chunks, 4 * n
        self._ends = np.cumsum(sizes)
        with on_device(group.device):
            made = gpu.zeros(int(self._ends[-1]), "u1", group.device)
            sums = made.data_ptr()
            counts, varied = sums + int(self._ends[0]), sums + int(self._ends[1])
            group.batch.prints(*group.arrays, sums, counts, varied, stream_of(group.device))
            self._wait = gpu.fetch(made)

    def wait(self) -> tuple[list[tuple[bytes, bytes]], HostArray, HostArray]:
        """Both fingerprints of each tensor, changes of each chunk, and which targets vary."""
        sums, counts, varied = np.split(self._wait(), self._ends[:2])
        pairs = [(row[:2].tobytes(), row[2:].tobytes()) for row in sums.view("<u8").reshape(-1, 4)]
        return pairs, counts.view("<u4"), varied.view("<u4") != 0


class _Compared(NamedTuple):
    """A tensor of a group: its changes in all chunks, fingerprints, and whether its target varies."""

    name: str
    counts: HostArray
    changes: int
    base: bytes
    target: bytes
    varied: bool


class _Encoded(NamedTuple):
    """The bytes of all chunks of a group, how many each has, which have changed meanwhile, and checks."""

    data: Bytes
    sizes: HostArray
    wrong: HostArray
    checks: HostArray


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
        self._found: dict[str, tuple[TensorEntry, TensorPayload] | None] = {}
        self._coming: Iterator[tuple[str, tuple[TensorEntry, TensorPayload]]] | None = None

    def _place(self, name: str) -> tuple[torch.device, Kind]:
        return self._pairs[name][0].device, kind_of(self._specs[name])

    @functools.cached_property
    def _running(self) -> list[tuple[list[str], DeviceGroup, _Prints]]:
        """All resident tensors, which are being compared from the first use on."""
        import torch

        running = []
        for (device, kind), names in by(sorted(self._pairs), self._place).items():  # as they are asked for
            with contextlib.suppress(torch.OutOfMemoryError):
                group = DeviceGroup([self._pairs[name] for name in names], kind, device)
                running.append((names, group, _Prints(group)))
        return running

    def chunks(self, wanted: Sequence[Wanted]) -> list[tuple[Bytes, Bytes]]:
        """Some chunks' bytes of tensors in both states."""
        import torch

        found: dict[int, list[tuple[Bytes, Bytes]]] = {}
        copies = []
        resident = [(i, it) for i, it in enumerate(wanted) if it.key[1] in self._pairs]
        for device, mine in by(resident, lambda it: self._place(it[1].key[1])[0]).items():
            pairs = [(i, it.ranges, tuple(map(gpu.flat, self._pairs[it.key[1]]))) for i, it in mine]
            with contextlib.suppress(torch.OutOfMemoryError), on_device(device):
                both = [torch.cat([one[n][a:b] for _, rs, one in pairs for a, b in rs]) for n in (0, 1)]
                copies.append((pairs, [gpu.fetch(it) for it in both]))
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

    def compare(
        self, key: Key, base: Key | None, models: Mapping[Kind, ChangeModel]
    ) -> tuple[TensorEntry, TensorPayload]:
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
        self, names: list[str], group: DeviceGroup, running: _Prints, models: Mapping[Kind, ChangeModel]
    ) -> Iterator[tuple[str, tuple[TensorEntry, TensorPayload]]]:
        """Those that are the same, or whose sparse changes are clearly the best."""
        prints, counts, varied = running.wait()
        changes, few = np.add.reduceat(counts, group.firsts[:-1], dtype=np.uint64).tolist(), []
        for i, name in enumerate(names):
            it = _Compared(name, counts[group.chunks_of(i)], changes[i], *prints[i], bool(varied[i]))
            if not it.changes:
                yield name, (self._entry(it), TensorPayload(SAME, np.zeros(0, np.uint8)))
            elif (
                group.kind[1] and it.varied and it.changes * _FEW * group.kind[0] <= self._specs[name].nbytes
            ):
                few.append(it)
        if few:
            yield from self._encode(group, few, models[group.kind])

    def _entry(self, it: _Compared) -> TensorEntry:
        return TensorEntry(it.name, self._specs[it.name], SAME, base=it.base, target=it.target)

    def _encode(
        self, group: DeviceGroup, members: list[_Compared], model: ChangeModel
    ) -> Iterator[tuple[str, tuple[TensorEntry, TensorPayload]]]:
        import torch

        from tpde.cuda.delta_kernels import model_image, most_bytes

        most = most_bytes(group.kind[0])
        try:
            _held, (image,) = gpu.send([model_image(model, encode=True)], group.device)
        except torch.OutOfMemoryError:
            return
        running: collections.deque[tuple[list[_Compared], DeviceGroup, Callable[[], _Encoded | None]]]
        running = collections.deque()
        # Several at a time: while one's bytes are taken, the device encodes the next.
        for batch in batches(members, lambda it: _AHEAD * (8 + most) * it.changes):
            with contextlib.suppress(torch.OutOfMemoryError):
                part = DeviceGroup([self._pairs[it.name] for it in batch], group.kind, group.device)
                counts = np.concatenate([it.counts for it in batch])
                running.append((batch, part, _encoding(part, image, counts, most)))
            if len(running) == _AHEAD:
                yield from self._stored(*running.popleft())
        for it in running:
            yield from self._stored(*it)

    def _stored(
        self, batch: list[_Compared], group: DeviceGroup, wait: Callable[[], _Encoded | None]
    ) -> Iterator[tuple[str, tuple[TensorEntry, TensorPayload]]]:
        made = wait()
        if made is None:
            return  # these pass through the host
        data, sizes, wrong, checks = made
        ends = np.cumsum(sizes, dtype=np.uint64)
        for i, it in enumerate(batch):
            own, nbytes = group.chunks_of(i), self._specs[it.name].nbytes
            begin = int(ends[own.start - 1]) if own.start else 0
            sparse = Sparse(data[begin : int(ends[own.stop - 1])], it.counts, sizes[own], int(checks[i]))
            fits = int(sparse.sizes.max()) <= chunk_room(nbytes, sparse.sizes.size)
            if fits and not wrong[own].any() and is_clear(self._specs[it.name], sparse):
                yield it.name, (self._entry(it), TensorPayload(SPARSE, sparse.data, sparse))


def _encoding(group: DeviceGroup, image: int, counts: HostArray, most: int) -> Callable[[], _Encoded | None]:
    """Start encoding a group; what is returned waits for it, and gives None if the device has no memory."""
    import torch

    steps = _encoded(group, image, counts, most)
    next(steps)

    def wait() -> _Encoded | None:
        try:
            return next(steps)
        except torch.OutOfMemoryError:
            return None

    return wait


def _encoded(group: DeviceGroup, image: int, counts: HostArray, most: int) -> Iterator[_Encoded | None]:
    """Start encoding a group and give None, then the result."""
    import torch

    from tpde.cuda.delta_kernels import CHANGED, Lists

    device, total = group.device, int(counts.sum(dtype=np.uint64))
    room = (counts.astype(np.uint64) * most + 3) // 4  # of each chunk, in units of 4 bytes
    _held, (changes, starts, places) = gpu.send([counts, gpu.starts(counts), gpu.starts(room)], device)
    with on_device(device):
        out = gpu.zeros(int(room.sum()) + 1, "<u4", device)
        checks = 8 * (len(group.firsts) - 1)
        made = gpu.zeros(checks + 4 * counts.size, "u1", device)
        scratch = torch.empty(8 * total, dtype=torch.uint8, device=device)
        group.batch.encode(
            *group.arrays,
            image,
            Lists(changes, starts),
            places,
            scratch.data_ptr(),
            out.data_ptr(),
            made.data_ptr() + checks,
            made.data_ptr(),
            stream_of(device),
        )
        wait, encoded = gpu.fetch(made), gpu.mark(device)
    yield None
    # Beside what is encoded next, which would be waited for otherwise.
    with on_device(device), gpu.beside(device, encoded):
        result = wait()
        found: HostArray = result[checks:].view("<u4")
        wrong = found == CHANGED
        found = np.where(wrong, np.uint32(0), found)
        data = torch.empty(int(found.sum(dtype=np.uint64)), dtype=torch.uint8, device=device)
        _used, (used, offsets) = gpu.send([found, gpu.starts(found)], device)
        stream = stream_of(device)
        group.batch.gather(out.data_ptr(), places, used, offsets, data.data_ptr(), stream)
        gathered = gpu.fetch(data)()
    yield _Encoded(gathered, found, wrong, result[:checks].view("<u8"))
