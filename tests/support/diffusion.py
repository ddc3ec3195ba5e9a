"""Tiny models of diffusers with random weights, and the folders of packed ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tpde import pack

torch = pytest.importorskip("torch", reason="needs torch")
diffusers = pytest.importorskip("diffusers", reason="needs diffusers")
pytest.importorskip("accelerate", reason="needs accelerate")


def unet(dtype: Any = torch.bfloat16) -> Any:
    """Give a UNet in evaluation mode; the same one each time."""
    torch.manual_seed(0)
    model = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    return model.to(dtype).eval()


def transformer() -> Any:
    """Give a transformer in evaluation mode; the same one each time."""
    torch.manual_seed(1)
    model = diffusers.PixArtTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=64,
        sample_size=8,
        caption_channels=32,
        use_additional_conditions=False,
    )
    return model.to(torch.bfloat16).eval()


def noise(*shape: int) -> Any:
    """Give what a model's forward pass takes."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)


def same_bits(a: Any, b: Any) -> bool:
    """Compare two tensors of two bytes an element as integers."""
    return bool(torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16)))


def packed_folder(model: Any, folder: Path, **options: Any) -> Path:
    """Save a model and pack it; gives where the packed one is."""
    model.save_pretrained(folder / "plain", **options)
    pack(folder / "plain", folder / "packed")
    return folder / "packed"
