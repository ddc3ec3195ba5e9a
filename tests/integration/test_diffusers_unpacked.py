"""Components of diffusers that are packed, and unpacked, in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.diffusion import diffusers, noise, packed_folder, same_bits, torch, unet
from support.plain_damage import damage_plain

import tpde
from tpde.errors import Corrupt
from tpde.integrations.diffusers import load
from tpde.nn import packed_modules

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
KIND = diffusers.UNet2DModel


def _by_diffusers(folder: Path) -> Any:
    return KIND.from_pretrained(folder, torch_dtype=torch.bfloat16)


def _is_plain(folder: Path) -> bool:
    files = list(folder.glob("*.safetensors"))
    named = "quantization_config" in json.loads((folder / "config.json").read_text())
    return not named and not any(b"_tpde" in it.read_bytes() for it in files)


@pytest.mark.parametrize("undo", [tpde.unpack_module, lambda model: model.dequantize()])
@pytest.mark.parametrize("by", [_by_diffusers, lambda folder: load(KIND, folder)])
def test_an_unpacked_component_is_an_ordinary_one(
    by: Callable[..., Any], undo: Callable[..., Any], tmp_path: Path
) -> None:
    plain = unet()
    model = by(packed_folder(plain, tmp_path))
    assert list(packed_modules(model))
    undo(model)
    model.save_pretrained(tmp_path / "unpacked")
    assert _is_plain(tmp_path / "unpacked")
    names = ("hf_quantizer", "is_quantized", "quantization_method", "quantization_config")
    assert not any(it in model.__dict__ or it in model.config for it in names)
    dtype = torch.bfloat16 if plain.dtype is torch.float32 else torch.float32
    assert model.to(dtype).dtype is dtype
    assert model.half().dtype is torch.float16
    assert list(packed_modules(tpde.pack_module(model, min_bytes=0)))


@pytest.mark.parametrize("whole", [True, False])
def test_a_component_that_was_packed_in_memory_is_saved_packed(whole: bool, tmp_path: Path) -> None:
    plain, model = unet(), unet()
    tpde.pack_module(model if whole else torch.nn.ModuleDict({"unet": model}), min_bytes=0)
    model.save_pretrained(tmp_path / "packed")
    assert not _is_plain(tmp_path / "packed")
    found = _by_diffusers(tmp_path / "packed")
    assert list(packed_modules(found))
    with torch.no_grad():
        assert same_bits(*(it(noise(2, 3, 8, 8), 10).sample for it in (found, plain)))
    tpde.unpack_module(model)
    assert all(model.config[name] == value for name, value in plain.config.items())
    model.save_pretrained(tmp_path / "plain")
    assert _is_plain(tmp_path / "plain")


@pytest.mark.parametrize("by", [_by_diffusers, lambda folder: load(KIND, folder)])
def test_damage_in_what_is_stored_plain_is_found(by: Callable[..., Any], tmp_path: Path) -> None:
    """diffusers reads it from the file by itself."""
    folder = packed_folder(unet(), tmp_path)
    (path,) = folder.glob("*.safetensors")
    name = damage_plain(path, "norm")
    with pytest.raises(Corrupt, match=name):
        by(folder)
