"""Linear layers whose weights are in the window layout, to be multiplied as they are packed."""

from __future__ import annotations

import copy
from typing import Any

from support.small import nn, torch
from tpde.nn import PackedTensor, pack_module, packed_modules, set_kernels


def layer(rows: int = 96, columns: int = 64, dtype: Any = torch.bfloat16, bias: bool = True) -> Any:
    """Give a plain layer; the same one each time."""
    torch.manual_seed(rows + columns)
    made = nn.Linear(columns, rows, bias=bias)
    with torch.no_grad():
        made.weight.normal_(0, 0.02)
    return made.to(dtype)


def fuse(module: Any) -> Any:
    """Give a copy that is packed, and whose weights are multiplied as they are."""
    return set_kernels(pack_module(copy.deepcopy(module), min_bytes=0), "fused")


def weights(model: Any) -> list[PackedTensor]:
    """Give a model's packed weights, by name."""
    found = {slot.packed for _, module in packed_modules(model) for slot in module.tpde_slots.values()}
    return sorted(found, key=lambda it: it.name)
