"""The order in which tensors are stored: transformer blocks together, in forward order (format.md 1.5)."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBER = re.compile(r"(?:^|\.)([0-9]+)(?:\.|$)")

# Roles by parts of names, in the order of a forward pass; names of the common architectures.
_BEFORE = ("embed", "wte", "wpe", "shared", "patch", "conv_in", "time_")
_AFTER = ("final", "ln_f", "norm_f", "pooler", "lm_head", "classifier", "head", "conv_out", "proj_out")
_INSIDE = (
    ("input_layernorm", "ln_1", "norm1", "layer_norm1", "attention_norm", "layer.0.layer_norm"),
    ("q_proj", ".query", ".q.", "qkv", "c_attn", "query_key_value", "to_q"),
    ("k_proj", ".key", ".k.", "to_k"),
    ("v_proj", ".value", ".v.", "to_v"),
    ("o_proj", "attn.c_proj", "attention.output.dense", ".o.", "out_proj", "to_out"),
    ("post_attention", "ln_2", "norm2", "layer_norm2", "ffn_norm", "attention.output.layernorm"),
    ("router", "gate.weight", "mlp.gate."),
    ("gate_proj", "gate_up", "w1", "c_fc", "fc1", "wi", "intermediate"),
    ("up_proj", "w3", "wi_1"),
    ("down_proj", "w2", "mlp.c_proj", "fc2", "wo", "output.dense"),
)


def natural(name: str) -> tuple[tuple[bool, int, str], ...]:
    """Sort key in which `layers.9` comes before `layers.10`."""
    key = []
    for i, part in enumerate(re.split(r"([0-9]+)", name)):  # every second part is a number, of any size
        number = part.lstrip("0") if i % 2 else ""
        key.append((bool(i % 2), len(number), f"{number} {part}"))
    return tuple(key)


def block_of(name: str) -> str | None:
    """The block that a tensor belongs to: its name up to and including the first number, or None."""
    found = _NUMBER.search(name)
    return name[: found.end(1)] if found else None


def _rank(parts: tuple[tuple[str, ...], ...], name: str) -> int:
    for i, words in enumerate(parts):
        if any(word in name for word in words):
            return i
    return len(parts)


def forward_order(names: Iterable[str]) -> list[str]:
    """Sort tensor names as a forward pass would need them.

    Tensors outside blocks come before the blocks if their names say that they are embeddings, otherwise
    after them.

    Examples
    --------
    >>> forward_order(["lm_head.weight", "layers.10.w1", "layers.9.w1", "embed.weight"])
    ['embed.weight', 'layers.9.w1', 'layers.10.w1', 'lm_head.weight']
    """

    def key(name: str) -> tuple[object, ...]:
        lower, block = name.lower(), block_of(name)
        if block is not None:
            return 1, natural(block), _rank(_INSIDE, lower[len(block) :] + "."), natural(name)
        if any(word in lower for word in _BEFORE):
            return 0, (), 0, natural(name)
        return 2, (), _rank((_AFTER[:4], _AFTER[4:]), lower), natural(name)

    return sorted(names, key=key)
