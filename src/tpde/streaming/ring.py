"""The ring: pieces of packed tensors travel through places on the device ahead of what decodes them.

A piece is *requested* of its feed, *copied* to a place of the ring, and *decoded* from there to the buffer
of the unit that asks for it. Copies run as far ahead as the ring has places: in the order in which units were
wanted before, and when another unit is wanted, from that one on. Two events keep a place safe: decoding waits
for the end of the copy, and the next copy to the place for the end of decoding. Where memory is left over,
some pieces stay there, and are copied once.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from torch import Tensor

from tpde.host.feed import Event, Ticket
from tpde.streaming.cuda_device import Device
from tpde.streaming.damage import DecodedPieces
from tpde.streaming.prefetch import PrefetchOrder
from tpde.streaming.retained import Retained

_MOST_PLANNED = 1024  # pieces: where only a few of a model's come from a disk, looking on would end nowhere


class _Step(NamedTuple):
    """A piece that was requested."""

    unit: DecodedPieces
    number: int
    ticket: Ticket
    ahead: int  # its bytes, if its feed wants to know ahead


class _Flight(NamedTuple):
    """A piece in the ring, or on its way there."""

    unit: DecodedPieces
    number: int
    place: int
    copied: Event


class Ring:
    """Places on a device, and copies to them. Not safe for threads: its owner has a lock.

    Parameters
    ----------
    device : Device
        Where they are.
    places : int
        How many.
    room : int
        Bytes of a place; pieces are at most as large.
    retained : Retained, optional
        Room behind the ring, for pieces that stay; by default none.

    Attributes
    ----------
    retained : Retained
        The same.
    prefetch : bool
        Whether copies run ahead of the unit that is wanted.
    copied_bytes, copied_pieces, dropped_pieces : int
        What was copied so far, and how much of it in vain, another unit being wanted than was expected.
    """

    def __init__(
        self, device: Device, places: int, room: int, retained: Retained[DecodedPieces] | None = None
    ) -> None:
        self.device, self.places, self.room, self.prefetch = device, places, room, True
        self.copied_bytes = self.copied_pieces = self.dropped_pieces = 0
        self._ahead = 0  # bytes that feeds want to know ahead
        self.retained: Retained[DecodedPieces] = retained or Retained(0, 0, 0)
        self._order: PrefetchOrder[DecodedPieces] = PrefetchOrder()
        self._planned: deque[_Step] = deque()
        self._reading = 0  # the sum of their `ahead`
        self._cursor: tuple[DecodedPieces, int] | None = None  # what was requested last
        self._flying: deque[_Flight] = deque()
        # Places with the event after which they may be written again.
        self._free: deque[tuple[int, Event | None]] = deque()
        self._unfinished = False  # decoding or forgetting was begun, and did not end
        self._empty()

    def stats(self) -> dict[str, int]:
        """What was copied so far."""
        return {
            "copied_bytes": self.copied_bytes,
            "copied_pieces": self.copied_pieces,
            "dropped_pieces": self.dropped_pieces,
        }

    def expect(self, unit: DecodedPieces) -> None:
        """Name a unit that will be wanted after all that were named before: until one is."""
        self._order.expect(unit)

    def decode(self, unit: DecodedPieces, out: Tensor) -> None:
        """Bring a unit's pieces, and queue their decoding into a buffer, on the current stream."""
        if not unit.pieces:
            return
        if self._unfinished:  # Ctrl-C again, while `forget` was at it
            self.forget()
        self._unfinished = True
        self._seek(unit)
        self._order.saw(unit)
        for number in range(len(unit.pieces)):
            # In flight first: small models are read ahead more than once, and a piece may have come to stay
            # since its copy to the ring was queued.
            flies = bool(self._flying) and self._flying[0][:2] == (unit, number)
            stay = None if flies else self.retained.find(unit, number)
            if not flies and stay is None:
                self._plan(unit, number)
                self._launch()
                stay = self.retained.find(unit, number)
            if stay is None:
                flight = self._flying.popleft()
                freed = self.device.decode(unit.handle, number, flight.place, out, flight.copied)
                self._free.append((flight.place, freed))
            else:
                self.device.decode(unit.handle, number, stay.place, out, stay.copied)
            self._advance()
        self._unfinished = False

    # ---- running ahead ----

    def _seek(self, unit: DecodedPieces) -> None:
        """Make the first piece of a unit that has to be copied the next one; drop what was before it."""
        first = self.retained.missing(unit, len(unit.pieces))
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

    def _plan(self, unit: DecodedPieces, number: int) -> None:
        """Make a piece the next one to be copied."""
        if not (self._planned and self._planned[0].unit is unit and self._planned[0].number == number):
            while self._planned:
                self._cancel()
            self._request(unit, number)

    def _skip(self) -> None:
        """Cancel what has come to stay since it was requested: small models are read ahead more than once."""
        while self._planned and self.retained.find(self._planned[0].unit, self._planned[0].number):
            self._cancel()

    def _request(self, unit: DecodedPieces, number: int) -> None:
        piece = unit.pieces[number]
        ahead = piece.extent.size if piece.feed.ahead else 0
        ticket = piece.feed.request(piece.extent)
        try:
            self._planned.append(_Step(unit, number, ticket, ahead))
        except BaseException:  # Ctrl-C: `forget` does not know of it
            ticket.cancel()
            raise
        self._reading += ahead
        self._cursor = unit, number
        self._ahead = max(self._ahead, piece.feed.ahead)

    def _next(self) -> _Step:
        """Take the first of the pieces that were requested off their list."""
        step = self._planned.popleft()
        self._reading -= step.ahead
        return step

    def _cancel(self) -> None:
        """Give up the first of the pieces that were requested."""
        self._planned[0].ticket.cancel()
        self._next()  # after Ctrl-C before, `forget` gives it up

    def _extend(self) -> bool:
        """Request the piece after the last one; False if nobody knows which."""
        if self._cursor is None:
            return False
        unit, number = self._cursor
        following = self.retained.missing(unit, len(unit.pieces), number + 1)
        if following is not None:
            self._request(unit, following)
            return True
        after = self._order.after(unit) if self.prefetch else None
        for _ in range(len(self._order)):  # past units that stay
            if after is None:
                break
            following = self.retained.missing(after, len(after.pieces))
            if following is not None:
                self._request(after, following)
                return True
            after = self._order.after(after)
        return False

    def _launch(self) -> None:
        """Copy the next piece, waiting for its feed."""
        step = self._planned[0]
        piece = step.unit.pieces[step.number]
        if self.device.trace is None or step.ticket.ready():
            address = step.ticket.wait()
        else:
            begin = time.perf_counter_ns()
            address = step.ticket.wait()
            self.device.trace.wait(begin, time.perf_counter_ns(), piece.extent.name)
        stay = self.retained.take(piece)
        place, freed = self._free.popleft() if stay is None else (stay, None)
        if freed is not None:
            self.device.hold(freed)
        copied = self.device.copy(place, address, piece)
        step.ticket.copied(copied)
        self._next()  # whatever fails before, `forget` gives its bytes back to the feed
        if stay is None:
            self._flying.append(_Flight(step.unit, step.number, place, copied))
        else:
            self.retained.put(step.unit, step.number, place, copied)
        self.copied_bytes += piece.extent.size
        self.copied_pieces += 1

    def _advance(self) -> None:
        """Copy as far ahead as there are places, without waiting for a feed."""
        while self._free:
            self._skip()
            if not (self._planned or self._extend()):
                break
            if not self._planned[0].ticket.ready():
                break
            self._launch()
        self._read_ahead()

    def _read_ahead(self) -> None:
        """Request as much as feeds want to know ahead."""
        while self._reading < self._ahead and len(self._planned) < _MOST_PLANNED and self._extend():
            pass

    def forget(self) -> None:
        """After a failure: wait for what was queued, and start anew."""
        self._unfinished = True
        self.device.wait()
        while self._planned:
            self._cancel()
        self._empty()

    def _empty(self) -> None:
        self._flying.clear()
        self.retained.clear()
        self._reading = 0
        self._free = deque((i * self.room, None) for i in range(self.places))
        self._cursor = None
        self._unfinished = False  # last: whatever ends before has to be done again
