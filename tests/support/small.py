"""A small model of blocks, with tied weights, that needs no other library than torch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
nn = torch.nn


class Block(nn.Module):
    """Two layers and a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Tied embedding and head around blocks."""

    def __init__(self, width: int = 64, words: int = 200, blocks: int = 3, block: Any = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(blocks))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# Tokens for a model, and what a block of it takes.
IDS = torch.arange(14).reshape(2, 7)
X = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
