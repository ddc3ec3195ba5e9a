"""Tiny configurations: a default one whose sizes, known by their names, are replaced by small ones."""

from __future__ import annotations

import dataclasses
from typing import Any

VOCAB = 320
WIDTH = 64
EXPERTS = 32  # fewer, and routers would be too small to be packed

_HEADS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "index_n_heads": 2,
    "head_dim": 16,
    "d_kv": 16,
    "v_head_dim": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "index_head_dim": 32,
    "rotary_dim": 16,
    "query_pre_attn_scalar": 16,
}
_WIDTHS = {
    "hidden_size": WIDTH,
    "d_model": WIDTH,
    "n_embd": WIDTH,
    "embedding_size": WIDTH,
    "embed_dim": WIDTH,
    "dim": WIDTH,
    "width": WIDTH,
    "projection_dim": WIDTH,
    "intermediate_size": 128,
    "hidden_dim": 128,
    "d_ff": 128,
    "n_inner": 128,
    "ffn_dim": 128,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "mm_embed_dim": WIDTH,
}
_DEPTHS = {
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "depth": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "max_window_layers": 2,
}
_EXPERTS = {
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "index_topk": 4,
}
_STATES = {
    "state_size": 16,
    "mamba_d_state": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_chunk_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "time_step_rank": 8,
}
_LENGTHS = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "sliding_window": 6,
    "max_source_positions": 64,
    "max_target_positions": 64,
    "image_size": 32,
    "patch_size": 8,
}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
SMALL: dict[str, Any] = _HEADS | _WIDTHS | _DEPTHS | _EXPERTS | _STATES | _LENGTHS | _TOKENS


class Unbuilt(Exception):
    """A plain model cannot be made: a fault of the zoo, but for what is absent."""


class Absent(Unbuilt):
    """The installed libraries do not have this architecture."""


def tiny(kind: str | type, **overrides: Any) -> Any:
    """Give a configuration of a kind, tiny.

    Parameters
    ----------
    kind : str or type
        The name under which transformers knows the configuration, or its class.
    overrides
        Values of its own. Those of a part of the configuration are a dict, in which `model_type` names the
        part's kind, or a configuration.

    Returns
    -------
    transformers.PreTrainedConfig

    Raises
    ------
    Absent
        If transformers does not know the kind.
    """
    from transformers import CONFIG_MAPPING

    if isinstance(kind, str) and kind not in CONFIG_MAPPING:
        raise Absent(f"this transformers has no {kind}")
    cls: Any = CONFIG_MAPPING[kind] if isinstance(kind, str) else kind
    fields = {field.name for field in dataclasses.fields(cls)}
    given: dict[str, Any] = {name: value for name, value in SMALL.items() if name in fields}
    usual = cls() if cls.sub_configs else None
    for name in cls.sub_configs:
        part = overrides.pop(name, {})
        if isinstance(part, dict):
            part, default = dict(part), getattr(usual, name, None)
            part_kind = part.pop("model_type", getattr(default, "model_type", None))
            if part_kind is None:  # a part that is left out by default
                continue
            part = tiny(part_kind if part_kind in CONFIG_MAPPING else type(default), **part)
        given[name] = part
    return cls(**(given | overrides))
