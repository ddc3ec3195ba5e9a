"""Models of diffusers under a budget of device memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tpde.errors import InvalidInput
from tpde.integrations.checkpoint import Stored
from tpde.integrations.runs import Run
from tpde.integrations.streaming.demand import FIXED_BYTES, TYPICAL, module_calls, plain_bytes
from tpde.integrations.streaming.loading import Streaming
from tpde.integrations.streaming.units import TABLES_BYTES, units_of
from tpde.streaming.budget import Budget
from tpde.streaming.plan import Demand, make_plan


def check_gpu(device: torch.device) -> None:
    """Refuse a budget of GPU memory where a model goes elsewhere.

    Raises
    ------
    InvalidInput
        If the device is not a GPU.
    """
    if device.type != "cuda":
        raise InvalidInput(
            f"`vram` is a budget of GPU memory, but the model goes to `{device}`",
            hint='pass `device="cuda"`, or leave out `vram`',
            where="vram",
        )


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
    tables = TABLES_BYTES * len({part.name for run in runs.values() for part in run.parts})
    plain = plain_bytes(model, runs) + tables
    demand = Demand(plain, 0, budget.activations, FIXED_BYTES, argument="`activations`")
    units, calls = units_of(model, runs), module_calls(model)
    streaming = Streaming(budget, whole=False)
    streaming.decide(device, lambda size: make_plan(units, demand, size, budget.ram, TYPICAL, calls=calls))
    return streaming
