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

Inputs = Callable[[], dict[str, Any]]


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
    inputs: Inputs
    prompt: Inputs | None = None
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


def described(family: str, inputs: Inputs, prompt: Inputs | None = None) -> Callable[..., Architecture]:
    """Give what describes models of transformers that are called alike.

    It takes a model's name and class, the type of its configuration if that is not the name, and options.
    """

    def describe(name: str, model: str, kind: str | None = None, **overrides: Any) -> Architecture:
        def build() -> Any:
            import transformers

            if not hasattr(transformers, model):
                raise Absent(f"this transformers has no {model}")
            return getattr(transformers, model)(tiny(kind or name, **overrides))

        return Architecture(name, family, build, inputs, prompt)

    return describe


decoder = described("decoder", left_padded, left_padded)
