"""What a forward pass of a transformers model has in memory beside weights and cache, from its shape."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torch import nn

from tpde.integrations.transformers.internals import attention_of, experts_of
from tpde.integrations.transformers.layer_configs import most
from tpde.integrations.transformers.recurrent import NONE, Recurrent, recurrent_of
from tpde.nn.replace import block_path
from tpde.nn.routing import routes

# The outputs of a block's linear layers, and as much again: what is computed from them, in float32 in part.
COPIES = 2

# Hidden states: those that a block begins and ends with, and three in float32 while a norm computes.
STATES, FLOAT_STATES = 2, 3

# What choosing a token takes, bytes for each of its logits: with `top_k` and `top_p` 38, of logits in float32
# that are masked, sorted with their indices, and summed; while it sorts, a GPU has as much.
SAMPLING = 40

_COPYING = ("grouped_mm", "batched_mm")  # implementations of experts with which `generate` copies them

# What a configuration calls a factor or bound of logits. Where there is one, a model has two copies of them.
_SCALES = re.compile(r"(logits?_\w*(scal|cap|multiplier)|(output|head)_multiplier|^softcap$)")
_OTHERS = re.compile(r"attn|attention|router|init")  # logits that are not those of tokens


class Activations(NamedTuple):
    """Bytes of what a forward pass has at its peak.

    Attributes
    ----------
    states : int
        Of each token: hidden states.
    inside : int
        Of each token: what is computed in the block whose linear layers have the widest outputs.
    pair : int
        Of each pair of tokens of a sequence, in attention.
    experts : int
        Of each token: copies of the experts that it needs, which `batched_mm` makes.
    logits : int
        Of each token at the end.
    sampling : int
        Of each sequence, while its next token is chosen, beside its logits.
    recurrent : Recurrent
        What recurrent layers have, and what they keep.
    copies : bool
        Whether experts are copied unless it is asked for otherwise: `generate` decodes with `batched_mm` on
        GPUs where prompts are computed with `grouped_mm`, the default.
    """

    states: int
    inside: int
    pair: int
    experts: int
    logits: int
    sampling: int
    recurrent: Recurrent = NONE
    copies: bool = False

    def tokens(self, max_tokens: int, max_batch: int) -> int:
        """Of all tokens at once, in at most so many sequences, without copies of experts.

        The peak is in the widest block, or at the end, where the logits are.
        """
        batch = min(max_batch, max_tokens)
        inside = max_tokens * self.inside + max_tokens * max_tokens * self.pair
        scan = self.recurrent.scan.bytes(max_tokens, batch)
        ends = max_tokens * self.logits + batch * self.sampling
        return max_tokens * self.states + max(inside, scan, ends)

    def copied(self, max_tokens: int, max_batch: int) -> int:
        """Of how many tokens at once the experts can be copied: one of each sequence, if any."""
        return min(max_batch, max_tokens) if self.copies else 0

    def bytes(self, max_tokens: int, max_batch: int) -> int:
        """Of all tokens at once, and of the copies of experts while all sequences are continued.

        One beside the other, though a pass has one or the other: where a prompt's activations were, keys and
        values lie by then, and between them PyTorch's allocator has no room in one piece for the copies, each
        of which is one tensor.
        """
        return self.tokens(max_tokens, max_batch) + self.copied(max_tokens, max_batch) * self.experts


def activations_of(model: Any, itemsize: int) -> Activations:
    """What a model has.

    Parameters
    ----------
    model : PreTrainedModel
        On the `meta` device.
    itemsize : int
        Bytes of an activation.
    """
    config = model.config.get_text_config()
    hidden = most(config, "hidden_size")
    head = model.get_output_embeddings()
    widths: dict[str, int] = {}
    for path, module in model.named_modules():
        width = 0 if module is head else _outputs(module, config)  # of which come the logits, and no more
        if width:
            where = block_path(model, path) or path
            widths[where] = widths.get(where, 0) + width
    vocabulary = int(getattr(config, "vocab_size", 0) or 0) if head is not None else 0
    experts = _gathered_bytes(model, config)
    return Activations(
        states=hidden * (STATES * itemsize + FLOAT_STATES * 4),
        inside=COPIES * max(widths.values(), default=0) * itemsize,
        pair=_pair_bytes(model, config, itemsize),
        experts=experts,
        logits=vocabulary * itemsize * (2 if _scales_logits(config) else 1),
        sampling=vocabulary * SAMPLING,
        recurrent=recurrent_of(model),
        copies=experts > 0 and experts_of(config) in _COPYING,
    )


def _scales_logits(config: Any) -> bool:
    """Whether a model multiplies its logits, or bounds them."""
    return any(
        value and _SCALES.search(name) and not _OTHERS.search(name)
        for name, value in config.to_dict().items()
    )


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
    return most(config, "num_experts_per_tok") or most(config, "top_k") or 1


def _gathered_bytes(model: nn.Module, config: Any) -> int:
    """Copies of the experts that one token needs."""
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


def _pair_bytes(model: Any, config: Any, itemsize: int) -> int:
    """Of what has a number for each pair of tokens.

    A mask is there as booleans and in the dtype. Position biases that the model learns are there for each
    head: alone and with the mask, and their row numbers. With them PyTorch may not fuse attention, and then
    has biases, scores and weights in float32, as measured on an H200 with PyTorch 2.11: 13.9 bytes for each
    head of a T5. Attention that is never fused has scores for each head, also in float32.
    """
    heads = most(config, "num_attention_heads")
    total = 1 + itemsize
    if any(path.endswith("relative_attention_bias") for path, _ in model.named_modules()):
        total += heads * (2 * itemsize + 3 * 4) + 3 * 8
    if attention_of(config) == "eager":
        total += heads * (2 * itemsize + 4)
    return total
