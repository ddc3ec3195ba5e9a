"""Device memory that any model needs beside its packed weights, and how fast machines are."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import nn

from tpde.format.blob_header import align
from tpde.streaming.rates import given_rates

ALIGN = 512  # bytes: of the caching allocator

# What PyTorch's allocator does not give: kernels, streams, cuBLAS with its own kernels; 150 MiB on an H200.
OUTSIDE_BYTES = 176 << 20
# With cuBLAS's workspace, 32 MiB, and what allocations are rounded up by.
FIXED_BYTES = OUTSIDE_BYTES + (48 << 20)

# An H200 on PCIe 5. Where weights go depends little on rates: all that matters is what is faster than what.
TYPICAL = given_rates(copy=55e9, memory=4.2e12, disk=6e9)


def plain_bytes(model: Any, packed: Container[str], only: Container[str] | None = None) -> int:
    """Parameters and buffers that are not packed, of those that are named by `only`; tied ones once."""
    tied = getattr(model, "all_tied_weights_keys", {})
    seen: dict[int, int] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if (only is None or name in only) and name not in packed and tied.get(name) not in packed:
            seen[id(tensor)] = align(tensor.numel() * tensor.element_size(), ALIGN)
    return sum(seen.values())


def module_calls(model: nn.Module) -> int:
    """How many modules a forward pass calls: all but lists."""
    lists = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    return sum(not isinstance(module, lists) for module in model.modules())
