"""vLLM on a GPU: exact kernels give plain vLLM's tokens, fused ones run in CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.gpu import needs_cuda
from support.vllm import generated, kernels, save_experts, save_llama

import tpde

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
    """Probabilities of the first token are plain vLLM's but for rounding; again, they are the same."""
    wanted = generated(model, enforce_eager=False, **MEMORY)
    found = generated(model, enforce_eager=False, **kernels(how), **MEMORY)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.logprobs[0] == pytest.approx(theirs.logprobs[0], abs=0.1)
    assert generated(model, enforce_eager=False, **kernels(how), **MEMORY) == found


def test_fused_in_eager_mode(model: Path) -> None:
    wanted = generated(model, **MEMORY)
    found = generated(model, quantization="tpde", **MEMORY)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.logprobs[0] == pytest.approx(theirs.logprobs[0], abs=0.1)
