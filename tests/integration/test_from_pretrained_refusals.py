"""`tpde.from_pretrained` refuses what it cannot load, and says why."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.checkpoints import checkpoint
from support.models import VOCAB, inputs, torch
from support.plain_damage import damage_plain

import tpde
from tpde.errors import (
    Corrupt,
    InvalidArgument,
    InvalidInput,
    MissingShard,
    NotPacked,
    Truncated,
    UnsupportedDevice,
    UnsupportedVersion,
)
from tpde.files.reader import PackedFile
from tpde.format.constants import SUFFIX

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")


def test_a_plain_directory(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "llama")
    with pytest.raises(NotPacked, match="tpde pack"):
        tpde.from_pretrained(pair.plain)
    with pytest.raises(InvalidInput, match="does not exist"):
        tpde.from_pretrained(tmp_path / "nowhere" / "at all")
    with pytest.raises(InvalidInput, match="is a file"):
        tpde.from_pretrained(pair.packed / "model.safetensors")
    (pair.packed / "config.json").unlink()
    with pytest.raises(InvalidInput, match=r"no `config\.json`"):
        tpde.from_pretrained(pair.packed)


def test_a_config_that_lies(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "llama")
    (pair.packed / "model.safetensors").write_bytes((pair.plain / "model.safetensors").read_bytes())
    with pytest.raises(NotPacked, match="no tensor"):
        tpde.from_pretrained(pair.packed)
    config = json.loads((pair.packed / "config.json").read_text())
    config["quantization_config"]["version"] = 9
    (pair.packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedVersion, match="version 9"):
        tpde.from_pretrained(pair.packed)
    config["quantization_config"] = {"quant_method": "tpde", "version": 1, "source": {"quant_method": "fp8"}}
    (pair.packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidInput, match="quantized with `fp8`"):
        tpde.from_pretrained(pair.packed)
    config["quantization_config"].pop("source")
    (pair.packed / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchModel"]}))
    with pytest.raises(InvalidInput, match="model_class"):
        tpde.from_pretrained(pair.packed)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00002-of-*.safetensors"])
def test_a_weight_file_is_missing(name: str, tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "llama", **({"max_shard_size": "100KB"} if "*" in name else {}))
    (gone,) = pair.packed.glob(name)
    gone.unlink()
    with pytest.raises(MissingShard, match=rf"{gone.name}` does not exist, so that weights are missing"):
        tpde.from_pretrained(pair.packed)


def test_another_shape(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "llama")
    config = json.loads((pair.packed / "config.json").read_text())
    (pair.packed / "config.json").write_text(json.dumps(config | {"vocab_size": VOCAB + 1}))
    with pytest.raises(InvalidInput, match=rf"shape \[{VOCAB}, 64\].*needs \[{VOCAB + 1}, 64\]"):
        tpde.from_pretrained(pair.packed)


def _blob(path: Path, name: str) -> tuple[int, int, int]:
    """Where a blob lies in a file: its start, its first chunk, its end."""
    with PackedFile(path) as file:
        entry = file.container.entries[name + SUFFIX]
        header = file.tensor(name).blob.header
        start = file.container.data_start + entry.begin
        return start, start + header.chunks_at, start + header.blob_bytes


@pytest.mark.parametrize("where", ["header", "tables", "chunks"])
def test_damage(where: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "llama").packed / "model.safetensors"
    name = "model.layers.1.mlp.up_proj.weight"
    start, chunks, end = _blob(path, name)
    at = {"header": start + 70, "tables": chunks - 40, "chunks": (chunks + end) // 2}[where]
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)
    if where != "chunks":  # noticed while loading
        with pytest.raises(Corrupt, match=r"layers\.1\.mlp\.up_proj"):
            tpde.from_pretrained(path.parent)
        return
    packed = tpde.from_pretrained(path.parent)
    with torch.no_grad(), pytest.raises(Corrupt) as caught:
        packed(**inputs("llama", 1, 4))
    assert (caught.value.tensor, caught.value.chunk) == (name, 0)


def test_damage_in_what_is_stored_plain(tmp_path: Path) -> None:
    """transformers reads it from the file by itself."""
    path = checkpoint(tmp_path, "llama").packed / "model.safetensors"
    name = damage_plain(path, "post_attention_layernorm")
    with pytest.raises(Corrupt, match=rf"tensor `{name}`: the bytes hash to") as caught:
        tpde.from_pretrained(path.parent)
    assert caught.value.tensor == name


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "llama").packed / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(Truncated):
        tpde.from_pretrained(path.parent)


def test_devices(tmp_path: Path) -> None:
    packed = checkpoint(tmp_path, "llama").packed
    with pytest.raises(UnsupportedDevice, match="not on `meta`"):
        tpde.from_pretrained(packed, "meta")
    with pytest.raises(UnsupportedDevice, match="is no device"):
        tpde.from_pretrained(packed, "gpu")
    with pytest.raises(InvalidInput, match="one of them"):
        tpde.from_pretrained(packed, "cpu", device_map={"": "cpu"})
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedDevice, match=r'device="cpu"`.*tpde doctor'):
            tpde.from_pretrained(packed, "cuda")


def test_keywords_that_nobody_knows(tmp_path: Path) -> None:
    packed = checkpoint(tmp_path, "llama").packed
    for name, meant in (("kernel", "kernels"), ("delta", "deltas"), ("maxtokens", "max_tokens")):
        with pytest.raises(InvalidArgument, match=rf"takes `{name}`; did you mean `{meant}`") as caught:
            tpde.from_pretrained(packed, "cpu", **{name: "x"})
        assert caught.value.where == name
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        tpde.from_pretrained(packed, "cpu", colour="x")
    assert not tpde.from_pretrained(packed, "cpu", use_cache=False).config.use_cache  # of the configuration


def test_a_transformers_too_old_or_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpde.errors import MissingDependency
    from tpde.integrations.transformers.require import require_transformers

    for version in ("4.57.1", "5.12.1", "5.9", "unknown"):
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
        with pytest.raises(MissingDependency, match=rf"{version} is too old, 5\.13 .*pip install --upgrade"):
            require_transformers()
    for version in ("5.13.0", "5.23.0.dev0", "6.0"):
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
        require_transformers()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependency, match=r'pip install "tpde\[transformers\]"'):
        require_transformers()


def test_code_that_comes_with_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is not run unasked; the file that names it is not said to be damaged."""
    folder = checkpoint(tmp_path, "llama").packed
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit(1)")
    monkeypatch.setattr("builtins.input", lambda *_: "n")
    with pytest.raises(InvalidInput) as caught:
        tpde.from_pretrained(folder, model_class=transformers.AutoModel)
    assert "trust_remote_code=True" in str(caught.value.hint)
    assert "fetch" not in str(caught.value.hint)
