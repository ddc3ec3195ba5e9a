"""Eleven shapes of models that are used: full width, few layers, and inputs for them.

Widths are those of Llama 3.1 8B, Gemma 3 4B (its text part), Qwen3 30B A3B, Mixtral 8x7B, gpt-oss 20B (in
bf16), Phi-3 mini, Falcon-H1 7B, T5 v1.1 XXL, Whisper large v3, LLaVA 1.5 7B and FLUX.1. `tiny` ones are for
trying things out on a processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Sizes = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A kind of model.

    Attributes
    ----------
    kind : str
        Class of transformers, or of diffusers if `inputs` is `"image"`.
    config : str
        Its configuration's.
    full, tiny : dict
        What is passed to that.
    inputs : str
        `text`, `pairs` (encoder and decoder), `sound`, `picture` (and text), or `image` (of latents).
    max_tokens, tiny_tokens : int
        The most tokens that forward passes get, both sides and pictures included.
    special : dict
        Numbers of the tokens that mean something, for both sizes.
    """

    kind: str
    config: str
    full: Sizes
    tiny: Sizes
    inputs: str = "text"
    max_tokens: int = 2048
    tiny_tokens: int = 128
    special: Mapping[str, int] = field(default_factory=dict)


_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _sizes(hidden: int, middle: int, layers: int, heads: int, pairs: int, words: int) -> Sizes:
    return {
        "hidden_size": hidden,
        "intermediate_size": middle,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": pairs,
        "vocab_size": words,
    }


_SMALL = _sizes(64, 160, 2, 4, 2, 512)
_TINY_WHISPER = {
    "vocab_size": 520,
    "num_mel_bins": 16,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_source_positions": 20,
    "max_target_positions": 32,
}
_WHISPER_ENDS = {"decoder_start_token_id": 1, **_ENDS}

