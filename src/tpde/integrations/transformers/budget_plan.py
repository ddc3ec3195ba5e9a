"""Planning where the weights of a transformers model are kept."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from tpde.integrations.transformers.expert_modules import cache_least
from tpde.integrations.transformers.model_footprint import activation_dtype, footprint_of
from tpde.integrations.transformers.weight_map import WeightMap
from tpde.loading.checkpoint_files import Checkpoint
from tpde.loading.model_plan import place_units
from tpde.planning.budget import Budget
from tpde.planning.stream_plan import StreamPlan


def plan_streaming(
    model: Any,
    checkpoint: Checkpoint,
    weights: WeightMap,
    budget: Budget,
    *,
    only: Collection[str] | None = None,
    fused: Collection[str] = (),
) -> StreamPlan:
    """Decide where the packed weights of a model are kept: see `place_units`.

    Parameters
    ----------
    model : PreTrainedModel
        On the `meta` device.
    checkpoint : Checkpoint
        Its files.
    weights : WeightMap
        Which of their tensors make up its parameters.
    budget : Budget
        Of the device, and of the host for what goes there; without `ram`, it is as much as is needed.
    only : collection of str, optional
        Parameters and buffers, packed or not, that are on this device; by default all. Its plan has what they
        need, the cache of their blocks, and the activations of the whole model.
    fused : collection of str
        Parameters that linear layers may multiply from the window layout: `fused_names`.

    Raises
    ------
    OutOfMemory
        If a budget cannot work; its `least` is one that does.
    Truncated, Corrupt, UnsupportedVersion
        If the header of a packed tensor is damaged.
    """
    dtype = activation_dtype(model.parameters())
    footprint = footprint_of(model, weights.runs, budget.max_tokens, budget.max_batch, dtype, only)
    sizes = {part.name: part.extent.size for run in weights.runs.values() for part in run.parts}
    here = {
        part.name for name, run in weights.runs.items() if only is None or name in only for part in run.parts
    }
    footprint = replace(
        footprint,
        experts=cache_least(model, weights.runs, only),
        elsewhere=sum(size for name, size in sizes.items() if name not in here),
    )
    return place_units(model, weights.runs, footprint, budget.vram, budget.ram, only, fused)
