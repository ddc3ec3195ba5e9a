"""Drafts that take matrices of the packed model whose tokens they guess."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.models import torch
from support.vllm import close, engine, generate, generated, layers, save_llama

from tpde.errors import InvalidInput

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make test-vllm` runs these")

Models = dict[str, Path]
TPDE = {"quantization": "tpde"}


def save_eagle(directory: Path) -> Path:
    """An EAGLE draft of one layer, for a Llama of 256 columns, with neither embeddings nor a head."""
    from safetensors.torch import load_file, save_file

    save_llama(directory, seed=3)
    tensors = {
        name.removeprefix("model."): it
        for name, it in load_file(directory / "model.safetensors").items()
        if ".layers.0." in name and "input_layernorm" not in name
    }
    tensors["fc.weight"] = torch.eye(256, 512).bfloat16()  # the embedding alone goes into the layer
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return directory


@pytest.mark.quick
@pytest.mark.parametrize("draft", [{}, TPDE], ids=["plain", "packed"])
def test_a_draft_without_embeddings_has_the_models(
    models: Models, tmp_path: Path, draft: dict[str, Any]
) -> None:
    """vLLM compares how many columns they have. With others every guess was rejected, without a word."""
    how = {"method": "eagle", "model": str(save_eagle(tmp_path)), "num_speculative_tokens": 2}
    llm = engine(models["llama"], speculative_config=how | draft, **TPDE)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    found, drafts = layers(llm), runner.drafter.model
    assert found["model.embed_tokens"].weight.data.dtype is torch.uint8
    assert drafts.model.embed_tokens is found["model.embed_tokens"]
    assert drafts.lm_head is found["lm_head"]
    assert generate(llm)
    close(llm)


@pytest.mark.quick
@pytest.mark.parametrize("late", [False, True])
def test_a_packed_draft_of_a_plain_model(
    late: bool, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM makes an EAGLE draft's configuration when it has a loader: that is ours only if it was before."""
    from vllm.model_executor import model_loader

    from tpde.integrations.vllm import internals, loader

    how = {"method": "eagle", "model": str(save_eagle(tmp_path)), "num_speculative_tokens": 2}
    if not late:
        loader.register()
        found = generated(models["llama"], speculative_config=how | TPDE)
        assert found == generated(models["llama"], speculative_config=how)
        return
    monkeypatch.setitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, "auto", model_loader.DefaultModelLoader)
    monkeypatch.setattr(loader, "_registered", True)
    monkeypatch.setattr(internals, "_ours_loads", False)
    with pytest.raises(InvalidInput, match="vLLM reads it by a loader that cannot") as told:
        engine(models["llama"], speculative_config=how | TPDE)
    assert "`--quantization tpde`, too" in str(told.value.hint)
