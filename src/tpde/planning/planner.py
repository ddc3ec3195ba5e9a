"""Where each unit of a model is to be kept, given budgets of memory and the rates of a machine.

Pure: it takes sizes and rates, and gives a plan; nothing here knows of tensors or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tpde.planning.candidates import Tally, candidates, tally, window_choices
from tpde.planning.layout import Layout, layouts, parts_of
from tpde.planning.prediction import Work, predict
from tpde.planning.shortages import too_little_ram, too_little_vram
from tpde.planning.stream_plan import StreamPlan
from tpde.planning.token_work import retained_bytes, work_without, works
from tpde.planning.units import Footprint, Rates, Unit

# Of plans that are hardly slower than the fastest, the one with most units on the device and then the largest
# ring is chosen: less of the host's memory has to be locked, and long prompts need the ring.
NEAR = 1.02


class _Rated(NamedTuple):
    """A layout, and how long a token takes with it: seconds of each resource."""

    times: Mapping[str, float]
    work: Work
    layout: Layout
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


def make_plan(
    units: Sequence[Unit], footprint: Footprint, vram: int, ram: int | None, rates: Rates, *, calls: int
) -> StreamPlan:
    """Choose where each unit is kept, so that a token takes least time, but for 2 %.

    With more `vram`, fewer units are tiled; or as many, and the predicted time is at most 2 % longer. That
    some units may be in the window layout never makes it longer, nor more units tiled. All that holds for
    budgets that work without windows, too: more than what only they make possible may tile more units.

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

    def rated(fitting: Iterable[Layout]) -> Iterator[_Rated]:
        for every_time, it in works(fitting, read, calls):
            retained = retained_bytes(it, every_time, footprint, vram)
            work = work_without(every_time, retained)
            yield _Rated(predict(work, rates), work, it, retained)

    def within(tallies: Iterable[Tally], tile: bool) -> list[Layout]:
        left = vram - footprint.total
        possible = (it for it in tallies if it.there <= left and (ram is None or it.least_ram <= ram))
        return [it for it in layouts(possible, tile) if it.used(footprint) <= vram]

    tallies = [tally(candidate, units, ram) for candidate in candidates(units)]
    exact: list[_Rated] = []
    for tile in (False, True):
        if not exact:
            fitting = within(tallies, tile)
            fewest = min((it.tiled for it in fitting), default=0)
            exact = list(rated(it for it in fitting if it.tiled == fewest))
    found = _best(exact, _Rated.rank)
    if windowed := [tally(candidate, units, ram) for candidate in window_choices(units)]:
        fitting = within(windowed, False)
        if found is None or found.layout.tiled:
            fitting += within(windowed, True)
        no_worse = [it for it in (*exact, *rated(fitting)) if found is None or it.is_no_worse(found)]
        found = _best(no_worse, _Rated.window_rank)
        tallies += windowed
    if found is not None:
        return _finished(found, units, footprint, vram, ram)
    every = [*layouts(tallies, False), *layouts(tallies, True)]
    without = [it for it in every if it.used(footprint) <= vram]
    if without:
        assert ram is not None
        raise too_little_ram(min(it.tally.least_ram for it in without), ram)
    working = (it for it in every if ram is None or it.tally.least_ram <= ram)
    pinned = sum(it.packed for it in units if it.resident)
    raise too_little_vram(min(working, key=lambda it: it.used(footprint)), footprint, vram, pinned)


def _best(rated: Sequence[_Rated], rank: Callable[[_Rated], tuple[float, ...]]) -> _Rated | None:
    """Of those that take about the least time the one that ranks first; None if there is none."""
    longest = NEAR * min((it.seconds for it in rated), default=0.0)
    return min((it for it in rated if it.seconds <= longest), key=rank, default=None)


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
        parts=parts_of(layout, footprint, retained),
        vram=vram,
        ram=ram,
        work=work,
        times=times,
    )
