"""Packed weights of their own, as parameters."""

from __future__ import annotations

from typing import Any

from support.small import torch
from tpde.nn import PackedParameter, pack_tensor

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def draw(*shape: int, dtype: Any = torch.bfloat16, seed: int = 0) -> Any:
    """Give normal values, the same ones each time."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def packed(weight: Any, requires_grad: bool = True) -> PackedParameter:
    """Give a weight packed, called `w`."""
    made = pack_tensor(weight, "w")
    assert made is not None
    return PackedParameter(made, requires_grad)
