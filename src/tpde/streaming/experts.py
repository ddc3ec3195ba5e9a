"""Fetching the experts that a router chose, through a cache of packed experts on the device.

An expert that is not there is copied to a place of the cache and decoded from there, as is one that is: a
miss costs one copy, a hit none. Two events keep a place safe, as in the ring: decoding waits for the copy,
and the next copy to the place for decoding.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol

from torch import Tensor

from tpde.errors import InvalidInput, UnsupportedDevice
from tpde.format.blob_header import align
from tpde.host.feed import Event, Ticket
from tpde.streaming.cuda_device import Device
from tpde.streaming.damage import Checks, DecodedPieces
from tpde.streaming.expert_cache import ExpertCache
from tpde.streaming.pieces import Piece, TensorPart, cut
from tpde.streaming.streamed_source import travelling
from tpde.streaming.trace import Trace
from tpde.weights.packed_tensor import PackedTensor
from tpde.weights.span import ChunkRange

_ALIGN = 256  # of pieces in a place


class FusedWeight(Protocol):
    """A weight of all experts of a module, and where it goes in a buffer: `tpde.nn.slot.Slot` is one.

    Attributes
    ----------
    packed : PackedTensor
        The weight; its first dimension counts experts.
    offset : int
        Of its first byte in the buffer.
    """

    packed: PackedTensor
    offset: int


def expert_ranges(slot: FusedWeight, number: int) -> list[ChunkRange]:
    """The chunks that hold an expert of a fused weight; offsets are in the buffer of the slot's group.

    Where chunks do not start anew with each expert, as in small tensors, those at the ends hold words of its
    neighbours too.
    """
    return [
        it._replace(offset=slot.offset + it.offset, stop=slot.offset + it.stop)
        for it in slot.packed.expert(number).chunks()
    ]


def expert_pieces(slots: Sequence[FusedWeight], number: int, piece: int) -> list[Piece]:
    """What is copied for an expert of some fused weights, in pieces of at most `piece` bytes."""
    parts = []
    for slot in slots:
        for it in expert_ranges(slot, number):
            if travelling(it.source):
                begin = it.source.header.chunk_range(it.first, it.first)[0]
                out = it.offset - begin * it.source.header.word_bytes
                parts.append(TensorPart(it.source, out, it.first, it.last))
    return cut(parts, piece, gap=0)  # between tensors of an expert lie those of others


def _room(pieces: Sequence[Piece]) -> list[int]:
    """Bytes that each of some pieces takes in a place."""
    return [align(it.extent.size, _ALIGN) for it in pieces]


def expert_room(slots: Sequence[FusedWeight], piece: int) -> int:
    """Bytes of a place of the cache for any expert of some fused weights of one module."""
    return max(sum(_room(expert_pieces(slots, number, piece))) for number in range(slots[0].packed.shape[0]))


class Expert(DecodedPieces):
    """One expert of a module: its pieces, where they go in a place, and what is not copied.

    Attributes
    ----------
    copied : list
        The events of the copies of its pieces to the place that it has.
    """

    def __init__(self, slots: Sequence[FusedWeight], number: int, device: Device, piece: int) -> None:
        super().__init__(device, expert_pieces(slots, number, piece))
        rooms = _room(self.pieces)
        self.offsets = [sum(rooms[:i]) for i in range(len(rooms))]
        self.room = sum(rooms)
        self.copied: list[Event] = []
        ranges = [it for slot in slots for it in expert_ranges(slot, number)]
        self.rest: list[Callable[[Tensor], None]] = [
            it.source.chunks(it.first, it.last, it.offset) for it in ranges if not it.source.travels
        ]


class ExpertStore:
    """The packed experts of one device: a cache of places in its memory, and copies to them.

    Parameters
    ----------
    device : Device
        Where to.
    start, size : int
        The cache's bytes in the memory in which the device copies to places.
    room : int
        Bytes of a place: the largest `expert_room` of all modules.
    piece : int
        Bytes of a copy, at most.

    Raises
    ------
    InvalidInput
        If there is not room for one place.

    Attributes
    ----------
    cache : ExpertCache of Expert
        What is where.
    copied_bytes : int
        So far.
    """

    def __init__(self, device: Device, start: int, size: int, room: int, piece: int) -> None:
        self._room = align(room, _ALIGN)
        if size < self._room or start % _ALIGN:
            raise InvalidInput(
                f"a cache of {size} bytes from byte {start} on holds no expert of {self._room} bytes, which "
                f"start at multiples of {_ALIGN}"
            )
        self.device, self.copied_bytes, self._piece = device, 0, piece
        self.cache: ExpertCache[Expert] = ExpertCache(size // self._room)
        self._start = start
        self._lock = threading.RLock()
        self._checks = Checks(device)
        self._freed: dict[int, Event] = {}  # by place, when it may be written again
        self._asked: deque[Ticket] = deque()  # not yet waited for

    def module(self, slots: Sequence[FusedWeight]) -> ModuleExperts:
        """The experts of a module with these fused weights, for `tpde.nn.route_experts`."""
        return ModuleExperts(self, slots)

    def stats(self) -> dict[str, int]:
        """What was wanted, and copied, so far."""
        return {
            "expert_hits": self.cache.hits,
            "expert_misses": self.cache.misses,
            "expert_bytes": self.copied_bytes,
        }

    def record(self, trace: Trace | None) -> None:
        """Note what happens from now on: see `Streamer.record`."""
        with self._lock:
            self.device.trace = trace

    def check(self) -> None:
        """Wait for the device, and make sure that what was decoded so far was sound: see `Streamer.check`.

        Raises
        ------
        Corrupt
            Naming tensor and chunk.
        """
        with self._lock:
            self._checks.settle()

    def expert(self, slots: Sequence[FusedWeight], number: int) -> Expert:
        """One expert of a module, prepared to be fetched.

        Raises
        ------
        InvalidInput
            If it is larger than a place.
        """
        made = Expert(slots, number, self.device, self._piece)
        if made.room > self._room:
            raise InvalidInput(
                f"expert {number} of `{slots[0].packed.name}` takes {made.room} bytes, a place of the "
                f"cache has {self._room}",
                hint="make the cache for all modules",
            )
        return made

    def fetch(self, module: ModuleExperts, experts: Sequence[Expert], out: Tensor) -> None:
        """Decode experts of a module into a buffer, on the current stream.

        Raises
        ------
        Corrupt
            Naming tensor and chunk. At an expert's first use damage is reported at once, later when it is
            used next, or by `check`, since waiting would cost time.
        UnsupportedDevice
            While a CUDA graph is recorded.
        """
        with self._lock:
            if self.device.recording():
                raise UnsupportedDevice(
                    "routed experts were wanted while a CUDA graph was recorded, which cannot choose them",
                    hint="run without CUDA graphs, or load the model with more `vram`",
                )
            try:
                self._checks.begin(experts)
                self.cache.turn(module, len(experts))
                self._fetch(experts, out)
                self._checks.end(experts)
            except BaseException:
                self._forget()
                raise

    def _fetch(self, experts: Sequence[Expert], out: Tensor) -> None:
        here: list[tuple[Expert, int]] = []
        missing: deque[Expert] = deque()
        for it in experts:
            place = self.cache.lookup(it) if it.pieces else None
            if place is not None:
                here.append((it, place))
            elif it.pieces:
                missing.append(it)
                for piece in it.pieces:
                    self._asked.append(piece.feed.request(piece.extent))
        flying: deque[tuple[Expert, int]] = deque()
        self._copy(missing, flying)
        for it, place in here:
            self._decode(it, place, out)
        while missing or flying:  # with nothing held any more, there is a place for the next
            self._copy(missing, flying)
            self._decode(*flying.popleft(), out)
        for it in experts:
            for decode in it.rest:
                decode(out)

    def _copy(self, missing: deque[Expert], flying: deque[tuple[Expert, int]]) -> None:
        """Copy the next experts, as many as have places."""
        while missing:
            place = self.cache.insert(missing[0])
            if place is None:
                break
            it, at = missing.popleft(), self._start + place * self._room
            freed = self._freed.pop(place, None)
            if freed is not None:
                self.device.hold(freed)
            it.copied = []
            for piece, offset in zip(it.pieces, it.offsets, strict=True):
                ticket = self._asked[0]
                it.copied.append(self.device.copy(at + offset, ticket.wait(), piece))
                ticket.copied(it.copied[-1])
                self._asked.popleft()  # whatever fails before, `_forget` gives its bytes back to the feed
                self.copied_bytes += piece.extent.size
            flying.append((it, place))

    def _decode(self, it: Expert, place: int, out: Tensor) -> None:
        at = self._start + place * self._room
        for number, (offset, copied) in enumerate(zip(it.offsets, it.copied, strict=True)):
            self._freed[place] = self.device.decode(it.handle, number, at + offset, out, copied)
        self.cache.release(it)

    def _forget(self) -> None:
        """After a failure: wait for what was queued, and start anew."""
        try:
            self.device.wait()
            self._freed.clear()  # else places are still waited for
        finally:  # Ctrl-C again, meanwhile: the next fetch must not take these requests for its own
            while self._asked:
                self._asked.popleft().cancel()
            self.cache.clear()


class ModuleExperts:
    """The experts of one module: what `tpde.nn` asks for those that are routed to.

    Parameters
    ----------
    store : ExpertStore
        Of the module's device.
    slots : sequence of FusedWeight
        Its fused weights.
    """

    def __init__(self, store: ExpertStore, slots: Sequence[FusedWeight]) -> None:
        self._store, self._slots = store, list(slots)
        self._experts: dict[int, Expert] = {}
        self._offsets: list[int] = []

    def fetch(self, numbers: Sequence[int], out: Tensor) -> None:
        """Decode these experts of all weights to their places: see `tpde.nn.ExpertSource`.

        Raises
        ------
        ReadError
            If the weights were closed.
        """
        with ExitStack() as opened:
            for slot in self._slots:
                opened.enter_context(slot.packed.opened())
            self._fetch(numbers, out)

    def _fetch(self, numbers: Sequence[int], out: Tensor) -> None:
        offsets = [slot.offset for slot in self._slots]
        if offsets != self._offsets:  # others since `finish` was called again
            self._experts.clear()
            self._offsets = offsets
        for number in numbers:
            if number not in self._experts:
                self._experts[number] = self._store.expert(self._slots, number)
        self._store.fetch(self, [self._experts[number] for number in numbers], out)
