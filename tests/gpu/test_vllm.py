"""vLLM on a GPU: exact kernels give plain vLLM's tokens, fused ones run in CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.gpu import needs_cuda, torch
from support.models import assert_same_bits
from support.vllm import close, engine, generate, generated, kernels, layers, save_experts, save_llama

import tpde
from benchmarks.serve import COMPARING
from tpde.errors import PackedWeight

pytest.importorskip("vllm.version", reason="vLLM is not installed")
pytestmark = [needs_cuda, pytest.mark.filterwarnings("ignore"), pytest.mark.whole_card]

MEMORY = {"gpu_memory_utilization": 0.2}


@pytest.fixture(scope="module", params=["llama", "tied", "experts"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("models") / request.param
    return save_experts(at) if request.param == "experts" else save_llama(at, tied=request.param == "tied")


def test_exact_is_plain_bit_by_bit(model: Path, tmp_path: Path) -> None:
    wanted = generated(model, **MEMORY)
    assert generated(model, **kernels("exact"), **MEMORY) == wanted
    tpde.pack(model, tmp_path / "packed")
    assert generated(tmp_path / "packed", **kernels("exact"), **MEMORY) == wanted


@pytest.mark.parametrize("how", ["exact", "fused"])
def test_compiled_with_graphs(model: Path, how: str) -> None:
    """Exact: all is plain vLLM's. Fused: probabilities of the first token are, but for rounding."""
    wanted = generated(model, enforce_eager=False, **MEMORY)
    found = generated(model, enforce_eager=False, **kernels(how), **MEMORY)
    if how == "exact":
        assert found == wanted
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.logprobs[0] == pytest.approx(theirs.logprobs[0], abs=0.1)
    assert generated(model, enforce_eager=False, **kernels(how), **MEMORY) == found


def test_compiled_rows_of_many_columns(tmp_path: Path) -> None:
    """Whose norms the compiler adds up in several ways: with exact kernels as with plain weights."""
    model = save_llama(tmp_path / "wide", hidden=4096)
    how = MEMORY | {"enforce_eager": False, "compilation_config": COMPARING}
    assert generated(model, **kernels("exact"), **how) == generated(model, **how)


@pytest.mark.parametrize("how", ["graphs", "eager", "exact"])
def test_other_weights_for_a_model_that_serves(model: Path, how: str, tmp_path: Path) -> None:
    """Those of a model that was started with them, in the memory that CUDA graphs read."""
    if model.name == "experts":
        other = save_experts(tmp_path / "other", seed=1)
    else:
        other = save_llama(tmp_path / "other", seed=1, scale=0.3, tied=model.name == "tied")
    options = MEMORY | {"enforce_eager": how != "graphs"} | kernels("exact" if how == "exact" else "fused")
    wanted = generated(other, **options)
    llm = engine(model, **options)
    first = generate(llm)
    for at, expected in ((other, wanted), (model, first), (other, wanted)):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(at)})
        llm.reset_prefix_cache()
        assert generate(llm) == expected
    assert first != wanted
    close(llm)


def test_fused_in_eager_mode(model: Path) -> None:
    wanted = generated(model, **MEMORY)
    found = generated(model, quantization="tpde", **MEMORY)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.logprobs[0] == pytest.approx(theirs.logprobs[0], abs=0.1)


