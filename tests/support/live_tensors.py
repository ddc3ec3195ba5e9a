"""Live tensors: a small module that is trained, and the bits of what holds tensors."""

from __future__ import annotations

from typing import Any

import pytest

from tpde.frameworks import torch_bytes

torch = pytest.importorskip("torch", reason="live tensors are PyTorch's")


def bits_of(state: Any) -> dict[str, bytes]:
    """Give the bytes of the tensors of a module or a mapping."""
    found = state.state_dict() if isinstance(state, torch.nn.Module) else state
    return {name: torch_bytes(it).tobytes() for name, it in found.items()}


def clones(state: dict[str, Any]) -> dict[str, Any]:
    """Give tensors of the same bits in memory of their own."""
    return {name: it.clone() for name, it in state.items()}


def small_module(seed: int = 0) -> Any:
    """Give a module of BF16, with buffers; the same one for a seed."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.BatchNorm1d(96), torch.nn.Linear(96, 8)).to(
        torch.bfloat16
    )


def train(model: Any) -> None:
    """Change a few weights by little, some tensors as a whole, and others not at all."""
    with torch.no_grad():
        first, last = model[0].weight, model[2].weight
        bits = first.view(torch.int16)
        bits.view(-1)[::37] += 1
        last.normal_()
        model[1].num_batches_tracked.add_(3)
