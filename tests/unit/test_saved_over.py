"""Folders that were packed, and then saved over: their manifests are of what was there before."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import tpde
from tpde.errors import NotPacked

torch = pytest.importorskip("torch", reason="needs torch, of `tpde[torch]`")
transformers = pytest.importorskip("transformers", reason="needs transformers, of `tpde[transformers]`")
IDS = [[1, 2, 3, 4]]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "plain")
    tpde.pack(tmp_path / "plain", tmp_path / "packed")
    return tmp_path / "packed"


def changed(packed: Path) -> Any:
    """The model with another activation, which its configuration alone says."""
    model = tpde.from_pretrained(packed)
    model.config.hidden_act = "gelu"
    return model


def activation(folder: Path) -> str:
    said: str = json.loads((folder / "config.json").read_text())["hidden_act"]
    return said


def test_saved_packed(packed: Path, tmp_path: Path) -> None:
    changed(packed).save_pretrained(packed)
    assert (packed / "tpde_manifest.json").exists()
    assert tpde.verify(packed) == []
    tpde.unpack(packed, tmp_path / "restored")
    assert activation(tmp_path / "restored") == "gelu"
    assert not (tmp_path / "restored" / "tpde_manifest.json").exists()
    models = (tpde.from_pretrained(packed), transformers.AutoModel.from_pretrained(tmp_path / "restored"))
    wanted, found = (it.get_input_embeddings()(torch.tensor(IDS)) for it in models)
    assert torch.equal(wanted.view(torch.int32), found.view(torch.int32))


def test_saved_plain(packed: Path, tmp_path: Path) -> None:
    tpde.unpack_module(changed(packed)).save_pretrained(packed)
    for refuse in (tpde.verify, lambda it: tpde.unpack(it, tmp_path / "never")):
        with pytest.raises(NotPacked, match="saved again"):
            refuse(packed)
    tpde.pack(packed, tmp_path / "again")
    assert tpde.verify(tmp_path / "again", against=packed) == []
    tpde.unpack(tmp_path / "again", tmp_path / "restored")
    assert activation(tmp_path / "restored") == "gelu"
    assert not (tmp_path / "restored" / "tpde_manifest.json").exists()


@pytest.mark.parametrize(
    "damage", ["plain weights", "weights saved again", "configuration", "no weights", "version"]
)
def test_damage_is_no_saving(packed: Path, tmp_path: Path, damage: str) -> None:
    """Weights and configuration are saved together; of one alone the manifest goes on to tell."""
    other = tmp_path / "other"
    tpde.from_pretrained(packed).save_pretrained(other)
    if damage == "plain weights":
        data = bytearray((tmp_path / "plain" / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (packed / "model.safetensors").write_bytes(data)
    elif damage == "configuration":
        shutil.copy(tmp_path / "plain" / "config.json", packed)
    elif damage == "version":
        data = bytearray((packed / "model.safetensors").read_bytes())
        data[data.index(b'"tpde":"1"') + 4] ^= 1
        (packed / "model.safetensors").write_bytes(data)
    elif damage == "no weights":
        (packed / "model.safetensors").unlink()
    else:
        shutil.copy(other / "model.safetensors", packed)
        shutil.copy(tmp_path / "plain" / "config.json", packed)
    assert tpde.verify(packed)


def test_a_folder_that_was_saved_over_is_replaced(packed: Path, tmp_path: Path) -> None:
    """As one that was packed."""
    changed(packed).save_pretrained(packed)
    tpde.pack(tmp_path / "plain", packed, force=True)
    assert tpde.verify(packed, against=tmp_path / "plain") == []
