"""The order in which tensors are stored: transformer blocks together, in forward order (format.md 1.5)."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

_DIGITS = re.compile(r"([0-9]+)")
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


def natural(name: str) -> tuple[str | int, ...]:
    """Sort key in which `layers.9` comes before `layers.10`."""
    parts = _DIGITS.split(name)  # text and digits, which may be many, in turn; text last
    key: list[str | int] = parts[:1]
    for digits, text in zip(parts[1::2], parts[2::2], strict=True):
        number = digits.lstrip("0")
        key += len(number), number, digits, text
    return tuple(key)


def block_of(name: str) -> str | None:
    """The block that a tensor belongs to: its name up to and including the first number, or None."""
    found = _NUMBER.search(name)
    return name[: found.end(1)] if found else None


_Ranked = tuple[tuple[str, int], ...]


def _ranked(*parts: tuple[str, ...]) -> _Ranked:
    return tuple((word, i) for i, words in enumerate(parts) for word in words)


_RANKS_BEFORE, _RANKS_INSIDE, _RANKS_AFTER = (
    _ranked(_BEFORE),
    _ranked(*_INSIDE),
    _ranked(_AFTER[:4], _AFTER[4:]),
)


def _rank(words: _Ranked, name: str) -> int:
    for word, rank in words:  # a loop: a generator for each name takes twice the time
        if word in name:
            return rank
    return words[-1][1] + 1


def forward_order(names: Iterable[str]) -> list[str]:
    """Sort tensor names as a forward pass would need them.

    Tensors outside blocks come before the blocks if their names say that they are embeddings, otherwise
    after them.

    Examples
    --------
    >>> forward_order(["lm_head.weight", "layers.10.w1", "layers.9.w1", "embed.weight"])
    ['embed.weight', 'layers.9.w1', 'layers.10.w1', 'lm_head.weight']
    """
    return list(forward_blocks(names))


def forward_blocks(names: Iterable[str]) -> dict[str, str | None]:
    """Tensor names in the order of `forward_order`, each with its block."""
    before: list[str] = []
    blocks: dict[str, list[str]] = {}
    after: list[str] = []
    for name in names:
        block = block_of(name)
        if block is not None:
            blocks.setdefault(block, []).append(name)
        elif _rank(_RANKS_BEFORE, name.lower()) == 0:
            before.append(name)
        else:
            after.append(name)
    order: dict[str, str | None] = dict.fromkeys(sorted(before, key=natural))
    # By what follows the block in a name, since blocks are mostly alike.
    inside = functools.cache(lambda rest: (_rank(_RANKS_INSIDE, rest.lower() + "."), natural(rest)))
    for block in sorted(blocks, key=natural):
        start = len(block)
        members = sorted(blocks[block], key=lambda name, start=start: inside(name[start:]))  # type: ignore[misc]
        order |= dict.fromkeys(members, block)
    last = sorted(after, key=lambda name: (_rank(_RANKS_AFTER, name.lower()), natural(name)))
    return order | dict.fromkeys(last)
