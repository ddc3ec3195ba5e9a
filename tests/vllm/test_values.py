"""Values that come for what is packed already, and values that are asked for: refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.vllm import close, engine, generate

from tpde.errors import InvalidInput, PackedWeight

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make test-vllm` runs these")

Models = dict[str, Path]
TPDE = {"quantization": "tpde"}


@pytest.mark.parametrize("name", ["llama", "tied"])
def test_values_for_what_serves(models: Models, name: str) -> None:
    """As models load them from files, in whichever way; what there was serves on."""
    from safetensors.torch import load_file

    llm = engine(models[name], **TPDE)
    before = generate(llm)
    for named in load_file(models[name] / "model.safetensors").items():
        if named[1].dim() == 2:
            with pytest.raises(PackedWeight, match="is packed, and serves; vLLM was asked to load"):
                llm.apply_model(lambda model, named=named: model.load_weights([named]))
    assert generate(llm) == before
    close(llm)


@pytest.mark.parametrize("name", ["llama", "experts", "llama-packed"])
def test_a_tensor_of_two_files(models: Models, name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(models[name], tmp_path / "model")
    twice = "model.layers.0.self_attn.o_proj.weight"
    value = load_file(models[name.removesuffix("-packed")] / "model.safetensors")[twice]
    save_file({twice: value}, tmp_path / "model" / "model-other.safetensors")
    with pytest.raises(InvalidInput, match=f"tensor `{twice}` came twice: .*; remove the file"):
        engine(tmp_path / "model", **TPDE)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("name", ["llama", "experts"])
def test_saving_what_is_in_memory(models: Models, name: str, load_format: str, tmp_path: Path) -> None:
    llm = engine(models[name], load_format=load_format, **TPDE)
    before = generate(llm)
    with pytest.raises(PackedWeight, match="is packed, and vLLM was asked for the model's tensors"):
        llm.collective_rpc("save_sharded_state", kwargs={"path": str(tmp_path)})
    assert not list(tmp_path.iterdir())
    assert generate(llm) == before
    close(llm)
