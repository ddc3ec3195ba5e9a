"""Which dtype diffusers gives a weight."""

from __future__ import annotations

from collections.abc import Collection

import torch


def expected_dtype(kept: Collection[str] | None, name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype that diffusers gives a weight, by what a class keeps in 32 bits."""
    return torch.float32 if set(kept or ()) & set(name.split(".")) else dtype