def test_experts_straight_from_windows(tmp_path: Path) -> None:
    """A row has the same bits in any batch of few, recorded too; more are decoded into the room."""
    llm = engine(save_experts(tmp_path), quantization="tpde", **MEMORY)
    layer = next(it for it in layers(llm).values() if type(it).__name__ == "RoutedExperts")
    method, draw = layer.quant_method, torch.Generator("cuda").manual_seed(0)
    assert method._multiplies
    x = torch.randn((65, layer.hidden_size), device="cuda", generator=draw).bfloat16()
    scores, ids = torch.rand((65, 8), device="cuda", generator=draw).softmax(1).topk(2)
    ids = ids.to(torch.int32)
    rest = {"shared_experts": None, "shared_experts_input": None}
    with torch.inference_mode():
        many = method.apply(layer, x, scores, ids, **rest)
        found = method.apply(layer, x[:64], scores[:64], ids[:64], **rest)
        assert torch.allclose(found, many[:64], rtol=0.02, atol=0.02)
        for some in (slice(0, 1), slice(5, 13), slice(30, 64)):
            assert_same_bits(method.apply(layer, x[some], scores[some], ids[some], **rest), found[some])
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            out = method.apply(layer, x[:8], scores[:8], ids[:8], **rest)
        recorded.replay()
        assert_same_bits(out, found[:8])
    rooms = {it.quant_method._room for it in layers(llm).values() if type(it).__name__ == "RoutedExperts"}
    assert len(rooms) == 1
    close(llm)


def test_rows_in_any_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `VLLM_BATCH_INVARIANT`, a row has the same bits in a batch of hundreds."""
    from tpde.integrations.vllm import internals

    monkeypatch.setattr(internals, "is_batch_invariant", lambda: True)
    llm = engine(save_llama(tmp_path), quantization="tpde", **MEMORY)
    held = [it.__dict__["tpde"] for it in layers(llm).values() if "tpde" in it.__dict__]
    held = [it for it in held if it.packed is not None and it.packed.multiplies]
    assert held
    with torch.inference_mode():
        for weight in held:
            x = torch.randn((300, weight.packed.shape[1]), device="cuda").bfloat16()
            many = weight.product(x, None)
            for some in (slice(0, 1), slice(70, 200), slice(299, 300)):
                assert_same_bits(weight.product(x[some], None), many[some])
    close(llm)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_two_gpus_give_what_one_gives(tmp_path: Path, eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `VLLM_BATCH_INVARIANT`, which changes all of a process: each engine has a new one."""
    for name in ("VLLM_BATCH_INVARIANT", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    model = save_llama(tmp_path, biases=True)
    how = MEMORY | {"quantization": "tpde", "enforce_eager": eager, "compilation_config": COMPARING}
    assert generated(model, tensor_parallel_size=2, **how) == generated(model, **how)


def test_sleep(tmp_path: Path) -> None:
    """Weights come back from level 1; level 2 is refused, and requests go on."""
    llm = engine(save_experts(tmp_path), quantization="tpde", enable_sleep_mode=True, **MEMORY)
    before = generate(llm)
    llm.sleep(level=1)
    llm.wake_up()
    assert generate(llm) == before
    with pytest.raises(PackedWeight, match="throws weights away"):
        llm.sleep(level=2)
    llm.wake_up()
    assert generate(llm) == before
    close(llm)


@pytest.mark.parametrize("how", ["exact", "fused"])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_layers_that_vllm_keeps_on_the_host(
    tmp_path: Path, how: str, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copied to one buffer before it runs: as with all of them on the device."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")  # 0.26's second one has no such layers
    model = save_llama(tmp_path)
    wanted = generated(model, enforce_eager=eager, **kernels(how), **MEMORY)
    moved = {"offload_group_size": 1, "offload_num_in_group": 1, "offload_prefetch_step": 1}
    llm = engine(model, enforce_eager=eager, **kernels(how), **moved, **MEMORY)
    found = generate(llm)
    assert generate(llm) == found
    if eager:
        assert found == wanted
    for mine, theirs in zip(found, wanted, strict=True):  # compiled, what lies between is fused otherwise
        assert mine.logprobs[0] == pytest.approx(theirs.logprobs[0], abs=0.1)
    held = [it.__dict__["tpde"] for name, it in layers(llm).items() if name.endswith("down_proj")]
    assert len({it.packed.sources[0].memory.data_ptr() for it in held}) == 1 < len(held)
    close(llm)
