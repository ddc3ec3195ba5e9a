"""Device memory that a transformers model needs beside its packed weights, from its shape alone."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Container, Iterable
from typing import Any

import torch

from tpde.integrations.transformers.activations import activations_of
from tpde.integrations.transformers.layer_configs import layer_configs, most
from tpde.integrations.transformers.recurrent import recurrent_layers, recurrent_of
from tpde.loading.footprint import FIXED_BYTES, plain_bytes
from tpde.nn.batch_rows import CACHES
from tpde.nn.replace import block_path
from tpde.planning.units import Footprint

# A cache that grows leaves holes behind that are too small for what comes next.
FRAGMENTATION = 0.25


def footprint_of(
    model: Any,
    packed: Container[str],
    max_tokens: int,
    max_batch: int,
    dtype: torch.dtype,
    only: Collection[str] | None = None,
) -> Footprint:
    """What a model needs beside packed weights.

    Parameters
    ----------
    model : PreTrainedModel
        On the `meta` device.
    packed : container of str
        Names of the parameters that are packed.
    max_tokens, max_batch : int
        Sequences times length, and sequences.
    dtype : torch.dtype
        Of activations.
    only : collection of str, optional
        Parameters and buffers that are on the device in question; by default all.
    """
    activations = activations_of(model, dtype.itemsize)
    by_sequences = activations.copies or activations.recurrent.states
    return Footprint(
        plain=plain_bytes(model, packed, only),
        cache=cache_bytes(model, max_tokens, dtype.itemsize, only) + state_bytes(model, max_batch, only),
        activations=activations.bytes(max_tokens, max_batch),
        fixed=FIXED_BYTES,
        column=max_tokens * dtype.itemsize,
        argument="`max_tokens` or `max_batch`" if by_sequences else "`max_tokens`",
    )


def cache_bytes(model: Any, max_tokens: int, itemsize: int, only: Collection[str] | None = None) -> int:
    """Keys and values of all tokens, as a cache that grows by `torch.cat` holds them; 0 for encoders.

    While a layer's are joined with a token's, they are there twice. Layers that look at a window count in
    full: what they keep is a view of the whole prompt's, until the next token. With `only`, those of the
    blocks that have one of these parameters.
    """
    config = model.config.get_text_config()
    if not _can_cache(model):
        return 0
    sizes = [_cached(it) * itemsize * max_tokens for it in layer_configs(config)]
    if len(sizes) == 1:  # of all layers
        sizes *= int(getattr(config, "num_decoder_layers", None) or config.num_hidden_layers)
    if only is not None:
        blocks = _blocks(model)
        if len(blocks) == len(sizes):  # otherwise it is not known which of them cache
            pairs = zip(sizes, blocks, strict=True)
            sizes = [size for size, names in pairs if any(name in only for name in names)]
    every = sum(sizes)
    if getattr(model.config, "is_encoder_decoder", False):
        every *= 2  # those of the encoder's tokens too
    return math.ceil(every * (1 + FRAGMENTATION)) + max(sizes, default=0)


def _cached(config: Any) -> int:
    """How many numbers a layer keeps of a token."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = 2 * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    if getattr(config, "qk_nope_head_dim", None):  # latent attention: transformers caches it expanded
        heads = config.num_attention_heads
        width = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    if getattr(config, "d_kv", None):
        width = 2 * config.d_kv
    return int(heads * width)


def state_bytes(model: Any, max_batch: int, only: Collection[str] | None = None) -> int:
    """States that recurrent layers keep of so many sequences in a cache, one layer's twice."""
    states, layers = recurrent_of(model, only).states, max(len(list(recurrent_layers(model))), 1)
    return max_batch * (states + -(-states // layers))


def _blocks(model: Any) -> list[list[str]]:
    """The parameters of each block of a model's decoder."""
    decoder = model.get_decoder()
    root = next(path for path, module in model.named_modules() if module is decoder)
    found: dict[str, list[str]] = {}
    for name, _ in decoder.named_parameters(prefix=root, remove_duplicate=False):
        block = block_path(model, name.rpartition(".")[0])
        if block is not None:
            found.setdefault(block, []).append(name)
    return list(found.values())


def _can_cache(model: Any) -> bool:
    config = model.config.get_text_config()
    if not any(it in inspect.signature(model.forward).parameters for it in CACHES):
        return False
    # Some say that they are no decoder, and are one: GPT-NeoX.
    decodes = getattr(config, "is_decoder", None) is not False or model.can_generate()
    return (decodes or model.config.is_encoder_decoder) and most(config, "num_attention_heads") > 0


def activation_dtype(parameters: Iterable[torch.Tensor]) -> torch.dtype:
    """The dtype that most of a model's numbers have."""
    counts: dict[torch.dtype, int] = {}
    for it in parameters:
        counts[it.dtype] = counts.get(it.dtype, 0) + it.numel()
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)
