"""What the planner gives: where each unit of a model is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tpde.planning.prediction import Work, predict
from tpde.planning.units import Placement, Rates


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
