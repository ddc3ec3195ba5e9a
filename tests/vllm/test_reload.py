"""Other weights for a model that serves: what is generated is what an engine gives that starts with them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.models import torch
from support.vllm import close, engine, generate, generated, kernels, layers, save_llama

import tpde
from tpde.errors import InvalidInput, PackedWeight
from tpde.weights import windowing
from tpde.weights.windowed import Windowed

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make test-vllm` runs these")
from tpde.integrations.vllm import internals, refusals

NAMES = ["llama", "tied"]  # of experts that are loaded again, vLLM's CPU build makes others, plain ones too


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("others")
    return {
        "llama": save_llama(at / "llama", seed=1, scale=0.3),
        "tied": save_llama(at / "tied", seed=1, scale=0.3, tied=True),
    }


def no_configuration() -> Any:
    raise AssertionError("Current vLLM config is not set.")


def reload(llm: Any, path: Path) -> None:
    """Without vLLM's configuration, which 0.26 does not set for it."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (internals, refusals):
            patch.setattr(module, "get_current_vllm_config", no_configuration)
        patch.setattr(internals, "get_current_vllm_config_or_none", lambda: None)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
    llm.reset_prefix_cache()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["fused", "exact"])
@pytest.mark.quick
def test_other_weights_and_back(
    name: str, how: str, models: dict[str, Path], others: dict[str, Path]
) -> None:
    options = kernels(how)
    wanted = generated(others[name], **options)
    llm = engine(models[name], **options)
    first = generate(llm)
    assert first != wanted
    held = {at: it for at, it in layers(llm)[""].named_parameters() if it.data.dtype is torch.uint8}
    assert held
    for path, expected in ((others[name], wanted), (models[name], first), (others[name], wanted)):
        reload(llm, path)
        assert generate(llm) == expected
        now = dict(layers(llm)[""].named_parameters())
        assert all(now[at] is it for at, it in held.items()), "layers hold the parameters that they held"
    close(llm)


@pytest.mark.parametrize("name", NAMES)
def test_compiled(name: str, models: dict[str, Path], others: dict[str, Path]) -> None:
    options = kernels("exact") | {"enforce_eager": False}
    wanted = generated(others[name], **options)
    llm = engine(models[name], **options)
    reload(llm, others[name])
    assert generate(llm) == wanted
    close(llm)


def negated(model: Path, at: Path) -> Path:
    """The same model with all matrices negated, whose windows take as many bytes."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, at)
    tensors = load_file(at / "model.safetensors")
    turned = {name: -it if it.dim() == 2 else it for name, it in tensors.items()}
    save_file(turned, at / "model.safetensors", {"format": "pt"})
    return at


def test_where_cuda_graphs_read(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows are written to the memory that there is, which a CPU stands for here; others are refused."""

    def renew(self: Windowed, plain: torch.Tensor) -> bool:
        made = windowing.encode(plain)
        assert made is not None
        self._blob.copy_(made.blob)
        self.window = made.window
        return True

    other = negated(models["llama"], tmp_path / "other")
    wanted = generated(other, **kernels("fused"))
    monkeypatch.setattr(internals, "records_graphs", lambda: True)
    monkeypatch.setattr(Windowed, "renew", renew)
    llm = engine(models["llama"], **kernels("fused"))
    first = generate(llm)
    packed = [it.packed for one in layers(llm).values() if (it := one.__dict__.get("tpde")) and it.packed]
    places = [it.sources[0].memory.data_ptr() for it in packed if it.multiplies]
    assert len(places) > 8
    for path, expected in ((other, wanted), (models["llama"], first)):
        reload(llm, path)
        assert generate(llm) == expected
        assert [it.sources[0].memory.data_ptr() for it in packed if it.multiplies] == places
    monkeypatch.setattr(Windowed, "renew", lambda self, plain: False)
    with pytest.raises(PackedWeight, match="cannot take other values where CUDA graphs read it"):
        reload(llm, other)
    close(llm)


def test_from_packed_files_and_from_tensors(
    models: dict[str, Path], others: dict[str, Path], tmp_path: Path
) -> None:
    """As trainers send them: whole tensors by their names in files."""
    from safetensors.torch import load_file

    wanted = generated(others["llama"], **kernels("exact"))
    tpde.pack(others["llama"], tmp_path / "packed")
    llm = engine(models["llama-packed"], **kernels("exact"))
    first = generate(llm)
    reload(llm, tmp_path / "packed")
    assert generate(llm) == wanted
    for path, expected in ((models["llama"], first), (others["llama"], wanted)):
        tensors = load_file(path / "model.safetensors")
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(tensors.items())})
        llm.reset_prefix_cache()
        assert generate(llm) == expected
    close(llm)


def test_tensors_of_some_layers(models: dict[str, Path], others: dict[str, Path]) -> None:
    """Other layers keep theirs. A part of a merged matrix is refused: the rest would be what memory has."""
    from safetensors.torch import load_file

    tensors = load_file(others["llama"] / "model.safetensors")
    found = []
    for options in ({}, kernels("exact")):
        llm = engine(models["llama"], **options)
        sent = [(name, it) for name, it in tensors.items() if "layers.0.mlp" in name]
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": sent})
        found.append(generate(llm))
        if options:
            sent = [(name, it) for name, it in sent if "gate_proj" in name]
            with pytest.raises(InvalidInput, match="gate_up_proj`, and none for its part `1`"):
                llm.collective_rpc("reload_weights", kwargs={"weights_iterator": sent})
        close(llm)
    assert found[1] == found[0]
