"""Device memory that a transformers model needs beside its packed weights, from its shape alone."""

from __future__ import annotations

import inspect
import math
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import nn

from tpde.integrations.streaming.demand import FIXED_BYTES, plain_bytes
from tpde.nn.experts import routes
from tpde.nn.replace import block_path
from tpde.streaming.units import Demand

# A cache that grows leaves holes behind that are too small for what comes next.
FRAGMENTATION = 0.25

# The outputs of a block's linear layers, and as much again: what is computed from them, in float32 in part.
COPIES = 2

# Hidden states: those that a block begins and ends with, and three in float32 while a norm computes.
STATES, FLOAT_STATES = 2, 3


def demand_of(model: Any, packed: Container[str], max_tokens: int, dtype: torch.dtype) -> Demand:
    """What a model needs beside packed weights.

    Parameters
    ----------
    model : PreTrainedModel
        On the `meta` device.
    packed : container of str
        Names of the parameters that are packed.
    max_tokens : int
        Sequences times length.
    dtype : torch.dtype
        Of activations.
    """
    return Demand(
        plain=plain_bytes(model, packed),
        cache=cache_bytes(model, max_tokens, dtype.itemsize),
        activations=activation_bytes(model, max_tokens, dtype.itemsize),
        fixed=FIXED_BYTES,
    )


def cache_bytes(model: Any, max_tokens: int, itemsize: int) -> int:
    """Keys and values of all tokens, as a cache that grows by `torch.cat` holds them; 0 for encoders.

    While a layer's are joined with a token's, they are there twice.
    """
    config = model.config.get_text_config()
    if not _can_cache(model):
        return 0
    layers = int(getattr(config, "num_decoder_layers", None) or config.num_hidden_layers)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = 2 * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    if getattr(config, "qk_nope_head_dim", None):  # latent attention: transformers caches it expanded
        heads = config.num_attention_heads
        width = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    if getattr(config, "d_kv", None):
        width = 2 * config.d_kv
    layer = heads * width * itemsize * max_tokens
    if getattr(model.config, "is_encoder_decoder", False):
        layers *= 2  # those of the encoder's tokens too
    return int(math.ceil(layer * layers * (1 + FRAGMENTATION)) + layer)


def _can_cache(model: Any) -> bool:
    config = model.config.get_text_config()
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        return False
    encoder_only = getattr(config, "is_decoder", None) is False and not model.config.is_encoder_decoder
    return not encoder_only and getattr(config, "num_attention_heads", None) is not None


def activation_bytes(model: Any, max_tokens: int, itemsize: int) -> int:
    """The most that a forward pass of all tokens at once has beside weights and cache.

    That is in the block whose linear layers have the widest outputs, or at the end, where the logits are.
    """
    config = model.config.get_text_config()
    hidden = int(getattr(config, "hidden_size", 0) or 0)
    widths: dict[str, int] = {}
    for path, module in model.named_modules():
        width = _outputs(module, config)
        if width:
            where = block_path(model, path) or path
            widths[where] = widths.get(where, 0) + width
    block = max(widths.values(), default=0)
    vocabulary = (
        int(getattr(config, "vocab_size", 0) or 0) if model.get_output_embeddings() is not None else 0
    )
    states = max_tokens * hidden * (STATES * itemsize + FLOAT_STATES * 4)
    inside = COPIES * max_tokens * block * itemsize + _gathered_bytes(model, config)
    # A sampler takes one token's logits in float32, and sorts and sums these.
    logits = max_tokens * vocabulary * itemsize + 4 * vocabulary * 4
    return states + max(inside + _attention_bytes(model, config, max_tokens, itemsize), logits)


def _outputs(module: nn.Module, config: Any) -> int:
    """How many values a token has in the outputs of a linear layer, or of fused experts."""
    if isinstance(module, nn.Linear):
        return module.out_features
    if type(module).__name__ == "Conv1D":
        return int(module.nf)  # type: ignore[arg-type]
    shapes = [it.shape for it in module.parameters(recurse=False) if it.dim() == 3]
    if not shapes:
        return 0
    # Of three dimensions the first counts the experts; which of the others is the output, classes differ in.
    return _chosen(config) * (
        sum(max(shape[1:]) for shape in shapes) + max(min(shape[1:]) for shape in shapes)
    )


def _chosen(config: Any) -> int:
    """How many experts a token needs."""
    return int(getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k", None) or 1)


def _gathered_bytes(model: nn.Module, config: Any) -> int:
    """Copies of the experts that one token needs.

    `batched_mm`, with which `generate` decodes on GPUs unless told otherwise, gathers their weights. It does
    so for each sequence; several are not accounted for.
    """
    sizes = [
        sum(
            it.numel() // it.shape[0] * it.element_size()
            for it in module.parameters(recurse=False)
            if it.dim() == 3
        )
        for module in model.modules()
        if routes(type(module))
    ]
    return _chosen(config) * max(sizes, default=0)


def _attention_bytes(model: Any, config: Any, max_tokens: int, itemsize: int) -> int:
    """Of what has a number for each pair of tokens, if all are of one sequence.

    A mask is there as booleans and in the dtype. Position biases that the model learns are there for each
    head: alone, with the mask, and as they are looked up, with their row numbers. Attention that is not fused
    has scores for each head, also in float32.
    """
    pairs = max_tokens * max_tokens
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    total = pairs * (1 + itemsize)
    if any(path.endswith("relative_attention_bias") for path, _ in model.named_modules()):
        total += pairs * (3 * heads * itemsize + 3 * 8)
    if getattr(config, "_attn_implementation", None) == "eager":
        total += pairs * heads * (2 * itemsize + 4)
    return total


def activation_dtype(parameters: Iterable[torch.Tensor]) -> torch.dtype:
    """The dtype that most of a model's numbers have."""
    counts: dict[torch.dtype, int] = {}
    for it in parameters:
        counts[it.dtype] = counts.get(it.dtype, 0) + it.numel()
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)