SHAPES: dict[str, Shape] = {
    "llama": Shape(
        "LlamaForCausalLM",
        "LlamaConfig",
        _sizes(4096, 14336, 3, 32, 8, 128_256) | _ENDS,
        _SMALL | _ENDS,
    ),
    "gemma3": Shape(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        _sizes(2560, 10240, 4, 8, 4, 262_144)
        | {"head_dim": 256, "sliding_window": 1024, "query_pre_attn_scalar": 256}
        | {"layer_types": [*["sliding_attention"] * 3, "full_attention"], "tie_word_embeddings": True}
        | _ENDS,
        _SMALL
        | {"head_dim": 16, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
        | {"tie_word_embeddings": True}
        | _ENDS,
    ),
    "qwen3-moe": Shape(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        _sizes(2048, 6144, 2, 32, 4, 151_936)
        | {"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
        | {"norm_topk_prob": True}
        | _ENDS,
        _SMALL
        | {"head_dim": 16, "moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2}
        | _ENDS,
    ),
    "mixtral": Shape(
        "MixtralForCausalLM",
        "MixtralConfig",
        _sizes(4096, 14336, 2, 32, 8, 32_000) | {"sliding_window": None} | _ENDS,
        _SMALL | {"num_local_experts": 4, "sliding_window": None} | _ENDS,
    ),
    "gpt-oss": Shape(
        "GptOssForCausalLM",
        "GptOssConfig",
        _sizes(2880, 2880, 2, 64, 8, 201_088)
        | {"head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128}
        | {"layer_types": ["sliding_attention", "full_attention"]}
        | _ENDS,
        _SMALL
        | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}
        | {"layer_types": ["sliding_attention", "full_attention"]}
        | _ENDS,
    ),
    "phi3": Shape(
        "Phi3ForCausalLM",
        "Phi3Config",
        _sizes(3072, 8192, 4, 32, 32, 32_064) | {"sliding_window": 2047} | _ENDS,
        _SMALL | {"sliding_window": 31} | _ENDS,
    ),
    "falcon-h1": Shape(
        "FalconH1ForCausalLM",
        "FalconH1Config",
        _sizes(3072, 12288, 4, 12, 2, 130_048)
        | {"head_dim": 128, "mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128}
        | {"mamba_d_state": 256, "mamba_n_groups": 1, "mamba_chunk_size": 128, "lm_head_multiplier": 0.02}
        | _ENDS,
        _SMALL
        | {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}
        | {"mamba_chunk_size": 16, "lm_head_multiplier": 0.5}
        | _ENDS,
    ),
    "t5": Shape(
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_heads": 64, "num_layers": 2}
        | {"num_decoder_layers": 2, "vocab_size": 32_128, "feed_forward_proj": "gated-gelu"}
        | {"tie_word_embeddings": False, "decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0},
        {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2}
        | {"vocab_size": 512, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
        | {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0},
        inputs="pairs",
    ),
    "whisper": Shape(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {"d_model": 1280, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 20}
        | {"decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120}
        | {"num_mel_bins": 128, "vocab_size": 51_866}
        | _WHISPER_ENDS,
        _TINY_WHISPER | _WHISPER_ENDS,
        inputs="sound",
        max_tokens=8 * (1500 + 448),
        tiny_tokens=8 * (20 + 32),
    ),
    "llava": Shape(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": _sizes(4096, 11008, 3, 32, 32, 32_064) | {"model_type": "llama"} | _ENDS,
            "vision_config": {"model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336}
            | {"intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 16, "patch_size": 14}
            | {"projection_dim": 768, "vocab_size": 32_000},
            "image_token_index": 32_000,
        },
        {
            "text_config": _SMALL | {"model_type": "llama"} | _ENDS,
            "vision_config": {"model_type": "clip_vision_model", "hidden_size": 32, "image_size": 28}
            | {"intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "patch_size": 14}
            | {"projection_dim": 16},
            "image_token_index": 500,
        },
        inputs="picture",
        max_tokens=8 * 640,
        tiny_tokens=8 * 16,
        special={"picture": 576, "tiny_picture": 4},
    ),
    "flux": Shape(
        "FluxTransformer2DModel",
        "",
        {"num_layers": 2, "num_single_layers": 2, "guidance_embeds": True},
        {"num_layers": 1, "num_single_layers": 1, "guidance_embeds": True, "in_channels": 16}
        | {"attention_head_dim": 32, "num_attention_heads": 2, "joint_attention_dim": 64}
        | {"pooled_projection_dim": 32, "axes_dims_rope": (8, 12, 12)},
        inputs="image",
        max_tokens=8 * (32 * 32 + 512),
        tiny_tokens=8 * (4 * 4 + 8),
        special={"text": 512, "tiny_text": 8},
    ),
}


def config_of(shape: Shape, tiny: bool) -> Any:
    """The configuration of a model of transformers."""
    import transformers

    return getattr(transformers, shape.config)(**(shape.tiny if tiny else shape.full))


def class_of(shape: Shape) -> Any:
    """The model's class."""
    if shape.inputs == "image":
        import diffusers

        return getattr(diffusers, shape.kind)
    import transformers

    return getattr(transformers, shape.kind)


def model_of(shape: Shape, tiny: bool) -> Any:
    """A model in bf16 on the device that is the default one, its weights as they come."""
    import torch

    kind = class_of(shape)
    if shape.inputs == "image":
        return kind(**(shape.tiny if tiny else shape.full)).to(torch.bfloat16).eval()
    return kind._from_config(config_of(shape, tiny), dtype=torch.bfloat16).eval()


Draw = Callable[[int, tuple[int, ...]], Any]
Normal = Callable[..., Any]


def forward_inputs(shape: Shape, tiny: bool, batch: int, draw: Draw, normal: Normal) -> dict[str, Any]:
    """Arguments of a forward pass of `batch` sequences with all tokens that there is to be memory for.

    Parameters
    ----------
    shape : Shape
        Of what.
    tiny : bool
        The small one.
    batch : int
        Sequences, or images.
    draw : callable
        Makes a tensor of whole numbers, from 3 to below a bound.
    normal : callable
        Makes a tensor of normal numbers in bf16.
    """
    import torch

    tokens, sizes = (shape.tiny_tokens, shape.tiny) if tiny else (shape.max_tokens, shape.full)
    length, special = tokens // batch, shape.special
    prefix = "tiny_" if tiny else ""
    if shape.inputs == "text":
        return {"input_ids": draw(sizes["vocab_size"], (batch, length))}
    if shape.inputs == "pairs":
        half = length // 2
        ids = draw(sizes["vocab_size"], (batch, half))
        return {"input_ids": ids, "decoder_input_ids": draw(sizes["vocab_size"], (batch, length - half))}
    if shape.inputs == "sound":
        frames = 2 * sizes.get("max_source_positions", 1500)
        words = sizes.get("max_target_positions", 448)
        ids = draw(sizes["vocab_size"], (batch, words))
        return {"input_features": normal(batch, sizes["num_mel_bins"], frames), "decoder_input_ids": ids}
    if shape.inputs == "picture":
        pictures = tokens // 640 if not tiny else tokens // 16  # as many in one sequence as in eight
        each = special[prefix + "picture"]
        ids = draw(sizes["image_token_index"], (batch, length))
        ids[:, 1 : 1 + each * (pictures // batch)] = sizes["image_token_index"]
        side = sizes["vision_config"]["image_size"]
        return {"input_ids": ids, "pixel_values": normal(pictures, 3, side, side)}
    text = special[prefix + "text"]
    side = math.isqrt(length - text)
    ids = torch.zeros(side * side, 3)
    ids[:, 1] = torch.arange(side).repeat_interleave(side)
    ids[:, 2] = torch.arange(side).repeat(side)
    return {
        "hidden_states": normal(batch, side * side, sizes.get("in_channels", 64)),
        "encoder_hidden_states": normal(batch, text, sizes.get("joint_attention_dim", 4096)),
        "pooled_projections": normal(batch, sizes.get("pooled_projection_dim", 768)),
        "timestep": normal(batch).abs().clamp(max=1.0),
        "guidance": torch.full((batch,), 3.5),
        "img_ids": ids,
        "txt_ids": torch.zeros(text, 3),
        "return_dict": False,
    }


def prompts(shape: Shape, tiny: bool, batch: int, new: int, draw: Draw, normal: Normal) -> dict[str, Any]:
    """Arguments of `generate`: prompts, half of them padded, with room for `new` tokens more."""
    import torch

    given = forward_inputs(shape, tiny, batch, draw, normal)
    if shape.inputs == "sound":
        begun = given["decoder_input_ids"][:, :4]
        return {"input_features": given["input_features"], "decoder_input_ids": begun}
    ids = given["input_ids"]
    if shape.inputs == "pairs":
        ids = torch.cat((ids, given["decoder_input_ids"]), 1)
    ids = ids[:, : ids.shape[1] - new - 1]
    mask = torch.ones_like(ids)
    if shape.inputs == "pairs":
        mask[batch // 2 :, -(ids.shape[1] // 4) :] = 0
    elif shape.inputs == "text":
        mask[batch // 2 :, : ids.shape[1] // 4] = 0
    found = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
    return found | ({"pixel_values": given["pixel_values"]} if shape.inputs == "picture" else {})
