"""Where each unit of a model is to be kept, given budgets of memory and the rates of a machine.

Pure: it takes sizes and rates, and gives a plan; nothing here knows of tensors or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from tpde.errors import OutOfMemory
from tpde.planning.candidates import Tally, candidates, round_up, tally, window_choices
from tpde.planning.prediction import Work, predict
from tpde.planning.sizes import mib
from tpde.planning.units import Footprint, Placement, Rates, Unit, Windows

__all__ = ["Footprint", "Placement", "Rates", "StreamPlan", "Unit", "Windows", "make_plan"]

MIB = 1 << 20
# Slots of the ring, and the size of one. By preference 320 MiB, which take 6 ms to copy: as long as ten
# blocks on the device compute. Smaller pieces travel more slowly, and each takes the host as long as a call.
RINGS = tuple(
    (slots, size * MIB)
    for slots, size in ((10, 32), (8, 32), (6, 32), (5, 32), (4, 32), (6, 16), (4, 16), (4, 8), (4, 4))
)
TILES = tuple(size * MIB for size in (64, 128, 256, 512, 1024))  # larger ones are no faster
GRAIN = 2 * MIB  # the driver gives device memory in pages of this size
RETAINED_LEAST, LEFT_FREE = 64 * MIB, 32 * MIB  # what is left over is for pieces that are copied once
# Of plans that are hardly slower than the fastest, the one with most units on the device and then the largest
# ring is chosen: less of the host's memory has to be locked, and long prompts need the ring.
NEAR = 1.02
PAGE_TABLES = 512  # of page-locked memory, one part of so many: a GPU has 8 bytes for each 4 KiB


@dataclass(frozen=True)
class StreamPlan:
    """Where each unit is kept, and what that takes.

    Attributes
    ----------
    placements : mapping of str to Placement
        By the units' names, in the model's order.
    tiled : tuple of str
        Units that are larger than the workspace, and used row by row in it.
    workspace : int
        Bytes of the buffer that weights are decoded to.
    slots, piece : int
        Of the ring, and bytes of each; 0 if nothing is streamed.
    staging : int
        Bytes of host memory through which comes what is read from files; 0 if nothing is.
    host : int
        Bytes of units in page-locked host memory.
    parts : mapping of str to int
        What the device memory is for: `plain`, `cache`, `activations`, `fixed`, as in `Footprint`;
        `workspace`; `strips` (rows of weights in the window layout, decoded for many rows of inputs);
        `tiles` (what multiplying by a part of a weight gives); `ring`, `kept` (parts of streamed units that
        are copied once) and `experts`, if units are streamed; `pages`, tables of the driver for host memory
        that is page-locked; `index`, of streamed units; `packed`, `windows` and `decoded`, of the units on
        the device.
    vram, ram : int
        The budgets; `ram` is None if there is none.
    work : Work
        What a token takes of the machine.
    times : mapping of str to float
        Seconds that each resource takes for one token: `copy`, `disk`, `memory` (of the device), `host`.
    """

    placements: Mapping[str, Placement]
    tiled: tuple[str, ...]
    workspace: int
    slots: int
    piece: int
    staging: int
    host: int
    parts: Mapping[str, int]
    vram: int
    ram: int | None
    work: Work
    times: Mapping[str, float]

    @property
    def ring(self) -> int:
        """Bytes of the ring."""
        return self.slots * self.piece

    @property
    def retained(self) -> int:
        """Bytes behind the ring for what is copied once."""
        return self.parts["kept"]

    @property
    def used(self) -> int:
        """Bytes of device memory that are needed, at most `vram`."""
        return sum(self.parts.values())

    @property
    def limit(self) -> str:
        """What takes longest: `copy`, `disk`, `memory` or `host`."""
        return max(self.times, key=lambda key: self.times[key])

    @property
    def seconds(self) -> float:
        """Seconds for one token."""
        return self.times[self.limit]

    def on(self, rates: Rates) -> StreamPlan:
        """The same plan, with its times on another machine."""
        return replace(self, times=predict(self.work, rates))

    def units(self, placement: Placement) -> list[str]:
        """Names of the units in a place."""
        return [name for name, it in self.placements.items() if it is placement]


class _Layout(NamedTuple):
    """A candidate with a workspace and a ring."""

    tally: Tally
    tiled: int  # how many of the units that need the workspace
    workspace: int
    slots: int
    piece: int

    def used(self, footprint: Footprint) -> int:
        """Bytes of device memory, at most: when all is there, or while plain units are decoded."""
        parts = _parts(self, footprint)
        loading = footprint.plain + footprint.fixed + parts["pages"] + self.tally.maps + self.tally.loading
        return max(sum(parts.values()), loading)

    def products(self, column: int) -> int:
        """Bytes of what the largest tile, or strip, gives, by those of one output."""
        rows = [self.workspace // unit.row for unit in self.tally.decoded[: self.tiled] if unit.row]
        rows += [windows.rows for _, windows in self.tally.windowed]
        return round_up(max(rows, default=0) * column)


class _Rated(NamedTuple):
    """A layout, and how long a token takes with it: seconds of each resource."""

    times: Mapping[str, float]
    work: Work
    layout: _Layout
    retained: int

    @property
    def seconds(self) -> float:
        return max(self.times.values())

    def is_no_worse(self, other: _Rated) -> bool:
        return self.layout.tiled <= other.layout.tiled and self.seconds <= other.seconds

    def rank(self) -> tuple[int, int, float]:
        """What has most on the device first, then the largest ring, then the least time."""
        layout, made = self.layout, self.layout.tally
        return -(made.plain + made.packed), -layout.slots * layout.piece, self.seconds

    def window_rank(self) -> tuple[int, int, int, float, int]:
        """Where windows may be: fewest tiles, least elsewhere, the largest ring, least time, most windows."""
        layout, made = self.layout, self.layout.tally
        return layout.tiled, made.away, -layout.slots * layout.piece, self.seconds, -made.windows


def _workspaces(units: Sequence[Unit], tiled: int, other: int = 0) -> list[int]:
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


def _layouts(tallies: Iterable[Tally], tile: bool) -> Iterator[_Layout]:
    for made in tallies:
        streams = any(made.placement(unit) in (Placement.HOST, Placement.DISK) for unit in made.decoded)
        for tiled in range(1, len(made.decoded) + 1) if tile else (0,):
            for workspace in _workspaces(made.decoded, tiled, made.least_workspace):
                for slots, piece in RINGS if streams else ((0, 0),):
                    yield _Layout(made, tiled, workspace, slots, piece)


def _retained(layout: _Layout, work: Work, footprint: Footprint, vram: int) -> int:
    """Bytes for pieces that are copied once, of what is left over; where there are experts, they have it."""
    if not layout.slots or footprint.experts:
        return 0
    wanted = work.disk or work.copied
    left = min(vram - layout.used(footprint) - LEFT_FREE, wanted + 512 * work.pieces)
    return left // GRAIN * GRAIN if left >= RETAINED_LEAST else 0


def _without(work: Work, retained: int) -> Work:
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


def _work(layout: _Layout, read: int, calls: int) -> Work:
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


def _works(layouts: Iterable[_Layout], read: int, calls: int) -> Iterator[tuple[Work, _Layout]]:
    """What a token takes with each layout. Only their rings tell most of them from the one before."""
    for _, group in groupby(layouts, lambda it: (id(it.tally), it.workspace, it.piece)):
        work = None
        for it in group:
            work = work._replace(ring=it.slots * it.piece) if work else _work(it, read, calls)
            yield work, it


def make_plan(
    units: Sequence[Unit], footprint: Footprint, vram: int, ram: int | None, rates: Rates, *, calls: int
) -> StreamPlan:
    """Choose where each unit is kept, so that a token takes least time, but for 2 %.

    With more `vram`, fewer units are tiled; or as many, and the predicted time is at most 2 % longer. That
    some units may be in the window layout never makes it longer, nor more units tiled.

    Parameters
    ----------
    units : sequence of Unit
        In the order in which the model uses them.
    footprint : Footprint
        What else needs device memory.
    vram : int
        Bytes of device memory.
    ram : int, optional
        Bytes of host memory; by default, there is enough.
    rates : Rates
        Of the machine.
    calls : int
        Calls of modules in a forward pass.

    Raises
    ------
    OutOfMemory
        If a budget cannot work; its `least` is the number of bytes that would.
    """
    read = footprint.plain + sum(unit.plain for unit in units if not unit.rows)

    def rated(layouts: Iterable[_Layout]) -> Iterator[_Rated]:
        for every_time, it in _works(layouts, read, calls):
            retained = _retained(it, every_time, footprint, vram)
            work = _without(every_time, retained)
            yield _Rated(predict(work, rates), work, it, retained)

    def layouts(tallies: Iterable[Tally], tile: bool) -> list[_Layout]:
        left = vram - footprint.total
        possible = (it for it in tallies if it.there <= left and (ram is None or it.least_ram <= ram))
        return [it for it in _layouts(possible, tile) if it.used(footprint) <= vram]

    tallies = [tally(candidate, units, ram) for candidate in candidates(units)]
    exact: list[_Rated] = []
    for tile in (False, True):
        if not exact:
            fitting = layouts(tallies, tile)
            fewest = min((it.tiled for it in fitting), default=0)
            exact = list(rated(it for it in fitting if it.tiled == fewest))
    found = _best(exact, _Rated.rank)
    if windowed := [tally(candidate, units, ram) for candidate in window_choices(units)]:
        fitting = layouts(windowed, False)
        if found is None or found.layout.tiled:
            fitting += layouts(windowed, True)
        no_worse = [it for it in (*exact, *rated(fitting)) if found is None or it.is_no_worse(found)]
        found = _best(no_worse, _Rated.window_rank)
        tallies += windowed
    if found is not None:
        return _finished(found, units, footprint, vram, ram)
    every = [*_layouts(tallies, False), *_layouts(tallies, True)]
    without = [it for it in every if it.used(footprint) <= vram]
    if without:
        assert ram is not None
        raise too_little_ram(min(it.tally.least_ram for it in without), ram)
    working = (it for it in every if ram is None or it.tally.least_ram <= ram)
    pinned = sum(it.packed for it in units if it.resident)
    raise _too_little_vram(min(working, key=lambda it: it.used(footprint)), footprint, vram, pinned)


def page_tables(nbytes: int) -> int:
    """Device memory that the driver takes for so many bytes of page-locked memory.

    Not measured by itself: with 53.8 GB locked, an H200's driver took 239 MiB, where models of less take 150.
    """
    return round_up(-(-nbytes // PAGE_TABLES), GRAIN)


def _best(rated: Sequence[_Rated], rank: Callable[[_Rated], tuple[float, ...]]) -> _Rated | None:
    """Of those that take about the least time the one that ranks first; None if there is none."""
    longest = NEAR * min((it.seconds for it in rated), default=0.0)
    return min((it for it in rated if it.seconds <= longest), key=rank, default=None)


def _parts(layout: _Layout, footprint: Footprint, retained: int = 0) -> dict[str, int]:
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


def _finished(
    rated: _Rated, units: Sequence[Unit], footprint: Footprint, vram: int, ram: int | None
) -> StreamPlan:
    times, work, layout, retained = rated
    made = layout.tally
    return StreamPlan(
        placements={unit.name: made.placement(unit) for unit in units},
        tiled=tuple(unit.name for unit in made.decoded[: layout.tiled]),
        workspace=layout.workspace,
        slots=layout.slots,
        piece=layout.piece,
        staging=made.staging,
        host=made.host,
        parts=_parts(layout, footprint, retained),
        vram=vram,
        ram=ram,
        work=work,
        times=times,
    )


_WHAT = {
    "plain": "of plain weights and buffers",
    "cache": "of KV cache",
    "activations": "of activations",
    "fixed": "of kernels and libraries",
    "workspace": "to decode to",
    "strips": "to decode rows of weights in the window layout to",
    "tiles": "of what a tile of a weight gives",
    "ring": "to copy to",
    "kept": "of packed weights that are copied once",
    "experts": "of packed experts",
    "pages": "of page tables for host memory",
    "index": "of index maps",
    "packed": "of packed weights",
    "windows": "of weights in the window layout",
    "decoded": "of weights decoded once",
}


def _given(size: int) -> str:
    """Write a size as it was given, rounded down (the least: up); below 1 MiB it mostly lacks a unit."""
    return f"{size // MIB} MiB" if size >= MIB else f"{size} bytes"


def _too_little_vram(layout: _Layout, footprint: Footprint, vram: int, pinned: int) -> OutOfMemory:
    parts = {key: size for key, size in _parts(layout, footprint).items() if size}
    least = layout.used(footprint)
    made = ", ".join(f"{mib(size)} {_WHAT[key]}" for key, size in parts.items())
    fewer = f", or a smaller {footprint.argument}" if footprint.cache or footprint.activations else ""
    other = "only what `--codec prefix` packs can be streamed"
    packed = f"; {mib(pinned)} are packed otherwise, and {other}: pack the model again" if pinned else ""
    return OutOfMemory(
        f"`vram` is {_given(vram)}, the least that works is {mib(least)}: {made}",
        hint=f"use `{mib(least).replace(' ', '')}` or more{fewer}{packed}",
        where="vram",
        found=vram,
        needed=least,
        least=least,
    )


def too_little_ram(least: int, ram: int) -> OutOfMemory:
    """What says that no plan works with so much host memory, in bytes."""
    return OutOfMemory(
        f"`ram` is {_given(ram)}, the least that works is {mib(least)}: the embeddings, and the buffers "
        "through which files are read",
        hint=f"use `{mib(least).replace(' ', '')}` or more, or more `vram`",
        where="ram",
        found=ram,
        needed=least,
        least=least,
        budget="ram",
    )
