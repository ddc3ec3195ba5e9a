"""Whisper, whose head is tied to an embedding of PyTorch's own, and which attends to sounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.models import torch
from support.vllm import VOCABULARY, close, engine, kernels, save_tokenizer

import tpde

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make test-vllm` runs these")


def save_whisper(at: Path) -> Path:
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=200,
        decoder_ffn_dim=200,
        max_target_positions=128,
        pad_token_id=0,
        bos_token_id=VOCABULARY - 2,
        eos_token_id=VOCABULARY - 1,
        decoder_start_token_id=VOCABULARY - 2,
        init_std=0.06,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    WhisperForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(at)
    WhisperFeatureExtractor().save_pretrained(at)
    save_tokenizer(at)
    return at


def heard(model: Path, **options: Any) -> list[tuple[int, float]]:
    """Tokens for a tone, each with its logarithmic probability."""
    from vllm import SamplingParams

    llm = engine(model, max_num_batched_tokens=2048, limit_mm_per_prompt={"audio": 1}, **options)
    prompt = {
        "encoder_prompt": {
            "prompt": "",
            "multi_modal_data": {"audio": (torch.arange(16000).div(20).sin().numpy(), 16000)},
        },
        "decoder_prompt": {"prompt_token_ids": [VOCABULARY - 2, 4, 5]},
    }
    how = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    try:
        best = llm.generate([prompt], how, use_tqdm=False)[0].outputs[0]
        both = zip(best.token_ids, best.logprobs, strict=True)
        return [(token, step[token].logprob) for token, step in both]
    finally:
        close(llm)


@pytest.mark.quick
def test_tokens_and_probabilities(tmp_path: Path) -> None:
    plain = save_whisper(tmp_path / "plain")
    wanted = heard(plain)
    assert heard(plain, quantization="tpde") == wanted
    tpde.pack(plain, tmp_path / "packed")
    assert heard(tmp_path / "packed", **kernels("exact")) == wanted
