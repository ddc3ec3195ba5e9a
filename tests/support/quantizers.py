"""Quantizers that know nothing yet, models that a test may spoil, and a machine whose GPUs are made up."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from support.budgets import Opened, SimulatedMachine
from support.checkpoints import Pair
from tpde.integrations.transformers.config import TpdeConfig
from tpde.integrations.transformers.load_target import loading_to
from tpde.integrations.transformers.quantizer import TpdeHfQuantizer
from tpde.planning.budget import Budget


def made(target: Any = None, budget: Budget | None = None) -> TpdeHfQuantizer:
    with nullcontext() if target is None else loading_to(target, budget):
        return TpdeHfQuantizer(TpdeConfig(), pre_quantized=True)


def copied(pair: Pair, to: Path) -> Path:
    """A folder of one's own, and its file of weights."""
    return shutil.copytree(pair.packed, to / "copy") / "model.safetensors"


class GpuMachine(SimulatedMachine):
    """One with some GPUs, of which nothing is opened; notes which are asked for."""

    def __init__(self) -> None:
        super().__init__(Opened())
        self.asked: list[int | None] = []
        self.count = 2

    def gpu(self, number: int | None = None) -> Any:
        self.asked.append(number)
        return torch.device("cuda", number or 0) if (number or 0) < self.count else None
