"""What does not work with packed weights in vLLM is refused by name, and what stays plain is told."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from support.vllm import close, engine, generate, generated, kernels, layers

from tpde.errors import Corrupt, InvalidInput, PackedWeight, UnsupportedVersion

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make test-vllm` runs these")

Models = dict[str, Path]
TPDE = {"quantization": "tpde"}


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What the plugin logs: as a filter, since vLLM takes handlers away when it sets logging up."""
    found: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        found.append(record.getMessage())
        return True

    log = logging.getLogger("vllm.tpde")
    log.addFilter(keep)
    yield found
    log.removeFilter(keep)


def overrides(**said: Any) -> dict[str, Any]:
    return {"hf_overrides": {"quantization_config": {"quant_method": "tpde", **said}}}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (kernels("fast"), InvalidInput, "`kernels` is 'fast'"),
        (overrides(kernel="exact"), InvalidInput, "has `kernel`"),
        (overrides(version=99), UnsupportedVersion, "version 99"),
        (overrides(source={"quant_method": "gptq"}), InvalidInput, "quantized with `gptq`"),
        (TPDE | {"cpu_offload_gb": 1}, InvalidInput, "--cpu-offload-gb"),
        (
            TPDE | {"hf_overrides": {"head_dtype": "float32"}},
            InvalidInput,
            "`head_dtype` asks for a head in float32",
        ),
        *(
            (TPDE | {"load_format": it}, InvalidInput, f"`--load-format {it}` brings weights in a way")
            for it in ("sharded_state", "pt", "npcache", "mistral", "instanttensor", "runai_streamer")
        ),
        (
            kernels("fused") | {"quantization_config": {"linear": "fp8_per_tensor"}},
            InvalidInput,
            "--quantization-config",
        ),
    ],
)
def test_refused(models: Models, options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text.replace("(", r"\(")):
        engine(models["llama"], **options)


