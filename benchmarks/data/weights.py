"""Synthetic weights: normal, with a scale that varies by row, as the weights of models are."""

from __future__ import annotations

from typing import Any

import numpy as np


def normal(seed: int, rows: int = 8192, columns: int = 4096) -> Any:
    """Weights as the field's table has them: normal, with a per-row scale 0.02 * exp(0.3 * normal), fp32."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    return values * (0.02 * torch.exp(0.3 * torch.randn(rows, 1, generator=generator)))


def to_e4m3(values: Any, block: int = 128) -> Any:
    """Scale each 128x128 block's absolute maximum to 448 and cast to `torch.float8_e4m3fn`."""
    import torch

    rows, columns = values.shape
    blocks = values.view(rows // block, block, columns // block, block)
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
    return (blocks / scale).to(torch.float8_e4m3fn).reshape(rows, columns)


def tensor_bytes(tensor: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of a tensor, without a copy."""
    import torch

    flat: np.ndarray[Any, np.dtype[np.uint8]] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


def on_device(rows: int, columns: int, dtype: Any) -> Any:
    """A matrix of them on the GPU, the same for the same shape."""
    import torch

    draw = torch.Generator("cuda").manual_seed(rows + columns)
    scale = 0.02 * torch.exp(0.3 * torch.randn((rows, 1), device="cuda", generator=draw))
    return (torch.randn((rows, columns), device="cuda", generator=draw) * scale).to(dtype)
