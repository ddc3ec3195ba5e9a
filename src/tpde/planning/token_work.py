"""What a token takes of a machine, with a layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from tpde.planning.layout import GRAIN, MIB, Layout
from tpde.planning.prediction import Work
from tpde.planning.units import Footprint, Placement

RETAINED_LEAST, LEFT_FREE = 64 * MIB, 32 * MIB  # what is left over is for pieces that are copied once


def retained_bytes(layout: Layout, work: Work, footprint: Footprint, vram: int) -> int:
    """Bytes for pieces that are copied once, of what is left over; where there are experts, they have it."""
    if not layout.slots or footprint.experts:
        return 0
    wanted = work.disk or work.copied
    left = min(vram - layout.used(footprint) - LEFT_FREE, wanted + 512 * work.pieces)
    return left // GRAIN * GRAIN if left >= RETAINED_LEAST else 0


def work_without(work: Work, retained: int) -> Work:
    """What a token takes if so many bytes are not copied again: those that come from a disk, if any do.

    The host has to launch what decodes them all the same, and their pieces count in full.
    """
    if not retained:
        return work
    once = min(retained, work.disk or work.copied)
    share = once / work.copied
    return work._replace(
        copied=work.copied - once,
        disk=max(work.disk - once, 0),
        passing=work.passing - int(work.passing * share),
    )


def work_of(layout: Layout, read: int, calls: int) -> Work:
    """What a token takes if everything that is streamed is copied each time."""
    made, piece = layout.tally, layout.piece
    decoded = launches = copied = passing = pieces = streamed = disk = multiplied = 0
    for unit in made.decoded:
        decoded += unit.plain
        turns = -(-unit.plain // layout.workspace) if unit.plain > layout.workspace else 1
        where = made.placement(unit)
        if where is Placement.PACKED:
            launches += turns
            continue
        size = unit.packed - unit.index
        streamed, copied, pieces = streamed + turns, copied + size, pieces + max(-(-size // piece), turns)
        passing += unit.plain
        disk += size if where is Placement.DISK else 0
    for _, windows in made.windowed:
        read, multiplied = read - windows.matrices, multiplied + windows.read
        decoded += windows.beside
    others = sum(bool(windows.beside) for _, windows in made.windowed)
    return Work(
        calls=calls,
        read=read,
        decoded=decoded,
        passing=passing,
        launches=launches + others + pieces,
        units=len(made.decoded) + others,
        copied=copied,
        pieces=pieces,
        streamed=streamed,
        disk=disk,
        ring=layout.slots * piece,
        windows=multiplied,
    )


def works(layouts: Iterable[Layout], read: int, calls: int) -> Iterator[tuple[Work, Layout]]:
    """What a token takes with each layout. Only their rings tell most of them from the one before."""
    for _, group in groupby(layouts, lambda it: (id(it.tally), it.workspace, it.piece)):
        work = None
        for it in group:
            work = work._replace(ring=it.slots * it.piece) if work else work_of(it, read, calls)
            yield work, it
