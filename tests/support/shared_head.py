"""Models whose files hold a head that may be tied, and workers that tell whether it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class Shared:
    """What workers can do beside: an engine's `worker_extension_cls`."""

    model_runner: Any

    def shares(self) -> bool:
        """Whether both are packed, in one matrix."""
        model = self.model_runner.model
        head, embedding = (it.__dict__["tpde"].packed for it in (model.lm_head, model.model.embed_tokens))
        return head is not None and head is embedding


def with_head(model: Path, at: Path, change: Callable[[Any], Any] = lambda it: it) -> Path:
    """A tied model with a head in its files: what a function makes of a copy of the embedding."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, at)
    tensors = load_file(at / "model.safetensors")
    tensors[HEAD] = change(tensors[EMBEDDING].clone())
    save_file(tensors, at / "model.safetensors", {"format": "pt"})
    return at
