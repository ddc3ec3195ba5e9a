"""What the zoo knows of an architecture: how to make a model, and what it is called with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .shrink import Absent, tiny

DTYPES = ("bf16", "fp16", "fp32")
SEED = 20
LENGTH = 7
PADDED = 3  # tokens of padding at the left of the first row


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    `build` gives a model in fp32 with whatever weights, `inputs` a dict of what its forward pass takes, for a
    batch of two; floating-point inputs are cast to the model's dtype. `prompt` is what `generate` takes, None
    if the model does not generate. `library` decides how it is saved and loaded.
    """

    name: str
    family: str
    build: Callable[[], Any]
    inputs: Callable[[Any], dict[str, Any]]
    prompt: Callable[[Any], dict[str, Any]] | None = None
    library: str = "transformers"


def ids(batch: int = 2, length: int = LENGTH, low: int = 3, high: int = 290) -> Any:
    """Give tokens, none of them special."""
    import torch

    draw = torch.Generator().manual_seed(batch * 1000 + length)
    return torch.randint(low, high, (batch, length), generator=draw)


def noise(*shape: int) -> Any:
    """Give normal numbers."""
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def left_padded() -> dict[str, Any]:
    """Give a prompt of two rows, the first with padding at its left."""
    import torch

    tokens, mask = ids(), torch.ones(2, LENGTH, dtype=torch.long)
    tokens[0, :PADDED] = 0
    mask[0, :PADDED] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def from_config(model: str, config: Callable[[], Any]) -> Callable[[], Any]:
    """Give what builds a transformers model of a class from a configuration."""

    def build() -> Any:
        import transformers

        if not hasattr(transformers, model):
            raise Absent(f"this transformers has no {model}")
        return getattr(transformers, model)(config())

    return build


def decoder(name: str, model: str, kind: str | None = None, **overrides: Any) -> Architecture:
    """Describe a causal language model."""
    return Architecture(
        name,
        "decoder",
        from_config(model, lambda: tiny(kind or name, **overrides)),
        lambda _: left_padded(),
        lambda _: left_padded(),
    )
