"""A small component of a diffusers pipeline, its class, and the files of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support.contents import fill
from support.files import pack_bytes, safetensors_bytes
from tpde.format.container import TensorSpec

STEM = "diffusion_pytorch_model"
WEIGHT = (TensorSpec("BF16", (64, 128)), fill("normal", TensorSpec("BF16", (64, 128))))


class Component(torch.nn.Module):
    """A linear layer, a norm and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(128, 64), torch.nn.LayerNorm(8192)
        self.register_buffer("places", torch.zeros(8192))


class Built:
    """A class of diffusers: of one model, or one that ends what comes after its files were looked at.

    Attributes
    ----------
    dtypes : list of torch.dtype
        The default one whenever it was built.
    """

    def __init__(self, model: Any = None) -> None:
        self.model, self.dtypes = model, list[torch.dtype]()

    def load_config(self, folder: Path) -> dict[str, Any]:
        return {}

    def from_config(self, config: dict[str, Any]) -> Any:
        self.dtypes.append(torch.get_default_dtype())
        return self.model()


def component(folder: Path, found: dict[str, TensorSpec], plain: str = "") -> Path:
    """Write the file of a component; one of its tensors does not shrink, and small ones do not."""
    tensors = {name: (it, fill("random" if name == plain else "normal", it)) for name, it in found.items()}
    (folder / f"{STEM}.safetensors").write_bytes(pack_bytes(safetensors_bytes(tensors)))
    return folder
