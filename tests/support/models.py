"""Tiny models of every architecture that is tested, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

VOCAB = 300


def _llama(t: Any) -> Any:
    return t.LlamaForCausalLM(
        t.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def _qwen2(t: Any) -> Any:
    return t.Qwen2ForCausalLM(
        t.Qwen2Config(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )


def _gpt2(t: Any) -> Any:
    return t.GPT2LMHeadModel(
        t.GPT2Config(
            vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=1
        )
    )


def _bert(t: Any) -> Any:
    return t.BertModel(
        t.BertConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
        )
    )


def _mixtral(t: Any) -> Any:
    return t.MixtralForCausalLM(
        t.MixtralConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
        )
    )


def _qwen3_moe(t: Any) -> Any:
    return t.Qwen3MoeForCausalLM(
        t.Qwen3MoeConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            moe_intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=12,
            num_experts_per_tok=2,
            mlp_only_layers=[1],
        )
    )


_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def _mistral(t: Any) -> Any:
    """All layers look at a window."""
    return t.MistralForCausalLM(t.MistralConfig(**_SMALL, num_hidden_layers=2, sliding_window=6))


def _gemma2(t: Any) -> Any:
    """Every second layer looks at a window."""
    return t.Gemma2ForCausalLM(
        t.Gemma2Config(**_SMALL, num_hidden_layers=4, sliding_window=6, query_pre_attn_scalar=16)
    )


def _gpt_oss(t: Any) -> Any:
    """Every second layer looks at a window; experts have biases."""
    return t.GptOssForCausalLM(
        t.GptOssConfig(
            **_SMALL, num_hidden_layers=2, sliding_window=6, num_local_experts=4, num_experts_per_tok=2
        )
    )


def _lfm2(t: Any) -> Any:
    """Convolutions with a state, and attention."""
    return t.Lfm2ForCausalLM(
        t.Lfm2Config(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            layer_types=["conv", "full_attention", "conv"],
        )
    )


def _qwen3_next(t: Any) -> Any:
    """Linear attention with a state, attention, and experts."""
    return t.Qwen3NextForCausalLM(
        t.Qwen3NextConfig(
            **_SMALL,
            num_hidden_layers=2,
            layer_types=["linear_attention", "full_attention"],
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            num_experts=4,
            num_experts_per_tok=2,
        )
    )


def _mamba(t: Any) -> Any:
    """A state only."""
    return t.MambaForCausalLM(
        t.MambaConfig(vocab_size=VOCAB, hidden_size=64, state_size=8, num_hidden_layers=2)
    )


def _t5(t: Any) -> Any:
    return t.T5ForConditionalGeneration(
        t.T5Config(
            vocab_size=VOCAB,
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )
    )


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "gpt2": _gpt2,
    "bert": _bert,
    "mixtral": _mixtral,
    "t5": _t5,
}
NAMES = list(_MAKERS)
_MAKERS["qwen3_moe"] = _qwen3_moe  # of interest where experts are
CACHED = ["mistral", "gemma2", "gpt_oss", "lfm2", "qwen3_next", "mamba"]  # and where caches are
_MAKERS |= dict(zip(CACHED, (_mistral, _gemma2, _gpt_oss, _lfm2, _qwen3_next, _mamba), strict=True))
CAUSAL = ["llama", "qwen2", "gpt2", "mixtral"]


def make(name: str, dtype: Any = torch.bfloat16, device: str = "cpu") -> Any:
    """Give a model in evaluation mode; the same one each time."""
    transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")
    torch.manual_seed(len(name))
    return _MAKERS[name](transformers).to(device, dtype).eval()


def inputs(name: str, batch: int, length: int, device: str = "cpu") -> dict[str, Any]:
    """Give what a model's forward pass takes."""
    draw = torch.Generator().manual_seed(batch * 1000 + length)
    ids = torch.randint(2, VOCAB, (batch, length), generator=draw).to(device)
    return {"input_ids": ids} | ({"decoder_input_ids": ids[:, :3]} if name == "t5" else {})


def outputs(name: str, model: Any, batch: int, device: str = "cpu") -> list[Any]:
    """Give logits, or hidden states, of a prefill and two steps of decoding with a cache."""
    took = inputs(name, batch, 7, device)
    if name == "bert":
        return [model(**took).last_hidden_state]
    found = model(**took, use_cache=True)
    logits = [found.logits]
    for step in (5, 11):
        token = torch.full((batch, 1), step, device=device)
        again = {"past_key_values": found.past_key_values, "use_cache": True}
        if name == "t5":
            again |= {"encoder_outputs": (found.encoder_last_hidden_state,), "decoder_input_ids": token}
        else:
            again |= {"input_ids": token}
        found = model(**again)
        logits.append(found.logits)
    return logits


def assert_same_bits(found: Any, expected: Any, what: str = "") -> None:
    """Compare two tensors, or lists of them, as integers; name the first word that differs."""
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for number, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_same_bits(a, b, f"{what}[{number}]")
        return
    assert found.dtype == expected.dtype, f"{what}: {found.dtype}, expected {expected.dtype}"
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)}, expected {tuple(expected.shape)}"
    a, b = (t.detach().contiguous().reshape(-1).view(torch.uint8).cpu() for t in (found, expected))
    wrong = (a != b).nonzero()
    if wrong.numel():
        at = int(wrong[0]) // expected.element_size()
        x, y = (t.detach().reshape(-1)[at].item() for t in (found, expected))
        pytest.fail(
            f"{what}: {wrong.numel()} bytes of {a.numel()} differ, the first at {at}: {x!r}, expected {y!r}"
        )
