"""Planning where the weights of any model are kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from tpde.loading.checkpoint_files import Stored
from tpde.loading.footprint import TYPICAL, module_calls
from tpde.loading.model_units import TABLES_BYTES, units_of
from tpde.loading.runs import Run
from tpde.planning.planner import make_plan
from tpde.planning.stream_plan import StreamPlan
from tpde.planning.units import Footprint


def place_units(
    model: Any,
    runs: Mapping[str, Run[Stored]],
    footprint: Footprint,
    vram: int,
    ram: int | None,
    only: Collection[str] | None = None,
    fused: Collection[str] = (),
) -> StreamPlan:
    """Decide where packed weights are kept. Nothing but headers is read.

    The machine is taken to be a typical one: weights go where they would on any other. `StreamPlan.on` says
    how long a token takes on it.

    Parameters
    ----------
    model : nn.Module
        Its parameters on the `meta` device, in the dtypes that they will have.
    runs : mapping of str to Run
        Those that are packed.
    footprint : Footprint
        What the model needs beside them; their tables are added here.
    vram, ram : int
        Bytes; without `ram`, it is as much as is needed.
    only : collection of str, optional
        Parameters that are on this device; by default all.
    fused : collection of str
        Parameters that linear layers may multiply from the window layout, where that is faster.

    Raises
    ------
    OutOfMemory
        If a budget cannot work; its `least` is one that does.
    Truncated, Corrupt, UnsupportedVersion
        If the header of a packed tensor is damaged.
    """
    here = {part.name for name, run in runs.items() if only is None or name in only for part in run.parts}
    # Of tensors on the device; those of others are in `index`.
    footprint = replace(footprint, plain=footprint.plain + TABLES_BYTES * len(here))
    units = units_of(model, runs, only, fused)
    return make_plan(units, footprint, vram, ram, TYPICAL, calls=module_calls(model))
