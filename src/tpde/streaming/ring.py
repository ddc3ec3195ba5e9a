"""Streaming: pieces of packed tensors travel through a ring on the device ahead of what decodes them.

A piece is *requested* of its supply, *copied* to a place of the ring, and *decoded* from there to the buffer
of the unit that asks for it. Copies run as far ahead as the ring has places: in the order in which units were
wanted before, and when another unit is wanted, from that one on. Two events keep a place safe: decoding waits
for the end of the copy, and the next copy to the place for the end of decoding. Where memory is left over,
some pieces stay there, and are copied once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, Protocol

from torch import Tensor

from tpde.errors import PackedWeight, ReadError, UnsupportedDevice
from tpde.host.feed import Event, Ticket
from tpde.streaming.cuda_device import Device
from tpde.streaming.damage import Checks, Decoded
from tpde.streaming.pieces import Part, Piece, cut
from tpde.streaming.prefetch import Order
from tpde.streaming.retained import Kept
from tpde.streaming.streamed_source import Streamed, travelling
from tpde.streaming.trace import Trace
from tpde.weights.decoder import Materializer
from tpde.weights.source import Source, Watched

_MOST_PLANNED = 1024  # pieces: where only a few of a model's come from a disk, looking on would end nowhere


class Closing(Protocol):
    """What a streamer takes over: a supply, a file."""

    def close(self) -> None:
        """Give it back."""


class Unit(Decoded):
    """Tensors, or some chunks of one, that are wanted together: calling it decodes them into a buffer.

    Parameters
    ----------
    streamer : Streamer
        What brings them.
    pieces : sequence of Piece
        Their bytes.
    rest : callable, optional
        What decodes those that have no chunks.
    """

    def __init__(
        self, streamer: Streamer, pieces: Sequence[Piece], rest: Callable[[Tensor], None] | None = None
    ) -> None:
        super().__init__(streamer.device, pieces)
        self.rest, self._streamer = rest, streamer

    def __call__(self, out: Tensor) -> None:
        """Decode into a buffer of bytes, on the current stream.

        Raises
        ------
        Corrupt
            Naming tensor and chunk. At a unit's first use damage is reported at once, later when the unit is
            used next, or by `Streamer.check`, since waiting would cost time.
        UnsupportedDevice
            While a CUDA graph is recorded.
        ReadError
            If the streamer was closed.
        """
        self._streamer.fill(self, out)


class _Step(NamedTuple):
    """A piece that was requested."""

    unit: Unit
    number: int
    ticket: Ticket
    ahead: int  # its bytes, if its supply wants to know ahead


class _Flight(NamedTuple):
    """A piece in the ring, or on its way there."""

    unit: Unit
    number: int
    place: int
    copied: Event


class Streamer:
    """Brings packed tensors to a device.

    Parameters
    ----------
    device : Device
        Where to.
    places : int
        Of the ring.
    room : int
        Bytes of a place; pieces are at most as large.
    kept : Kept, optional
        Room behind the ring, for pieces that stay.

    Attributes
    ----------
    prefetch : bool
        Whether copies run ahead of the unit that is wanted.
    owned : list
        What is closed with it, in this order.
    copied_bytes, copied_pieces, dropped_pieces : int
        What was copied so far, and how much of it in vain, another unit being wanted than was expected.
    """

    def __init__(self, device: Device, places: int, room: int, kept: Kept[Unit] | None = None) -> None:
        self.device, self.prefetch = device, True
        self.copied_bytes = self.copied_pieces = self.dropped_pieces = 0
        self._places, self._room = places, room
        self._ahead = 0  # bytes that supplies want to know ahead
        self._lock = threading.RLock()
        self._order: Order[Unit] = Order()
        self._kept: Kept[Unit] = kept or Kept(0, 0, 0)
        self._checks = Checks(device)
        self._used = self._closed = False
        self._chunks: dict[tuple[int, int, int, int], Unit] = {}
        self._planned: deque[_Step] = deque()
        self._reading = 0  # the sum of their `ahead`
        self._cursor: tuple[Unit, int] | None = None  # what was requested last
        self._flying: deque[_Flight] = deque()
        # Places with the event after which they may be written again.
        self._free: deque[tuple[int, Event | None]] = deque()
        self._empty()
        self.owned: list[Closing] = []

    def own(self, *things: Closing) -> None:
        """Take supplies and files over, to close them when the streamer is closed.

        In this order, and before those that it has.
        """
        self.owned[:0] = things

    def stats(self) -> dict[str, int]:
        """What was copied so far."""
        return {
            "copied_bytes": self.copied_bytes,
            "copied_pieces": self.copied_pieces,
            "dropped_pieces": self.dropped_pieces,
        }

    def record(self, trace: Trace | None) -> None:
        """Note what happens from now on; another thread may be in a forward pass.

        Parameters
        ----------
        trace : Trace or None
            Where to; None to note nothing.
        """
        with self._lock:  # what is being copied is noted as a whole, or not at all
            self.device.trace = trace

    def check(self) -> None:
        """Wait for the device, and make sure that all bytes that were decoded so far were sound.

        Raises
        ------
        Corrupt
            Naming tensor and chunk.
        """
        with self._lock:
            self._checks.settle()

    # ---- what is wanted ----

    def unit(self, items: Sequence[tuple[Source, int]]) -> Unit:
        """What decodes tensors, each at its byte offset, into a buffer."""
        rest = [(packed, out) for packed, out in items if not travelling(packed)]
        parts = [Part(it, out, 0, it.header.chunks - 1) for it, out in items if travelling(it)]
        if parts and not self._places:
            raise PackedWeight(
                f"`{parts[0].tensor.name}` stays on the host, and only rows of it are read under the VRAM "
                "budget",
                hint="load the model without `vram=` to read all of it",
                where=parts[0].tensor.name,
            )
        made = Unit(self, cut(parts, self._room), Materializer(rest, rest[0][0].device) if rest else None)
        if not self._used and made.pieces:
            self._order.expect(made)
        return made

    def chunks(self, packed: Streamed, first: int, last: int, offset: int) -> Unit:
        """What decodes chunks `first` to `last` of a tensor into a buffer, from byte `offset` on."""
        key = (id(packed), first, last, offset)
        if key not in self._chunks:
            begin = packed.header.chunk_range(first, last)[0] * packed.header.word_bytes
            pieces = cut([Part(packed, offset - begin, first, last)], self._room)
            made = self._chunks[key] = Unit(self, pieces)
            if not self._used:
                self._order.expect(made)
        return self._chunks[key]

    def require_open(self) -> None:
        """Refuse to use memory that was given back.

        Raises
        ------
        ReadError
            After `close`.
        """
        if self._closed:
            raise ReadError(
                "the streamed model was closed, and cannot be used any more", hint="load it again"
            )

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let bytes be read where they lie: `close` waits meanwhile, and then for what was queued.

        Raises
        ------
        ReadError
            After `close`.
        """
        with self._lock:
            self.require_open()
            yield

    def watch(self, reader: Watched) -> None:
        """Let `check` ask a reader, too: it reads bytes where they lie, without their being brought.

        Raises
        ------
        Corrupt
            What it has read before was damaged.
        """
        with self._lock:
            self._checks.begin([reader])

    # ---- filling a buffer ----

    def fill(self, unit: Unit, out: Tensor) -> None:
        """Decode a unit into a buffer, on the current stream: see `Unit`."""
        with self._lock:
            if self.device.recording():
                raise UnsupportedDevice(
                    "streamed weights were wanted while a CUDA graph was recorded, which cannot hold what "
                    "comes from files",
                    hint="run without CUDA graphs, or load the model with more `vram`",
                )
            self.require_open()
            self._used = True
            try:
                self._checks.begin([unit])
                self._fill(unit, out)
                self._checks.end([unit])
            except BaseException:
                self._forget()
                raise

    def _fill(self, unit: Unit, out: Tensor) -> None:
        if unit.rest is not None:
            unit.rest(out)
        if not unit.pieces:
            return
        self._seek(unit)
        self._order.saw(unit)
        for number in range(len(unit.pieces)):
            # In flight first: small models are read ahead more than once, and a piece may have come to stay
            # since its copy to the ring was queued.
            flies = bool(self._flying) and self._flying[0][:2] == (unit, number)
            stay = None if flies else self._kept.find(unit, number)
            if not flies and stay is None:
                self._plan(unit, number)
                self._launch()
                stay = self._kept.find(unit, number)
            if stay is None:
                flight = self._flying.popleft()
                freed = self.device.decode(unit.handle, number, flight.place, out, flight.copied)
                self._free.append((flight.place, freed))
            else:
                self.device.decode(unit.handle, number, stay.place, out, stay.copied)
            self._advance()

    # ---- running ahead ----

    def _seek(self, unit: Unit) -> None:
        """Make the first piece of a unit that has to be copied the next one; drop what was before it."""
        first = self._kept.missing(unit, len(unit.pieces))
        if first is None:
            return
        while self._flying and not (self._flying[0].unit is unit and self._flying[0].number == first):
            # Copies are done in order: the next one to this place need not wait for this one.
            self._free.append((self._flying.popleft().place, None))
            self.dropped_pieces += 1
        if not self._flying:
            while self._planned and not (self._planned[0].unit is unit and self._planned[0].number == first):
                self._cancel()
            self._plan(unit, first)

    def _plan(self, unit: Unit, number: int) -> None:
        """Make a piece the next one to be copied."""
        if not (self._planned and self._planned[0].unit is unit and self._planned[0].number == number):
            while self._planned:
                self._cancel()
            self._request(unit, number)

    def _skip(self) -> None:
        """Cancel what has come to stay since it was requested: small models are read ahead more than once."""
        while self._planned and self._kept.find(self._planned[0].unit, self._planned[0].number):
            self._cancel()

    def _request(self, unit: Unit, number: int) -> None:
        piece = unit.pieces[number]
        ahead = piece.extent.size if piece.supply.ahead else 0
        ticket = piece.supply.request(piece.extent)
        try:
            self._planned.append(_Step(unit, number, ticket, ahead))
        except BaseException:  # Ctrl-C: `_forget` does not know of it
            ticket.cancel()
            raise
        self._reading += ahead
        self._cursor = unit, number
        self._ahead = max(self._ahead, piece.supply.ahead)

    def _next(self) -> _Step:
        """Take the first of the pieces that were requested off their list."""
        step = self._planned.popleft()
        self._reading -= step.ahead
        return step

    def _cancel(self) -> None:
        """Give up the first of the pieces that were requested."""
        self._planned[0].ticket.cancel()
        self._next()  # after Ctrl-C before, `_forget` gives it up

    def _extend(self) -> bool:
        """Request the piece after the last one; False if nobody knows which."""
        if self._cursor is None:
            return False
        unit, number = self._cursor
        following = self._kept.missing(unit, len(unit.pieces), number + 1)
        if following is not None:
            self._request(unit, following)
            return True
        after = self._order.after(unit) if self.prefetch else None
        for _ in range(len(self._order)):  # past units that stay
            if after is None:
                break
            following = self._kept.missing(after, len(after.pieces))
            if following is not None:
                self._request(after, following)
                return True
            after = self._order.after(after)
        return False

    def _launch(self) -> None:
        """Copy the next piece, waiting for its supply."""
        step = self._planned[0]
        piece = step.unit.pieces[step.number]
        if self.device.trace is None or step.ticket.ready():
            address = step.ticket.wait()
        else:
            begin = time.perf_counter_ns()
            address = step.ticket.wait()
            self.device.trace.wait(begin, time.perf_counter_ns(), piece.extent.name)
        stay = self._kept.take(piece)
        place, freed = self._free.popleft() if stay is None else (stay, None)
        if freed is not None:
            self.device.hold(freed)
        copied = self.device.copy(place, address, piece)
        step.ticket.copied(copied)
        self._next()  # whatever fails before, `_forget` gives its bytes back to the supply
        if stay is None:
            self._flying.append(_Flight(step.unit, step.number, place, copied))
        else:
            self._kept.put(step.unit, step.number, place, copied)
        self.copied_bytes += piece.extent.size
        self.copied_pieces += 1

    def _advance(self) -> None:
        """Copy as far ahead as there are places, without waiting for a supply."""
        while self._free:
            self._skip()
            if not (self._planned or self._extend()):
                break
            if not self._planned[0].ticket.ready():
                break
            self._launch()
        self._read_ahead()

    def _read_ahead(self) -> None:
        """Request as much as supplies want to know ahead."""
        while self._reading < self._ahead and len(self._planned) < _MOST_PLANNED and self._extend():
            pass

    def _forget(self) -> None:
        """After a failure: wait for what was queued, and start anew."""
        self.device.wait()
        while self._planned:
            self._cancel()
        self._empty()

    def _empty(self) -> None:
        self._flying.clear()
        self._kept.clear()
        self._reading = 0
        self._free = deque((i * self._room, None) for i in range(self._places))
        self._cursor = None

    def close(self) -> None:
        """Wait for copies, and give ring, host memory and files back. The model cannot be used any more."""
        with self._lock:
            self._closed = True
            try:
                self._forget()
            finally:  # a device that has crashed cannot be waited for, and copies nothing
                with ExitStack() as rest:  # all of them, whichever fails
                    rest.callback(self.device.close)
                    while self.owned:
                        rest.callback(self.owned.pop().close)  # first added, last closed
