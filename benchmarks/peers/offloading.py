"""Libraries that keep a plain model in host memory, and bring its weights to the device as they are used."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


def accelerate_offload() -> Callable[[Any], Any]:
    """Offload by accelerate's `cpu_offload`."""
    import torch
    from accelerate import cpu_offload

    where = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    return lambda model: cpu_offload(model, execution_device=where)


def diffusers_offload() -> Callable[[Any], Any]:
    """Offload by diffusers' groups, with streams."""
    import torch
    from diffusers.hooks.group_offloading import apply_group_offloading

    def install(model: Any) -> Any:
        offload = partial(
            apply_group_offloading,
            onload_device=torch.device("cuda:0"),
            offload_device=torch.device("cpu"),
            non_blocking=True,
            use_stream=True,
        )
        # Blocks are looked for among a module's own children: the decoder's, then the rest leaf by leaf.
        offload(model.model, offload_type="block_level", num_blocks_per_group=1)
        offload(model.lm_head, offload_type="leaf_level")
        return model

    return install


OFFLOADING: dict[str, Callable[[], Callable[[Any], Any]]] = {
    "accelerate cpu_offload": accelerate_offload,
    "diffusers group offload, streams": diffusers_offload,
}
