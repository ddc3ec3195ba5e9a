"""Models of diffusers under a budget of device memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tpde.loading.budgeted import Streaming
from tpde.loading.checkpoint_files import Stored
from tpde.loading.footprint import FIXED_BYTES, plain_bytes
from tpde.loading.model_plan import place_units
from tpde.loading.runs import Run
from tpde.planning.budget import Budget
from tpde.planning.units import Footprint


def planned(
    model: Any,
    runs: Mapping[str, Run[Stored]],
    device: torch.device,
    budget: Budget,
) -> Streaming:
    """Decide where packed weights are kept. Nothing is read but headers.

    Parameters
    ----------
    model : nn.Module
        Its parameters on the `meta` device, in the dtypes that they will have.
    runs : mapping of str to Run
        Those that are packed.
    device : torch.device
        A GPU, with its number.
    budget : Budget
        Of this model: others come on top.

    Raises
    ------
    OutOfMemory
        If a budget is not free, or cannot work.
    """
    footprint = Footprint(
        plain_bytes(model, runs), 0, budget.activations, FIXED_BYTES, argument="`activations`"
    )
    streaming = Streaming(budget, whole=False)
    streaming.decide(device, lambda vram: place_units(model, runs, footprint, vram, budget.ram))
    return streaming
