"""Models of diffusers under a budget of device memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tpde.errors import InvalidInput
from tpde.integrations.checkpoint import Checkpoint, Stored
from tpde.integrations.runs import Run
from tpde.integrations.streaming.demand import FIXED_BYTES, TYPICAL, module_calls, plain_bytes
from tpde.integrations.streaming.loading import Streaming
from tpde.integrations.streaming.units import units_of
from tpde.materialize import PackedTensor
from tpde.streaming.plan import Demand, make_plan
from tpde.streaming.sizes import parse_size


def stream(
    model: Any,
    checkpoint: Checkpoint,
    packed: Mapping[str, Stored],
    device: torch.device,
    vram: int | str,
    ram: int | str | None,
    activations: int | str,
) -> dict[str, list[tuple[PackedTensor, int]]]:
    """Plan where packed weights are kept, and bring them there.

    Returns
    -------
    dict of str to list of (PackedTensor, int)
        The parts of those parameters that are packed. The others are plain parameters of the model now.

    Raises
    ------
    InvalidInput
        If a budget is no size, or the device is not a GPU.
    OutOfMemory
        If a budget cannot work.
    """
    if device.type != "cuda":
        raise InvalidInput(
            f'`vram` is a budget of GPU memory, but the model goes to `{device}`; pass `device="cuda"`, or '
            "leave out `vram`"
        )
    host = None if ram is None else parse_size(ram)
    runs = {name: Run(it.spec.shape, it.dtype, [it]) for name, it in packed.items()}
    demand = Demand(plain_bytes(model, runs), 0, parse_size(activations), FIXED_BYTES)
    streaming = Streaming(parse_size(vram))
    units, calls = units_of(model, runs), module_calls(model)
    try:
        streaming.decide(device, lambda size: make_plan(units, demand, size, host, TYPICAL, calls=calls))
        parts = streaming.load(model, checkpoint, runs, dict.fromkeys(packed, device))
    except BaseException:
        streaming.close()
        raise
    model.tpde_streamer = streaming
    return parts
