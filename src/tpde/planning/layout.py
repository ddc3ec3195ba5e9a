"""Workspaces and rings for what is kept where, and the device memory that all of it takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tpde.planning.candidates import Tally, round_up
from tpde.planning.units import Footprint, Placement, Unit

MIB = 1 << 20
# Slots of the ring, and the size of one. By preference 320 MiB, which take 6 ms to copy: as long as ten
# blocks on the device compute. Smaller pieces travel more slowly, and each takes the host as long as a call.
RINGS = tuple(
    (slots, size * MIB)
    for slots, size in ((10, 32), (8, 32), (6, 32), (5, 32), (4, 32), (6, 16), (4, 16), (4, 8), (4, 4))
)
TILES = tuple(size * MIB for size in (64, 128, 256, 512, 1024))  # larger ones are no faster
GRAIN = 2 * MIB  # the driver gives device memory in pages of this size
PAGE_TABLES = 512  # of page-locked memory, one part of so many: a GPU has 8 bytes for each 4 KiB


class Layout(NamedTuple):
    """A candidate with a workspace and a ring."""

    tally: Tally
    tiled: int  # how many of the units that need the workspace
    workspace: int
    slots: int
    piece: int

    def used(self, footprint: Footprint) -> int:
        """Bytes of device memory, at most: when all is there, or while plain units are decoded."""
        parts = parts_of(self, footprint)
        loading = footprint.plain + footprint.fixed + parts["pages"] + self.tally.maps + self.tally.loading
        return max(sum(parts.values()), loading)

    def products(self, column: int) -> int:
        """Bytes of what the largest tile, or strip, gives, by those of one output."""
        rows = [self.workspace // unit.row for unit in self.tally.decoded[: self.tiled] if unit.row]
        rows += [windows.rows for _, windows in self.tally.windowed]
        return round_up(max(rows, default=0) * column)


def workspaces(units: Sequence[Unit], tiled: int, other: int = 0) -> list[int]:
    """Sizes of the workspace, the least one first, if so many of the largest units are tiled.

    Others need `other` of it.
    """
    whole = max(round_up(units[tiled].plain) if tiled < len(units) else 0, other)
    if not tiled:
        return [whole]
    limit = units[tiled - 1].plain
    if limit <= whole or not all(unit.tile for unit in units[:tiled]):
        return []
    least = max(whole, *(unit.tile for unit in units[:tiled]))
    return [round_up(size) for size in (least, *TILES) if least <= size < limit]


def layouts(tallies: Iterable[Tally], tile: bool) -> Iterator[Layout]:
    """Every workspace and ring for each choice, with no unit tiled, or with one and more."""
    for made in tallies:
        streams = any(made.placement(unit) in (Placement.HOST, Placement.DISK) for unit in made.decoded)
        for tiled in range(1, len(made.decoded) + 1) if tile else (0,):
            for workspace in workspaces(made.decoded, tiled, made.least_workspace):
                for slots, piece in RINGS if streams else ((0, 0),):
                    yield Layout(made, tiled, workspace, slots, piece)


def parts_of(layout: Layout, footprint: Footprint, retained: int = 0) -> dict[str, int]:
    """What a layout needs device memory for, and how much: see `StreamPlan`."""
    return {
        "plain": footprint.plain,
        "cache": footprint.cache,
        "activations": footprint.activations,
        "fixed": footprint.fixed,
        "workspace": layout.workspace,
        "strips": max((windows.strip for _, windows in layout.tally.windowed), default=0),
        "tiles": layout.products(footprint.column),
        "ring": layout.slots * layout.piece,
        "kept": retained,
        "experts": footprint.experts if layout.slots else 0,
        "pages": page_tables(layout.tally.host + layout.tally.staging) + page_tables(footprint.elsewhere),
        "index": layout.tally.maps,
        "packed": layout.tally.packed,
        "windows": layout.tally.windows,
        "decoded": layout.tally.plain,
    }


def page_tables(nbytes: int) -> int:
    """Device memory that the driver takes for so many bytes of page-locked memory.

    Not measured by itself: with 53.8 GB locked, an H200's driver took 239 MiB, where models of less take 150.
    """
    return round_up(-(-nbytes // PAGE_TABLES), GRAIN)
