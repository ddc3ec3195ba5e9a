"""Which units may be where: the combinations that the planner compares, whatever the budget.

That they do not depend on the budget is what makes plans monotone: with more memory none is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from tpde.planning.units import Placement, Unit, Windows

FEW = 3  # units unlike the others: all of their subsets are tried
MOST_LEVELS = 128  # numbers of units that are tried, where there are more of them

STAGING_LEAST, STAGING_MOST = 256 << 20, 1 << 30  # bytes: 8 and 32 pieces read ahead
STAGING_STEP = 32 << 20
STAGING_SHARE = 8  # of host memory, one part of so many

Names = frozenset[str]


class Candidate(NamedTuple):
    """Units that are on the device; the others are streamed."""

    plain: Names
    packed: Names
    windows: Names = frozenset()


def evenly(units: Sequence[Unit], count: int) -> list[Unit]:
    """`count` of some units, spread evenly: those that are copied hide behind those that are not."""
    n = len(units)
    return [unit for i, unit in enumerate(units) if (i + 1) * count // n > i * count // n]


def _levels(n: int) -> list[int]:
    steps = min(n, MOST_LEVELS)
    return [n * i // steps for i in range(steps + 1)] if steps else [0]


def _names(units: Iterable[Unit]) -> Names:
    return frozenset(unit.name for unit in units)


def _subsets(units: Sequence[Unit]) -> Iterator[Names]:
    """Evenly spread subsets of every number of units; those of another size are taken or left beside."""
    sizes: dict[int, list[Unit]] = {}
    for unit in units:
        sizes.setdefault(unit.plain, []).append(unit)
    main = max(sizes.values(), key=lambda group: sum(unit.plain for unit in group), default=[])
    other = [unit for unit in units if not main or unit.plain != main[0].plain]
    if len(other) <= FEW:
        beside = [_names(some) for n in range(len(other) + 1) for some in combinations(other, n)]
    else:
        beside = [_names(evenly(other, n)) for n in _levels(len(other))]
    for chosen in beside:
        for n in _levels(len(main)):
            yield chosen | _names(evenly(main, n))


def _largest(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """The few units that are larger than all others, if there are some."""
    ordered = sorted(units, key=lambda unit: -unit.plain)
    for n in range(1, min(FEW, len(ordered) - 1) + 1):
        if ordered[n].plain < ordered[n - 1].plain:
            yield ordered[:n]


def candidates(units: Sequence[Unit]) -> Iterator[Candidate]:
    """What may be on the device.

    First some units packed; then all, embeddings too; then some of them plain. Units larger than all others
    may be plain before: as nothing else needs so large a workspace, a plain one can take less memory than a
    packed one.
    """
    body, rows = [it for it in units if not it.rows], [it for it in units if it.rows]
    pinned = _names(it for it in units if it.resident)
    for plain in ([], *_largest(body)):
        rest = [it for it in body if it not in plain]
        for packed in dict.fromkeys(
            chosen | pinned for chosen in _subsets([it for it in rest if not it.resident])
        ):
            yield Candidate(_names(plain), packed - _names(plain))
    for n in range(1, len(rows)):
        yield Candidate(frozenset(), _names([*body, *rows[:n]]) | pinned)
    for chosen in _subsets(body):
        yield Candidate(chosen, _names(units) - chosen)


def window_choices(units: Sequence[Unit]) -> Iterator[Candidate]:
    """What may be on the device, some of it in the window layout.

    First the few largest units there, others packed or streamed: no workspace has to hold a large head then.
    Then some units there, the others streamed, and none packed that could be there. Then all on the device:
    some there and the others packed; or all there that can be, or that are multiplied whole from there, and
    some of the others plain.
    """
    body, rows = [it for it in units if not it.rows], [it for it in units if it.rows]
    able = [it for it in body if it.windows]
    if not able:
        return
    pinned, can = _names(it for it in units if it.resident), _names(able)
    free = [it for it in body if not it.resident]
    for some in _largest(body):
        if all(it.windows for it in some):
            windows = _names(some)
            for packed in _subsets([it for it in free if it not in some]):
                yield Candidate(Names(), (packed | pinned) - windows, windows)
    for chosen in _subsets(free):
        if there := (chosen | pinned) & can:
            yield Candidate(Names(), (chosen | pinned) - can, there)
    for n in range(1, len(rows)):
        yield Candidate(Names(), (_names([*body, *rows[:n]]) | pinned) - can, can)
    for chosen in _subsets(able):
        if chosen:
            yield Candidate(Names(), _names(units) - chosen, chosen)
    alone = _names(it for it in able if it.windows and not it.windows.beside)  # with nothing to decode
    for there in dict.fromkeys((can, alone)):
        for chosen in _subsets([it for it in body if it.name not in there]):
            if chosen and there:
                yield Candidate(chosen, _names(units) - chosen - there, there)


class Tally(NamedTuple):
    """What a candidate comes to.

    Attributes
    ----------
    plain, packed, maps : int
        Bytes on the device: of plain units, of packed ones, of the index maps of streamed ones.
    decoded : tuple of Unit
        Those that need the workspace whole, the largest first.
    on_disk : Names
        Units that are read from their files.
    host : int
        Bytes of units in host memory.
    staging : int
        Host memory for what comes from a disk.
    least_ram : int
        The least host memory that it could do with.
    loading : int
        Bytes on the device, at most, while plain units are decoded: before all else, the largest first, each
        with its packed form beside it.
    away : int
        Bytes, packed, of units that are not on the device.
    windowed : tuple of (Unit, Windows)
        Those in the window layout.
    """

    candidate: Candidate
    plain: int
    packed: int
    maps: int
    decoded: tuple[Unit, ...]
    on_disk: Names
    host: int
    staging: int
    least_ram: int
    loading: int
    away: int = 0
    windowed: tuple[tuple[Unit, Windows], ...] = ()

    @property
    def windows(self) -> int:
        """Bytes on the device of units in the window layout."""
        return sum(round_up(it.size) for _, it in self.windowed)

    @property
    def there(self) -> int:
        """Bytes on the device of all units."""
        return self.plain + self.packed + self.windows + self.maps

    @property
    def least_workspace(self) -> int:
        """Room that units in the window layout need to decode what else they have."""
        return max((round_up(it.beside) + it.strip for _, it in self.windowed), default=0)

    def placement(self, unit: Unit) -> Placement:
        """Where a unit is."""
        if unit.name in self.candidate.plain:
            return Placement.PLAIN
        if unit.name in self.candidate.packed:
            return Placement.PACKED
        if unit.name in self.candidate.windows:
            return Placement.WINDOWS
        return Placement.DISK if unit.name in self.on_disk else Placement.HOST


def round_up(size: int, unit: int = 512) -> int:
    """Up to a multiple: of what the allocator gives."""
    return -(-size // unit) * unit


def tally(candidate: Candidate, units: Sequence[Unit], ram: int | None) -> Tally:
    """Add a candidate up, and divide what is streamed among host memory and files."""
    plain = packed = maps = rows = 0
    streamed, decoded, windowed = [], [], []
    for unit in units:
        if unit.windows and unit.name in candidate.windows:
            windowed.append((unit, unit.windows))
            continue
        if unit.name in candidate.plain:
            plain += round_up(unit.plain)
            continue
        if not unit.rows:
            decoded.append(unit)
        if unit.name in candidate.packed:
            packed += round_up(unit.packed)
            continue
        maps += round_up(unit.index)
        if unit.rows:
            rows += unit.packed
        else:
            streamed.append(unit)
    every = sum(unit.packed for unit in streamed)
    staging, on_disk, away = 0, Names(), rows + every
    if ram is not None and rows + every > ram:
        share = max((ram - rows) // STAGING_SHARE, STAGING_LEAST) // STAGING_STEP * STAGING_STEP
        staging = min(share, STAGING_MOST)
        kept = _within(streamed, ram - rows - staging)
        on_disk = _names(streamed) - _names(kept)
        every = sum(unit.packed for unit in kept)
    least_ram = rows + min(sum(unit.packed for unit in streamed), STAGING_LEAST)
    decoded.sort(key=lambda unit: -unit.plain)
    loading = at = 0
    for unit in sorted((it for it in units if it.name in candidate.plain), key=lambda it: -it.plain):
        at += round_up(unit.plain)
        loading = max(loading, at + unit.packed + unit.index)
    return Tally(
        candidate=candidate,
        plain=plain,
        packed=packed,
        maps=maps,
        decoded=tuple(decoded),
        on_disk=on_disk,
        host=rows + every,
        staging=staging,
        least_ram=least_ram,
        loading=loading,
        away=away,
        windowed=tuple(windowed),
    )


def _within(units: Sequence[Unit], room: int) -> list[Unit]:
    """As many units as fit, spread so that from any of them on what is left out is about the same share."""
    total, seen, used = sum(unit.packed for unit in units), 0, 0
    kept: list[bool] = []
    for unit in units:
        seen += unit.packed
        kept.append((used + unit.packed) * total <= room * seen)
        used += unit.packed * kept[-1]
    for i, unit in enumerate(units):  # what that left over
        if not kept[i] and used + unit.packed <= room:
            kept[i], used = True, used + unit.packed
    return [unit for unit, keep in zip(units, kept, strict=True) if keep]
