"""A small GPT, trained on Python's own sources by AdamW: the states of benchmarks of deltas."""

from __future__ import annotations

import statistics
from pathlib import Path

import torch
from torch import nn


def _corpus() -> bytes:
    """Sources of the standard library, in order."""
    folder = Path(statistics.__file__).parent
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[: 4 << 20]


class Training:
    """The model and its optimizer.

    Parameters
    ----------
    width : int
        Of the model: four blocks of it.
    bf16 : bool
        Weights and Adam states in bf16, as large models are often trained; else all in fp32.
    """

    def __init__(self, width: int, *, bf16: bool = False) -> None:
        torch.manual_seed(0)
        self._text = torch.frombuffer(bytearray(_corpus()), dtype=torch.uint8).long()
        layer = nn.TransformerEncoderLayer(
            width, 6, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.model = nn.ModuleDict(
            {
                "embed": nn.Embedding(256, width),
                "place": nn.Embedding(64, width),
                "blocks": nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),
                "head": nn.Linear(width, 256),
            }
        )
        if bf16:
            self.model.bfloat16()
        self._mask = nn.Transformer.generate_square_subsequent_mask(
            64, dtype=next(self.model.parameters()).dtype
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self) -> float:
        """Take a step; returns the loss."""
        at = torch.randint(0, len(self._text) - 65, (8,))
        ids = torch.stack([self._text[i : i + 65] for i in at])
        x = self.model["embed"](ids[:, :-1]) + self.model["place"].weight
        logits = self.model["head"](self.model["blocks"](x, mask=self._mask, is_causal=True))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return float(loss.detach())

    def set_rate(self, rate: float) -> None:
        """Set the learning rate."""
        self.optimizer.param_groups[0]["lr"] = rate
