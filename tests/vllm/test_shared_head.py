"""Heads that are tied by `config.json`, and of which files hold a copy: one matrix, while both agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.models import torch
from support.shared_head import EMBEDDING, HEAD, with_head
from support.vllm import close, engine, generate, generated, kernels, layers, save_llama

import tpde
from tpde.errors import PackedWeight
from tpde.weights import windowing
from tpde.weights.windowed import Windowed

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make test-vllm` runs these")
from tpde.integrations.vllm import internals

WORKER = {"worker_extension_cls": "support.shared_head.Shared"}
Models = dict[str, Path]

pytestmark = pytest.mark.skipif(not internals.unties_heads(), reason="this vLLM ignores such heads")


def one_bit_off(weight: torch.Tensor) -> torch.Tensor:
    """The same but for a bit of the last element."""
    weight.view(torch.int16)[-1, -1] ^= 1
    return weight


@pytest.fixture(scope="module")
def copied(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Models with a head: a copy, one that is nearly a copy, another one; and another model's copy."""
    at = tmp_path_factory.mktemp("copied")
    other = save_llama(at / "plain-other", seed=1, scale=0.3, tied=True)
    found = {
        "copy": with_head(models["tied"], at / "copy"),
        "nearly": with_head(models["tied"], at / "nearly", one_bit_off),
        "apart": with_head(other, at / "apart", lambda it: it.flip(0).contiguous()),
        "other": with_head(other, at / "other"),
    }
    for name in list(found):
        found[f"{name}-packed"] = at / f"{name}-packed"
        tpde.pack(found[name], found[f"{name}-packed"])
    return found


def reload(llm: Any, **how: Any) -> None:
    llm.collective_rpc("reload_weights", kwargs=how)
    llm.reset_prefix_cache()


def shares(llm: Any) -> bool:
    """Whether all workers have one matrix for both."""
    found = set(llm.collective_rpc("shares"))
    assert len(found) == 1
    return bool(found.pop())


@pytest.mark.parametrize("how", ["fused", "exact"])
@pytest.mark.parametrize("suffix", ["", "-packed"])
@pytest.mark.parametrize("name", ["copy", "nearly"])
@pytest.mark.quick
def test_one_matrix_for_a_copy(copied: Models, name: str, suffix: str, how: str) -> None:
    wanted = generated(copied[name])
    llm = engine(copied[name + suffix], **kernels(how), **WORKER)
    assert generate(llm) == wanted
    assert shares(llm) == (name == "copy")
    found = layers(llm)
    report = found["lm_head"].quant_method.report
    sides = [it.tpde_shape for it in found.values() if "tpde" in it.__dict__]
    sizes = [2 * rows * columns for rows, columns in sides]
    assert report.plain_bytes == sum(sizes) - (sizes[0] if name == "copy" else 0), "what plain vLLM takes"
    close(llm)


def test_compiled(copied: Models) -> None:
    wanted = generated(copied["copy"], enforce_eager=False)
    llm = engine(copied["copy"], enforce_eager=False, **kernels("exact"), **WORKER)
    assert shares(llm)
    assert [it.tokens for it in generate(llm)] == [it.tokens for it in wanted]
    close(llm)


def test_two_workers(copied: Models) -> None:
    wanted = generated(copied["copy"], tensor_parallel_size=2)
    llm = engine(copied["copy-packed"], tensor_parallel_size=2, **kernels("fused"), **WORKER)
    assert shares(llm)
    assert generate(llm) == wanted
    close(llm)


@pytest.mark.parametrize("how", ["fused", "exact"])
@pytest.mark.parametrize("suffix", ["", "-packed"])
def test_other_weights(copied: Models, suffix: str, how: str) -> None:
    """Both change while they agree; those that do not are apart from then on."""
    options = kernels(how) | WORKER
    wanted = {name: generated(copied[name], **options) for name in ("copy", "other", "apart")}
    llm = engine(copied[f"copy{suffix}"], **options)
    for name in ("other", "copy"):
        reload(llm, weights_path=str(copied[name + suffix]))
        assert shares(llm)
        assert generate(llm) == wanted[name]
    found = layers(llm)
    head, embedding = found["lm_head"].weight, found["model.embed_tokens"].weight
    assert head.data_ptr() == embedding.data_ptr(), "no old one is held"
    for name in ("apart", "copy", "other"):
        reload(llm, weights_path=str(copied[name + suffix]))
        assert not shares(llm)
        assert generate(llm) == wanted[name]
    close(llm)


@pytest.mark.parametrize("order", [[HEAD, EMBEDDING], [EMBEDDING, HEAD], [EMBEDDING]])
def test_other_tensors(copied: Models, order: list[str]) -> None:
    """In any order; a trainer of a tied model sends one for both."""
    from safetensors.torch import load_file

    wanted = generated(copied["other"], **kernels("exact"))
    llm = engine(copied["copy"], **kernels("exact"), **WORKER)
    tensors = load_file(copied["other"] / "model.safetensors")
    ends = [(name, tensors.pop(name)) for name in (HEAD, EMBEDDING)]
    sent = [*tensors.items(), *((name, dict(ends)[name]) for name in order)]
    reload(llm, weights_iterator=sent)
    assert shares(llm)
    assert generate(llm) == wanted
    close(llm)


def test_where_cuda_graphs_read(copied: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others that agree are written to the memory that there is; those that differ are refused."""

    def renew(self: Windowed, plain: torch.Tensor) -> bool:
        made = windowing.encode(plain)
        assert made is not None
        self._blob = made.blob
        self.window = made.window
        self.version += 1
        return True

    wanted = generated(copied["other"], **kernels("fused"))
    monkeypatch.setattr(internals, "records_graphs", lambda: True)
    monkeypatch.setattr(Windowed, "renew", renew)
    llm = engine(copied["copy"], **kernels("fused"), **WORKER)
    reload(llm, weights_path=str(copied["other"]))
    assert shares(llm)
    assert generate(llm) == wanted
    with pytest.raises(PackedWeight, match="is the head and the embedding, whose values were the same"):
        reload(llm, weights_path=str(copied["apart"]))
    close(llm)
