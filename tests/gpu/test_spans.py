"""Spans of packed weights, decoded on a GPU, from there and from the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from support.gpu import needs_cuda
from support.models import assert_same_bits, torch

import tpde
from tpde.loading import checkpoint_files as checkpoints
from tpde.loading.checkpoint_files import Checkpoint

pytestmark = needs_cuda
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("codec", ["prefix", "zstd"])
@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_cut_out_of_a_file(
    stored: Any, small: bool, codec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In three, within chunks; in experts; whole; cast or not."""
    if codec == "zstd":
        pytest.importorskip(
            "nvidia.nvcomp", reason="needs nvCOMP: pip install 'tpde[nvcomp]'", exc_type=ImportError
        )
    monkeypatch.setattr(checkpoints, "SMALL_BYTES", 1 << 40 if small else 0)
    monkeypatch.setattr("tpde.loading.runs.STRIP_BYTES", 1)
    plain = (torch.randn(4, 3 * 331, 1003) * 0.02).to(stored)
    save_file({"w": plain}, tmp_path / "plain.safetensors")
    tpde.pack(tmp_path / "plain.safetensors", tmp_path / "packed.safetensors", codec=codec)
    with Checkpoint([tmp_path / "packed.safetensors"]) as checkpoint:
        run = checkpoint.packed["w"].run
        for dtype in (None, torch.float32):
            expected = plain if dtype is None else plain.to(dtype)
            for made, parts in (
                (torch.chunk(run, 3, dim=1), expected.view(torch.uint8).chunk(3, dim=1)),
                (torch.unbind(run), expected.view(torch.uint8).unbind()),
                ((run,), (expected.view(torch.uint8),)),
            ):
                found = checkpoint.decode(made, GPU, dtype)
                for tensor, part in zip(found, parts, strict=True):
                    assert tensor.device == GPU
                    assert tensor.data_ptr() % 512 == 0
                    assert_same_bits(tensor.view(torch.uint8).cpu(), part.contiguous())
