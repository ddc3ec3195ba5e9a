"""Llamas of random weights: their shapes, and the same prompt for everyone."""

from __future__ import annotations

import contextlib
from typing import Any

from benchmarks.harness.gpu import device

PROMPT = 32  # tokens
# hidden size, intermediate size, layers, heads, key-value heads, vocabulary
SHAPES = {
    "llama-8b": (4096, 14336, 32, 32, 8, 128256),
    "llama-70b": (8192, 28672, 80, 64, 8, 128256),
    "tinyllama-1.1b": (2048, 5632, 22, 32, 4, 32000),
    "tiny": (64, 160, 2, 4, 2, 512),
}


def config_of(shape: str, layers: int | None) -> Any:
    """The configuration of a shape, with another number of layers if one is given."""
    from transformers import LlamaConfig

    hidden, middle, depth, heads, key_heads, vocabulary = SHAPES[shape]
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=middle,
        num_hidden_layers=layers or depth,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )


def prompt(vocabulary: int, length: int = PROMPT) -> Any:
    """The same tokens for everyone."""
    import torch

    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (1, length), generator=draw).to(device())


def import_everything() -> None:
    """What all modes import, so that no load is charged for it."""
    import torch  # noqa: F401
    import transformers
    from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM, StaticCache  # noqa: F401

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with contextlib.suppress(ImportError):
        import accelerate  # noqa: F401
