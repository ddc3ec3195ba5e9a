"""Pieces that stay on the device once they were copied, in what memory the plan has left over.

They are spread evenly: while one is decoded the ring fills, but it holds only so much, and where many of them
come in a row copies would wait.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from tpde.format.blob_header import align
from tpde.host.feed import Event, Feed
from tpde.streaming.pieces import Piece

T = TypeVar("T")  # what pieces belong to: a unit

_ALIGN = 512  # as places of the ring are aligned


class Stay(NamedTuple):
    """Where a piece stays, and the event of the end of its copy."""

    place: int
    copied: Event


class Retained(Generic[T]):
    """Room for pieces: of those that are copied, as many stay as fit.

    Parameters
    ----------
    start, room : int
        Where the room starts, behind the ring's places, and its bytes.
    wanted : int
        Bytes of all pieces that may stay. Of those that are copied, a share of `room / wanted` stays.
    feed : Feed, optional
        Whose pieces stay; by default, anybody's.

    Attributes
    ----------
    start, room, wanted, feed
        The same.

    Examples
    --------
    >>> from tpde.io.sources import Extent
    >>> retained = Retained(0, 1024, 2048)
    >>> piece = Piece(Extent(None, 0, 512, "w"), None, ())
    >>> [retained.take(piece) for _ in range(6)]
    [None, 0, None, 512, None, None]
    >>> retained.put("layer", 1, 0, None)
    >>> retained.find("layer", 1)
    Stay(place=0, copied=None)
    >>> retained.missing("layer", 4, 1)
    2
    """

    def __init__(self, start: int, room: int, wanted: int, feed: Feed | None = None) -> None:
        self.start, self.room, self.wanted, self.feed = start, room, wanted, feed
        self._taken = self._seen = 0
        self._stays: dict[T, dict[int, Stay]] = {}

    def take(self, piece: Piece) -> int | None:
        """Room for a piece that is copied now; None if it is not to stay, or does not fit."""
        if self.feed not in (None, piece.feed):
            return None
        self._seen += piece.extent.size
        taken = self._taken + align(piece.extent.size, _ALIGN)
        if taken > self.room or taken * self.wanted > self._seen * self.room:
            return None
        place, self._taken = self.start + self._taken, taken
        return place

    def put(self, unit: T, number: int, place: int, copied: Event) -> None:
        """A piece is being copied there."""
        self._stays.setdefault(unit, {})[number] = Stay(place, copied)

    def find(self, unit: T, number: int) -> Stay | None:
        """Where a piece is, if it stays."""
        found = self._stays.get(unit)
        return None if found is None else found.get(number)

    def missing(self, unit: T, pieces: int, first: int = 0) -> int | None:
        """The first piece of a unit, from one on, that does not stay; None if all do."""
        found = self._stays.get(unit, {})
        return next((i for i in range(first, pieces) if i not in found), None)

    def clear(self) -> None:
        """Nothing stays: all copies have ended, or failed."""
        self._stays.clear()
        self._taken = self._seen = 0
