"""Fine-tunes of small models: some words of most weights moved by a little, and all of some."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tuned(model: Any, seed: int, share: float = 0.035, dense: int = 7) -> Any:
    """Give a copy of a model of which every fifth parameter is the same, and every `dense`th all another."""
    made, draw = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for number, it in enumerate(made.parameters()):
            bits = it.view(WORDS[it.element_size()])
            if number % dense == seed % dense:
                bits += torch.randint(0, 9, bits.shape, generator=draw).to(bits)
            elif number % 5 != seed % 5:
                at = (torch.rand(bits.shape, generator=draw) < share).to(bits.device)
                bits[at] += torch.randint(1, 4, (int(at.sum()),), generator=draw).to(bits)  # no NaN
    return made
