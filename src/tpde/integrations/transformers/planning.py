"""Planning where the weights of a transformers model are kept."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from tpde.integrations.checkpoint import Checkpoint
from tpde.integrations.streaming.demand import TYPICAL, module_calls
from tpde.integrations.streaming.units import TABLES_BYTES, units_of
from tpde.integrations.transformers.demand import activation_dtype, demand_of
from tpde.integrations.transformers.experts import cache_least
from tpde.integrations.transformers.plan import Plan
from tpde.streaming.budget import Budget
from tpde.streaming.plan import StreamPlan, make_plan


def plan_streaming(
    model: Any,
    checkpoint: Checkpoint,
    plan: Plan,
    budget: Budget,
    *,
    only: Collection[str] | None = None,
) -> StreamPlan:
    """Decide where the packed weights of a model are kept. Nothing but headers is read.

    The machine is taken to be a typical one: weights go where they would on any other. `StreamPlan.on` says
    how long a token takes on it.

    Parameters
    ----------
    model : PreTrainedModel
        On the `meta` device.
    checkpoint : Checkpoint
        Its files.
    plan : Plan
        Which of their tensors make up its parameters.
    budget : Budget
        Of the device, and of the host for what goes there; without `ram`, it is as much as is needed.
    only : collection of str, optional
        Parameters and buffers, packed or not, that are on this device; by default all. Its plan has what they
        need, the cache of their blocks, and the activations of the whole model.

    Raises
    ------
    OutOfMemory
        If a budget cannot work; its `least` is one that does.
    Truncated, Corrupt, UnsupportedVersion
        If the header of a packed tensor is damaged.
    """
    units = units_of(model, plan.runs, only)
    dtype = activation_dtype(model.parameters())
    demand = demand_of(model, plan.runs, budget.max_tokens, budget.max_batch, dtype, only)
    sizes = {part.name: part.extent.size for run in plan.runs.values() for part in run.parts}
    here = {
        part.name for name, run in plan.runs.items() if only is None or name in only for part in run.parts
    }
    tables = TABLES_BYTES * len(here)  # of tensors on the device; those of others are in `index`
    demand = replace(
        demand,
        plain=demand.plain + tables,
        experts=cache_least(model, plan.runs, only),
        elsewhere=sum(size for name, size in sizes.items() if name not in here),
    )
    return make_plan(units, demand, budget.vram, budget.ram, TYPICAL, calls=module_calls(model))
