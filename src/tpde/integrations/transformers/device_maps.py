"""Where a device map puts packed weights, and how much memory they need there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tpde.errors import InvalidInput
from tpde.files.forward_order import block_of
from tpde.loading.devices import checked_device, map_entry


def device_of(name: str, device_map: Mapping[str, Any] | None) -> torch.device:
    """Where a device map puts a parameter; the CPU if there is none.

    Raises
    ------
    InvalidInput
        If it says nothing of the parameter, or would have it moved before each use.
    UnsupportedDevice
        If it names a GPU without a number, and there is none.
    """
    device_map = device_map or {"": "cpu"}
    path = map_entry(name, device_map)
    if path is None:
        raise InvalidInput(
            f"`device_map` has no place for `{name}`", hint="add it, or an entry for its module", where=name
        )
    found = device_map[path]
    gpus = sorted({str(it) for it in device_map.values()} - {"cpu", "disk"})
    if str(found) == "disk" or (str(found) == "cpu" and gpus):
        raise InvalidInput(
            f"`device_map` puts `{path or 'the model'}` on {found} beside {', '.join(gpus) or 'cpu'}",
            hint=(
                "packed weights are decoded where they are: use GPUs with room for all of them, or the CPU "
                "for all"
            ),
        )
    device = torch.device(f"cuda:{found}" if isinstance(found, int) else found)
    if device.type == "cuda" and device.index is None:
        device = checked_device(device)
    return device


def devices_of(model: nn.Module, device_map: Mapping[str, Any] | None) -> dict[str, torch.device]:
    """Where parameters and buffers go; without those that the map says nothing of, such as tied ones.

    Raises
    ------
    InvalidInput, UnsupportedDevice
        As `device_of`.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in model.named_buffers()]
    found = device_map or {"": "cpu"}
    return {name: device_of(name, found) for name in names if map_entry(name, found) is not None}


def spread(
    max_memory: Mapping[Any, Any], model: Any, element_size: Callable[[Any, str, Any], float]
) -> dict[Any, Any]:
    """Memory limits that let accelerate divide a model evenly over GPUs, however large it is.

    Parameters
    ----------
    max_memory : mapping
        As accelerate made it; its GPUs are taken.
    model : PreTrainedModel
        Whose weights are to be spread, in its own order.
    element_size : callable
        What an element of a parameter takes; called with the model, a name and the parameter.
    """
    gpus = [key for key, value in max_memory.items() if isinstance(key, int) and value]
    sizes = {name: int(it.numel() * element_size(model, name, it)) for name, it in model.named_parameters()}
    # accelerate leaves room for the largest block on the first.
    share, block = sum(sizes.values()) // max(len(gpus), 1), largest_block(sizes)
    out = {gpu: share + (2 * block if i == 0 else block // 2) for i, gpu in enumerate(gpus)}
    if gpus:
        out[gpus[-1]] = 1 << 60
    return out


def largest_block(sizes: Mapping[str, int]) -> int:
    """Bytes of the largest transformer block, or parameter outside of blocks, by the parameters' sizes."""
    blocks: dict[str, int] = {}
    for name, size in sizes.items():
        where = block_of(name) or name
        blocks[where] = blocks.get(where, 0) + size
    return max(blocks.values(), default=0)
