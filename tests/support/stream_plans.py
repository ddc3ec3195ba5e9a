"""A large model on an H200: its units, what it needs beside them, and plans for it."""

from __future__ import annotations

from collections.abc import Sequence

from tpde.planning.layout import MIB
from tpde.planning.planner import make_plan
from tpde.planning.stream_plan import StreamPlan
from tpde.planning.units import Footprint, Rates, Unit

RATES = Rates(copy=55e9, disk=6e9, memory=4.2e12, decode=2.0e12, launch=37e-6, windows=4.2e12)


def unit(name: str, mib: float, rows: bool = False, tile: int = 0, resident: bool = False) -> Unit:
    plain = int(mib * MIB)
    return Unit(name, int(plain / 1.49), plain, plain // 500, rows, tile, resident)


BLOCK, HEAD = 416, 1002
LLAMA = [
    unit("embed", HEAD, rows=True),
    *(unit(f"layers.{i}", BLOCK) for i in range(32)),
    unit("head", HEAD, tile=16 * MIB),
]
NEEDS = Footprint(plain=5 * MIB, cache=171 * MIB, activations=336 * MIB, fixed=128 * MIB)


def plan(
    vram: int,
    ram: int | None = None,
    units: Sequence[Unit] = LLAMA,
    needs: Footprint = NEEDS,
    rates: Rates = RATES,
) -> StreamPlan:
    return make_plan(units, needs, vram, ram, rates, calls=421)
