"""Units of round sizes, how they are counted and laid out, and what else a model needs beside them."""

from __future__ import annotations

from tpde.planning.candidates import Candidate, Tally, tally
from tpde.planning.layout import MIB, Layout
from tpde.planning.units import Footprint, Rates, Unit

RATES = Rates(copy=50e9, disk=5e9, memory=4e12, decode=2e12, launch=40e-6, windows=5e12)
PLAIN, PACKED, STREAMED = Unit("a", 700, 1000, 20), Unit("b", 701, 1001, 21), Unit("c", 702, 1002, 22)
BLOCKS = [Unit(f"layers.{i}", 100 * MIB + 7, 150 * MIB, MIB) for i in range(12)]
NEEDS = Footprint(
    plain=3 * MIB,
    cache=5 * MIB,
    activations=7 * MIB,
    fixed=11 * MIB,
    experts=13 * MIB,
    elsewhere=2 << 30,
    column=4096,
)


def counted(*units: Unit, plain: str = "", packed: str = "", ram: int | None = None) -> Tally:
    """What some units take, named ones plain or packed on the device, and the others streamed."""
    return tally(Candidate(frozenset(plain.split()), frozenset(packed.split())), units, ram)


def layout(found: Tally, slots: int = 4, tiled: int = 0, workspace: int = 17 * MIB) -> Layout:
    """Lay out units that were counted, with a ring of pieces of 32 MiB."""
    return Layout(found, tiled=tiled, workspace=workspace, slots=slots, piece=32 * MIB)
