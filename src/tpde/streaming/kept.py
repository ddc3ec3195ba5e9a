"""Pieces that stay on the device once they were copied, in what memory the plan has left over."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

from tpde.format.blob import align
from tpde.streaming.pieces import Piece

T = TypeVar("T")  # what pieces belong to: a unit

_ALIGN = 512  # as places of the ring are aligned


class Stay(NamedTuple):
    """Where a piece stays, and the event of the end of its copy."""

    place: int
    copied: Any


class Kept(Generic[T]):
    """Room for pieces: those that are copied first stay, as many as fit.

    Parameters
    ----------
    start, room : int
        Where the room starts, behind the ring's places, and its bytes.
    supply : object, optional
        Whose pieces stay; by default, anybody's.

    Examples
    --------
    >>> from tpde.format.source import Extent
    >>> kept = Kept(0, 1024)
    >>> piece = Piece(Extent(None, 0, 600, "w"), None, 0, ())
    >>> place = kept.take(piece)
    >>> kept.put("layer", 0, place, None)
    >>> kept.find("layer", 0)
    Stay(place=0, copied=None)
    >>> kept.missing("layer", 3), kept.take(piece)
    (1, None)
    """

    def __init__(self, start: int, room: int, supply: Any = None) -> None:
        self._start, self._end, self._supply = start, start + room, supply
        self._at = start
        self._stays: dict[T, dict[int, Stay]] = {}

    def take(self, piece: Piece) -> int | None:
        """Room for a piece; None if it is not to stay, or does not fit."""
        end = self._at + align(piece.pad + piece.extent.size, _ALIGN)
        if end > self._end or self._supply not in (None, piece.supply):
            return None
        place, self._at = self._at, end
        return place

    def put(self, unit: T, number: int, place: int, copied: Any) -> None:
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
        self._at = self._start
