"""Packed tensors on their way from files to layers."""

from __future__ import annotations

import shutil
import threading
import weakref
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
        torch.set_default_dtype(torch.float32)  # which 0.29 leaves the model's
        assert asked.pop() == torch.device(chosen)


FREE_BYTES = 8 * (3 << 15)  # of which an eighth is taken, at most


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Plain tensors of 32 KiB, of which three may be on the device; one a group; and others."""
    from tpde.integrations.vllm import adjacent_tensors, loader

    monkeypatch.setattr(adjacent_tensors, "free_bytes", lambda device: FREE_BYTES)
    monkeypatch.setattr(loader, "_GROUP_BYTES", 1)
    draw = torch.Generator().manual_seed(1)
    wide = torch.randn(64, 512, generator=draw)
    return [
        ("a", wide.bfloat16()[:, :256].contiguous()),
        ("view", wide.bfloat16()[:, :256]),
        ("none", torch.empty(0, 4)),
        ("one", torch.tensor(2.5, requires_grad=True)),
        ("bits", wide[0] > 0),
        ("b", wide.half().view(16, 8, 256)[:, :4].contiguous().view(2, 8, 4, 256)),
        ("c", wide[:16].clone().view(torch.int32)),
        *((f"d{i}", torch.full((1 << 14,), float(i), dtype=torch.bfloat16)) for i in range(4)),
    ]


@pytest.mark.parametrize("group", [1, 1 << 20])
def test_plain_tensors_are_read_by_threads(plain: Any, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a model takes all of them; others come as they are, and so do those with gaps."""
    from tpde.integrations.vllm import adjacent_tensors, loader

    monkeypatch.setattr(loader, "_GROUP_BYTES", group)
    monkeypatch.setattr(adjacent_tensors, "free_bytes", lambda device: 1 << 40)
    for whole in (False, True):
        found = {}
        for (name, tensor), (needed, given) in zip(
            loader.unpacked(iter(plain), whole=whole), plain, strict=True
        ):
            assert name == needed
            assert_same_bits(tensor.detach(), given.detach())
            found[name] = tensor is not given
        assert found == {name: whole and name not in ("none", "view") for name, _ in plain}
    assert not readers()


def test_tensors_beside_each_other_are_one_run(tmp_path: Path) -> None:
    """But those whose words would not be at multiples of their sizes."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    from tpde.integrations.vllm.adjacent_tensors import adjacent_of

    drawn = torch.arange(300).view(20, 15)
    made = {"a": drawn.bfloat16(), "b": drawn[0].byte(), "c": drawn[:3].half(), "d": drawn[1, 2].float()}
    save_file(made, tmp_path / "some.safetensors")
    with safe_open(tmp_path / "some.safetensors", "pt") as file:
        kept = {name: file.get_tensor(name) for name in file.offset_keys()}
    tensors = list(kept.values())
    assert [it.tensors for it in adjacent_of(tensors)] == [tensors]
    assert [len(it.tensors) for it in adjacent_of(tensors[::-1])] == [1] * len(tensors)
    memory = torch.arange(64, dtype=torch.uint8)
    apart = [memory[2:4], memory[4:8].view(torch.float32), memory[8:16].view(torch.int64), memory[17:18]]
    assert [len(it.tensors) for it in adjacent_of(apart)] == [1, 1, 1, 1]
    assert [len(it.tensors) for it in adjacent_of([memory[:4], *apart[1:]])] == [3, 1]


@pytest.mark.parametrize("bound", ["most", "free", "refused"])
def test_so_many_plain_tensors_are_there_at_a_time(
    plain: Any, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that layers keep, maybe views of them alone; what has no room stays where it is."""
    from tpde.integrations.vllm import adjacent_tensors, loader

    empty, kept, moved = torch.empty, list[Any](), list[str]()
    rooms, refused = list[Any](), iter(range(4 if bound == "refused" else 0))

    def counted(shape: Any, **options: Any) -> Any:
        if next(refused, None) is not None:
            raise torch.cuda.OutOfMemoryError
        made = empty(shape, **options)
        rooms.append(weakref.ref(made.untyped_storage()))
        return made

    def free(device: Any) -> int:
        there = sum(it() is not None for it in rooms)
        return FREE_BYTES * (3 - there) // 3

    monkeypatch.setattr(torch, "empty", counted)
    monkeypatch.setattr(adjacent_tensors, "free_bytes", free if bound == "free" else lambda device: 1 << 30)
    monkeypatch.setattr(adjacent_tensors, "_HELD_BYTES", 3 << 15 if bound == "most" else 1 << 30)
    plain = [(name, it) for name, it in plain if it.nbytes == 1 << 15 and it.is_contiguous()]
    for (name, tensor), (_, given) in zip(loader.unpacked(iter(plain), whole=True), plain, strict=True):
        assert_same_bits(tensor, given)
        if tensor is not given:
            moved.append(name)
        kept.append(tensor.detach().reshape(-1)[:3])
        if name == "d1":
            kept.clear()
        del tensor
    # `d2` was asked for before the first were let go.
    assert moved == (["d1", "d2", "d3"] if bound == "refused" else ["a", "b", "c", "d3"])


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"speculative_config": object()}, False),
        ({"world_size": 2}, False),
        ({"enable_expert_parallel": True}, False),
        ({"offload_backend": "prefetch"}, False),
        ({"offload_backend": "uva"}, False),
        ({"device": "cpu"}, False),
        ({"enable_sleep_mode": True}, False),
    ],
)
def test_who_takes_all_of_a_file(
    change: dict[str, Any], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tpde.integrations.vllm import internals

    def made(names: str) -> SimpleNamespace:
        return SimpleNamespace(**{name: has[name] for name in names.split()})

    has: dict[str, Any] = {"world_size": 1, "enable_expert_parallel": False, "offload_backend": "auto"}
    has |= {"device": "cuda:0", "speculative_config": None, "enable_sleep_mode": False} | change
    has |= {"prefetch": SimpleNamespace(offload_group_size=0), "uva": SimpleNamespace(cpu_offload_gb=0)}
    config = SimpleNamespace(
        load_config=made("device"),
        device_config=made("device"),
        parallel_config=made("world_size enable_expert_parallel"),
        offload_config=made("offload_backend prefetch uva"),
        model_config=made("enable_sleep_mode"),
        speculative_config=has["speculative_config"],
    )
    monkeypatch.setattr(internals, "get_current_vllm_config_or_none", lambda: config)
    monkeypatch.setattr(internals, "get_current_vllm_config", lambda: config)
    assert internals.takes_all_weights() == taken
    monkeypatch.setattr(internals, "get_current_vllm_config_or_none", lambda: None)
    assert not internals.takes_all_weights()


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
        list(loader.get_all_weights(config, torch.nn.Module()))


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
