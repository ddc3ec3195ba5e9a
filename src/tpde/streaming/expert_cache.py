"""Which experts lie in which places of device memory.

The least recently used one makes room, if there are places for what all layers want in turn. Otherwise that
one is always the one that will be wanted first, and nothing would ever be found. So a new entry makes room
for the next one then, but for one of eight; the others stay, and are found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

# One of so many new entries stays, in place of the least recently used. Simulated, 32 layers that choose 2 of
# 8 experts each find 10 to 18 % of them in places for half, by how popular some are; with 4 and 16 about as
# many.
STAYING = 8


class ExpertCache(Generic[K]):
    """Equal places, and what is in them.

    An entry that is *held* is not evicted: its bytes are on their way, or will be read.

    Parameters
    ----------
    places : int
        How many.

    Attributes
    ----------
    hits, misses : int
        Of `lookup`, so far.

    Examples
    --------
    >>> cache = ExpertCache(2)
    >>> cache.lookup("a"), cache.insert("a"), cache.insert("b"), cache.insert("c")
    (None, 0, 1, None)
    >>> cache.release("b")
    >>> cache.insert("c"), cache.lookup("b"), cache.lookup("a")
    (1, None, 0)
    """

    def __init__(self, places: int) -> None:
        self.hits = self.misses = 0
        self._size, self._evicted = places, 0
        self._turns: dict[Hashable, int] = {}
        self._free = list(range(places - 1, -1, -1))
        self._places: OrderedDict[K, int] = OrderedDict()  # what makes room next first
        self._held: dict[K, int] = {}  # how often

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: K) -> bool:
        return key in self._places

    def turn(self, who: Hashable, count: int) -> None:
        """Note how many entries somebody wants this time. All who want some do so in turn."""
        self._turns[who] = count

    def _crowded(self) -> bool:
        """Whether an entry would make room, as the least recently used one, before it is wanted again."""
        return sum(self._turns.values()) - max(self._turns.values(), default=0) >= self._size

    def lookup(self, key: K) -> int | None:
        """The place of an entry, which becomes the most recently used, and is held; None if it has none."""
        place = self._places.get(key)
        if place is None:
            self.misses += 1
            return None
        self.hits += 1
        self._places.move_to_end(key)
        self._held[key] = self._held.get(key, 0) + 1
        return place

    def insert(self, key: K) -> int | None:
        """Give an entry that has none a place, and hold it; None if all places are held."""
        if key in self._places:
            raise ValueError(f"{key!r} has a place already")
        if self._free:
            place, stays = self._free.pop(), True
        else:
            oldest = next((other for other in self._places if other not in self._held), None)
            if oldest is None:
                return None
            place = self._places.pop(oldest)
            self._evicted += 1
            stays = not self._crowded() or self._evicted % STAYING == 0
        self._places[key] = place
        self._held[key] = 1
        self._places.move_to_end(key, last=stays)
        return place

    def release(self, key: K) -> None:
        """Hold an entry no longer: once for each `lookup` that found it, and for `insert`."""
        self._held[key] -= 1
        if not self._held[key]:
            del self._held[key]

    def clear(self) -> None:
        """Forget all entries, held ones too."""
        self._places.clear()
        self._held.clear()
        # All of them, and last: after Ctrl-C some may be neither free nor anybody's.
        self._free = list(range(self._size - 1, -1, -1))
