"""Guessing what is wanted next: what followed the last time."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class PrefetchOrder(Generic[T]):
    """The order in which things were wanted; before the first, that in which they were made, round and round.

    Examples
    --------
    >>> order = PrefetchOrder()
    >>> for block in ("a", "b", "c"):
    ...     order.expect(block)
    >>> order.after("c")
    'a'
    >>> order.saw("b")
    >>> order.saw("a")
    >>> order.after("b")
    'a'
    """

    def __init__(self) -> None:
        self._next: dict[T, T] = {}
        self._made: list[T] = []
        self._last: T | None = None

    def expect(self, it: T) -> None:
        """Name what will be wanted after all that was named before, and before the first of them."""
        if self._made:
            self._next[self._made[-1]] = it
        self._made.append(it)
        self._next[it] = self._made[0]

    def saw(self, it: T) -> None:
        """Note that something is wanted now."""
        if self._last is not None:
            self._next[self._last] = it
        self._last = it

    def after(self, it: T) -> T | None:
        """What will be wanted after it; None if nobody knows."""
        return self._next.get(it)

    def __len__(self) -> int:
        return len(self._next)