@pytest.mark.quick
def test_another_quantization_of_a_packed_model(models: Models) -> None:
    with pytest.raises(ValueError, match="does not match"):  # vLLM's own
        engine(models["llama-packed"], quantization="fp8")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("said", "more", "error", "text"),
    [
        ({"quant_method": "fp8"}, {}, InvalidInput, "the model's files are quantized with `fp8`"),
        (
            {"quant_method": "tpde", "version": 1},
            {"load_format": "npcache"},
            InvalidInput,
            "--load-format npc",
        ),
        (
            {"quant_method": "tpde", "version": 1, "source": {"quant_method": "gptq"}},
            {},
            InvalidInput,
            "was quantized with `gptq`",
        ),
        ({"quant_method": "tpde", "version": 99}, {}, UnsupportedVersion, "version 99"),
        ({"quant_method": "tpde", "version": -1}, {}, InvalidInput, "is -1, which is no number from 1 on"),
    ],
)
def test_overrides_do_not_hide_what_files_say(
    models: Models,
    tmp_path: Path,
    said: dict[str, Any],
    more: dict[str, Any],
    error: type[Exception],
    text: str,
) -> None:
    """A `quantization_config` that asks for kernels takes the place of the file's."""
    import shutil

    shutil.copytree(models["llama-packed"], tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": said}))
    with pytest.raises(error, match=text):
        engine(tmp_path / "model", **kernels("exact"), **more)


@pytest.mark.quick
def test_overrides_do_not_hide_a_file_of_quantization(models: Models, tmp_path: Path) -> None:
    """ModelOpt kept it beside `config.json`."""
    import shutil

    shutil.copytree(models["llama"], tmp_path / "model")
    (tmp_path / "model/hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(InvalidInput, match="the model's files are quantized with `modelopt`"):
        engine(tmp_path / "model", **kernels("exact"))


def test_reloading(models: Models) -> None:
    """Other weights cannot be put in the place of packed ones that serve."""
    import torch

    llm = engine(models["experts"], **TPDE)
    names = [name for name, it in layers(llm)[""].named_parameters() if it.data.dtype is torch.uint8]
    assert len(names) == 2 + 2 * 4
    before = generate(llm)
    for name in names:
        for value in (torch.zeros(64, 64), torch.zeros((), dtype=torch.uint8)):
            how = {"weights_iterator": [(name, value)], "is_checkpoint_format": False}
            with pytest.raises(PackedWeight, match=r"is packed, and serves"):
                llm.collective_rpc("reload_weights", kwargs=how)
    assert generate(llm) == before
    with pytest.raises(PackedWeight, match="is packed, and serves"):
        llm.collective_rpc("reload_weights")
    close(llm)


@pytest.mark.quick
def test_sleep_that_loses_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of vLLM's own way to sleep, level 1 is left as it is."""
    import vllm.device_allocator
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

    from tpde.integrations.vllm import sleep_mode

    slept: list[Any] = []

    def sleep(offload_tags: Any) -> None:
        slept.append(offload_tags)

    memory = SimpleNamespace(sleep=sleep, wake_up=slept.append, discard=slept.append)
    monkeypatch.setattr(vllm.device_allocator, "get_mem_allocator_instance", lambda: memory)
    for asked, name in ((False, "cumem"), (True, "another")):
        config = SimpleNamespace(enable_sleep_mode=asked, sleep_mode_backend=name)
        sleep_mode.choose(config)
        assert config.sleep_mode_backend == name
    config = SimpleNamespace(enable_sleep_mode=True, sleep_mode_backend="cumem")
    config.sleep_mode_offload_cudagraph = True
    with pytest.raises(InvalidInput, match="`--sleep-mode-offload-cudagraph` would do nothing"):
        sleep_mode.choose(config)
    config.sleep_mode_offload_cudagraph = False
    for _ in range(2):
        sleep_mode.choose(config)
    way = SleepModeBackendFactory.create_backend(config)
    for lose in (lambda: way.suspend(2), lambda: way.discard(("weights", "kv_cache"))):
        with pytest.raises(PackedWeight, match="throws weights away"):
            lose()
    assert slept == []
    way.suspend(1)
    way.resume(None)
    assert "weights" in slept[0]
    assert slept[1:] == [None]


@pytest.mark.quick
def test_a_model_that_may_sleep_sleeps_our_way(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpde.integrations.vllm import internals, refusals

    model = SimpleNamespace(
        enable_sleep_mode=True,
        sleep_mode_backend="cumem",
        quantization_config=None,
        runner_type="generate",
        head_dtype="bfloat16",
        dtype="bfloat16",
    )
    offload = SimpleNamespace(
        uva=SimpleNamespace(cpu_offload_gb=0),
        prefetch=SimpleNamespace(offload_group_size=0),
        offload_backend="auto",
    )
    load = SimpleNamespace(load_format="auto")
    spread = SimpleNamespace(pipeline_parallel_size=1)
    config = SimpleNamespace(
        model_config=model, offload_config=offload, load_config=load, parallel_config=spread
    )
    for module in (refusals, internals):
        monkeypatch.setattr(module, "get_current_vllm_config", lambda: config)
    refusals.check()
    assert model.sleep_mode_backend == "tpde"


@pytest.mark.quick
def test_damaged_files(models: Models, tmp_path: Path) -> None:
    import shutil

    from safetensors import safe_open

    at = tmp_path / "damaged"
    shutil.copytree(models["llama-packed"], at)
    path, name = at / "model.safetensors", "model.layers.1.mlp.up_proj.weight_tpde"
    with safe_open(path, "pt") as file:
        blob = bytes(file.get_tensor(name).numpy())
    data = bytearray(path.read_bytes())
    data[data.index(blob) + len(blob) - 200] ^= 1
    path.write_bytes(data)
    with pytest.raises(Corrupt, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        engine(at)


def test_what_is_told(models: Models, lines: list[str]) -> None:
    generated(models["llama-packed"])
    text = "\n".join(lines)
    assert "% less), every bit kept; kernels=fused: " in text
    assert "experts" not in text
    saved = float(text.split("take ")[1].split(" MiB")[0]), float(text.split("instead of ")[1].split(" ")[0])
    # Of two layers, with keys and values of two heads of 64 elements of two bytes: 1024 bytes a token.
    tokens = int(text.split("room for ")[1].split(" ")[0])
    assert tokens == pytest.approx((saved[1] - saved[0]) * 2**20 / 1024, rel=0.1)
    assert sum("every bit kept" in line for line in lines) == 1


def test_what_is_told_of_experts(models: Models, lines: list[str]) -> None:
    """The room in which they are decoded is larger than what is saved of two layers."""
    generated(models["experts-packed"])
    text = "\n".join(lines)
    assert "2 stay plain: smaller than 16384 bytes" in text
    room = float(text.split("decoded into ")[1].split(" MiB")[0])
    assert room == pytest.approx(8 * 3 * 192 * 128 * 2 / 2**20, abs=0.05)
    assert "tokens in the KV cache" not in text


@pytest.mark.quick
@pytest.mark.parametrize(
    ("adapters", "halves", "moved", "text"),
    [
        (object(), False, 0, "--enable-lora"),
        (None, True, 0, "--enable-dbo"),
        (None, False, 2, "--offload-group-size"),
    ],
)
def test_experts_that_stay_plain(
    monkeypatch: pytest.MonkeyPatch, lines: list[str], adapters: object, halves: bool, moved: int, text: str
) -> None:
    from tpde.integrations.vllm import internals, refusals

    how = SimpleNamespace(offload_group_size=moved)
    config = SimpleNamespace(
        lora_config=adapters,
        parallel_config=SimpleNamespace(use_ubatching=halves, enable_eplb=False),
        offload_config=SimpleNamespace(
            prefetch=how, uva=SimpleNamespace(cpu_offload_gb=0), offload_backend="auto"
        ),
    )
    for module in (refusals, internals):
        monkeypatch.setattr(module, "get_current_vllm_config", lambda: config)
    assert not refusals.can_pack_experts()
    assert "experts stay plain" in lines[0]
    assert text in lines[0]
    config.lora_config, config.parallel_config.use_ubatching, how.offload_group_size = None, False, 0
    assert refusals.can_pack_experts()
    config.parallel_config.enable_eplb = True
    with pytest.raises(InvalidInput, match="`--enable-eplb` moves experts"):
        refusals.can_pack_experts()


@pytest.mark.quick
def test_what_does_not_shrink_stays_plain() -> None:
    import torch

    from tpde.integrations.vllm.config import TpdeConfig
    from tpde.integrations.vllm.weights import hold

    config = TpdeConfig()
    draw = torch.Generator().manual_seed(0)
    noise = torch.randint(-(2**15), 2**15, (128, 256), generator=draw, dtype=torch.int16)
    assert hold(config.report, noise.view(torch.bfloat16), "noise") is None
    assert hold(config.report, torch.zeros(64, 4, dtype=torch.bfloat16), "small") is None
    assert hold(config.report, torch.zeros(256, 256, dtype=torch.int8), "codes") is None
    assert config.report.held_bytes == config.report.plain_bytes == noise.nbytes + 512 + 65536
    assert set(config.report._plain) == {
        "packing makes them no smaller",
        "smaller than 16384 bytes",
        "int8 is no floating point",
    }


@pytest.mark.quick
@pytest.mark.parametrize("rows", [(0,), (4,), (5,), (13,), (3, 3)])
def test_products_in_parts(rows: tuple[int, ...]) -> None:
    """Of as many rows at a time as windows are multiplied with, as by one product."""
    import torch

    from tpde.integrations.vllm.weights import product_in_parts

    class Packed:
        most_rows = 4
        counts: ClassVar[list[int]] = []

        def product(self, x: Any, bias: Any, trained: bool) -> Any:
            self.counts.append(x.numel() // x.shape[-1])
            return torch.nn.functional.linear(x, weight, bias)

    weight, bias, x = torch.randn(6, 8), torch.randn(6), torch.randn(*rows, 8)
    found = product_in_parts(Packed(), x, bias)  # type: ignore[arg-type]
    assert torch.allclose(found, torch.nn.functional.linear(x, weight, bias), atol=1e-5)
    assert found.shape == (*rows, 6)
    assert max(Packed.counts) <= 4
    assert sum(Packed.counts) == x.numel() // 8


@pytest.mark.quick
def test_a_layer_that_was_moved() -> None:
    import torch

    from tpde.integrations.vllm.weights import held_by

    with pytest.raises(InvalidInput, match="not where it was"):
        held_by(torch.zeros(16, dtype=torch.uint8))


@pytest.mark.quick
def test_configuration_travels_to_workers(models: Models) -> None:
    import copy
    import pickle

    from tpde.integrations.vllm.config import TpdeConfig

    config = TpdeConfig.from_config(json.loads('{"quant_method": "tpde", "version": 1, "kernels": "exact"}'))
    for made in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert made.kernels == "exact"
