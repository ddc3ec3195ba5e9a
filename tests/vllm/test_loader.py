"""Packed tensors on their way from files to layers."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.models import assert_same_bits, torch
from support.plain_damage import damage_plain

from tpde.errors import Corrupt
from tpde.loading.reading import Reader

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make test-vllm` runs these")
pytestmark = pytest.mark.quick

TENSORS = 12


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """Plain tensors, and what files have of them: every third as it is. Some are a group."""
    from tpde.integrations.vllm import loader
    from tpde.weights.pack_tensor import pack_tensor

    draw = torch.Generator().manual_seed(0)
    plain, files = {}, []
    for i in range(TENSORS):
        plain[f"w{i}"] = tensor = (0.02 * torch.randn(64 + i, 256, generator=draw)).bfloat16()
        packed = pack_tensor(tensor, f"w{i}")
        assert packed is not None
        files.append((f"w{i}", tensor) if i % 3 == 2 else (f"w{i}_tpde", packed.sources[0].memory))
    monkeypatch.setattr(loader, "_GROUP_BYTES", 80_000)
    return plain, files


def readers() -> list[threading.Thread]:
    return [it for it in threading.enumerate() if it.name.startswith("tpde-read")]


def test_all_come_in_their_order(weights: Any) -> None:
    from tpde.integrations.vllm.loader import unpacked

    plain, files = weights
    found = list(unpacked(iter(files)))
    assert [name for name, _ in found] == list(plain)
    for name, tensor in found:
        assert_same_bits(tensor, plain[name])
    assert list(unpacked(iter([]))) == []
    assert not readers()


def test_a_few_are_taken_at_a_time(weights: Any) -> None:
    """Others of vLLM's iterators give tensors that take device memory."""
    from tpde.integrations.vllm.loader import unpacked

    plain, files = weights
    taken: list[str] = []

    def one_by_one() -> Iterator[tuple[str, Any]]:
        for name, tensor in plain.items() if taken else files:
            taken.append(name)
            yield name, tensor

    for given in (0, 1):  # packed, then plain
        taken[:] = ["begun"] * given
        coming = unpacked(one_by_one())
        next(coming)
        assert len(taken) - given < TENSORS - 2
        coming.close()
        assert not readers()


def test_the_device_of_the_model(weights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not PyTorch's default one, which vLLM sets while it makes layers alone."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    from tpde.integrations.vllm import internals, loader

    class Loader(BaseModelLoader):
        def __init__(self) -> None:
            pass

        def download_model(self, *_: Any) -> None:
            pass

        def create_model(self, *_: Any, **__: Any) -> Any:
            return torch.nn.Module()

        def load_weights(self, *_: Any) -> None:
            list(loader.unpacked(iter([])))
            raise KeyboardInterrupt

    asked: list[torch.device] = []
    monkeypatch.setattr(loader, "Reader", lambda device: asked.append(device) or Reader(torch.device("cpu")))
    monkeypatch.setattr(
        "vllm.model_executor.model_loader.base_loader.initialize_model", lambda **_: torch.nn.Module()
    )
    for given, chosen in ((None, "cuda:3"), ("cpu", "cpu")):
        config = SimpleNamespace(
            device_config=SimpleNamespace(device="cuda:3"), load_config=SimpleNamespace(device=given)
        )
        monkeypatch.setattr(internals, "get_current_vllm_config_or_none", lambda it=config: it)
        with pytest.raises(KeyboardInterrupt):
            Loader().load_model(config, SimpleNamespace(dtype=torch.bfloat16))
        assert asked.pop() == torch.device(chosen)


def test_damage_is_named(weights: Any) -> None:
    from tpde.integrations.vllm.loader import unpacked

    _, files = weights
    name, blob = files[7]
    blob = blob.clone()
    blob[len(blob) * 3 // 4] ^= 1
    files[7] = name, blob
    with pytest.raises(Corrupt, match="w7"):
        list(unpacked(iter(files)))
    assert not readers()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("shape", [(8, 32), (0,), (256,)])
def test_what_is_no_blob(shape: tuple[int, ...], dtype: Any) -> None:
    from tpde.errors import TpdeError
    from tpde.integrations.vllm.loader import unpacked

    other = torch.zeros(shape, dtype=dtype)
    with pytest.raises(TpdeError, match=r"`w`|w:"):
        list(unpacked(iter([("w_tpde", other)])))
    ids = torch.zeros(4, dtype=torch.int64)  # the name of a plain tensor
    assert [name for name, _ in unpacked(iter([("w_tpde", ids)]))] == ["w_tpde"]


def test_damage_in_what_is_stored_plain_is_found(models: dict[str, Path], tmp_path: Path) -> None:
    """vLLM reads it from the file by itself."""
    from vllm.config import LoadConfig

    from tpde.integrations.vllm.loader import TpdeModelLoader

    folder = tmp_path / "llama"
    shutil.copytree(models["llama-packed"], folder)
    name = damage_plain(folder / "model.safetensors", "norm")
    config = SimpleNamespace(model=str(folder), model_weights="", revision=None, quantization="tpde")
    loader = TpdeModelLoader(LoadConfig(load_format="safetensors"))
    with pytest.raises(Corrupt, match=name):
        list(loader.get_all_weights(config, SimpleNamespace()))


@pytest.mark.parametrize("options", [{}, {"load_format": "dummy"}], ids=["files", "dummy"])
@pytest.mark.parametrize("name", ["llama", "experts"])
def test_an_engine_gives_its_weights_back(
    models: dict[str, Path], name: str, options: dict[str, Any]
) -> None:
    """When it has ended, though vLLM notes how to load layers anew."""
    import gc
    import weakref

    from support.vllm import close, engine, layers
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = engine(models[name], quantization="tpde", **options)
    held = [weakref.ref(it) for it in layers(llm).values()]
    close(llm)
    del llm
    gc.unfreeze()
    cleanup_dist_env_and_memory()
    gc.collect()
    assert [it() for it in held if it() is not None] == []


@pytest.mark.parametrize("loader", ["TpdeModelLoader", "TpdeDummyLoader"])
def test_layers_of_a_draft_count_values(loader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose own configuration need not say how they are held."""
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader import DefaultModelLoader, DummyModelLoader

    from tpde.integrations.vllm import internals
    from tpde.integrations.vllm import loader as loaders
    from tpde.integrations.vllm.linear_method import TpdeLinearMethod

    counted: list[Any] = []
    monkeypatch.setattr(internals, "initialize_online_processing", counted.append)
    for it in (DefaultModelLoader, DummyModelLoader):
        monkeypatch.setattr(it, "load_weights", lambda *_: None)
    layer: Any = torch.nn.Module()
    layer.quant_method = object.__new__(TpdeLinearMethod)
    layer.quant_method.uses_meta_device = True
    model = torch.nn.Sequential(layer, torch.nn.Linear(2, 2))
    load_format = "dummy" if loader == "TpdeDummyLoader" else "auto"
    made = getattr(loaders, loader)(LoadConfig(load_format=load_format))
    made.load_weights(model, SimpleNamespace(quantization=None))
    assert counted == [layer]
