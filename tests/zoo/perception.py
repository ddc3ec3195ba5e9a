"""Models of images and sound, and those of images and text, of transformers."""

from __future__ import annotations

from typing import Any

from .architecture import LENGTH, Architecture, Inputs, described, ids, noise

SIDE = 32
PATCHES = 16  # of 8 x 8
IMAGE = 300  # the token that stands for a patch


def _images() -> dict[str, Any]:
    return {"pixel_values": noise(2, 3, SIDE, SIDE)}


def _pair() -> dict[str, Any]:
    import torch

    tokens = ids()
    tokens[:, -1] = 2
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)} | _images()


vision = described("vision", _images)
both = described("vision", _pair)
wave = described("audio", lambda: {"input_values": noise(2, 400)})
sound = described("audio", lambda: {"input_values": noise(2, 1, 640)})


def multimodal(
    name: str,
    model: str,
    *,
    patches: int = PATCHES,
    more: Inputs = _images,
    **overrides: Any,
) -> Architecture:
    """Describe a model that writes about an image in each of two rows; the first is padded at its left."""

    def inputs() -> dict[str, Any]:
        import torch

        image = torch.full((2, patches), IMAGE)
        tokens = torch.cat([ids(length=2), image, ids(length=LENGTH)], 1)
        mask = torch.ones_like(tokens)
        tokens[0, :2] = 0
        mask[0, :2] = 0
        return {"input_ids": tokens, "attention_mask": mask} | more()

    return described("multimodal", inputs, inputs)(name, model, **overrides)


_STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [32, 32, 64, 64]}
_WINDOWS = {"embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "patch_size": 4}
_WAVES = {
    "conv_dim": [32, 32],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 64,
    "vocab_size": 64,
}

_CODEC = {"num_filters": 8, "upsampling_ratios": [4, 2], "codebook_size": 64}

VISION: list[Architecture] = [
    vision("vit", "ViTForImageClassification"),
    vision("deit", "DeiTForImageClassification"),
    vision("beit", "BeitForImageClassification", use_relative_position_bias=True),
    vision("dinov2", "Dinov2ForImageClassification"),
    vision("dinov3_vit", "DINOv3ViTModel"),
    vision("vit_mae", "ViTMAEModel"),
    vision("ijepa", "IJepaForImageClassification"),
    vision("swin", "SwinForImageClassification", **_WINDOWS),
    vision("swinv2", "Swinv2ForImageClassification", **_WINDOWS),
    vision("convnext", "ConvNextForImageClassification", **_STAGES, patch_size=4),
    vision("convnextv2", "ConvNextV2ForImageClassification", **_STAGES, patch_size=4),
    vision("resnet", "ResNetForImageClassification", **_STAGES, embedding_size=32),
    vision("mobilenet_v2", "MobileNetV2ForImageClassification"),
    vision("segformer", "SegformerForImageClassification", **_STAGES, num_attention_heads=[1, 2, 2, 4]),
    both("clip", "CLIPModel", text_config={"eos_token_id": 2}, vision_config={}),
    both("siglip", "SiglipModel"),
    vision("clip_vision", "CLIPVisionModelWithProjection", "clip_vision_model"),
    vision(
        "detr",
        "DetrForObjectDetection",
        num_queries=8,
        backbone_config={
            "model_type": "resnet",
            **_STAGES,
            "embedding_size": 32,
            "out_features": ["stage4"],
        },
    ),
    described(
        "vision",
        lambda: {"pixel_values": noise(2, 3, 64, 64), "input_points": noise(2, 1, 1, 2).abs() * 20},
    )(
        "sam",
        "SamModel",
        vision_config={
            "image_size": 64,
            "output_channels": 32,
            "window_size": 4,
            "global_attn_indexes": [1],
            "num_pos_feats": 16,
        },
        prompt_encoder_config={"hidden_size": 32, "image_size": 64, "mask_input_channels": 8},
        mask_decoder_config={
            "hidden_size": 32,
            "mlp_dim": 64,
            "iou_head_hidden_dim": 32,
            "num_attention_heads": 4,
        },
    ),
]

AUDIO: list[Architecture] = [
    wave("wav2vec2", "Wav2Vec2ForCTC", **_WAVES),
    wave("hubert", "HubertForCTC", **_WAVES),
    wave("wavlm", "WavLMForCTC", **_WAVES),
    wave("unispeech-sat", "UniSpeechSatForCTC", **_WAVES),
    wave("data2vec-audio", "Data2VecAudioForCTC", **(_WAVES | {"num_conv_pos_embeddings": 2})),
    described("audio", lambda: {"input_values": noise(2, 24, 16)})(
        "audio-spectrogram-transformer", "ASTForAudioClassification", max_length=24, num_mel_bins=16
    ),
    sound("encodec", "EncodecModel", **_CODEC, hidden_size=32),
    sound(
        "mimi",
        "MimiModel",
        **_CODEC,
        codebook_dim=32,
        vector_quantization_hidden_dimension=32,
        num_quantizers=4,
        num_semantic_quantizers=1,
        upsample_groups=32,
    ),
]


def _qwen_images() -> dict[str, Any]:
    import torch

    return {
        "pixel_values": noise(2 * PATCHES, 3 * 2 * 8 * 8),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
        "mm_token_type_ids": torch.tensor([[0, 0, *[1] * 4, *[0] * LENGTH]] * 2),
    }


_QWEN: dict[str, Any] = {
    "patches": PATCHES // 4,
    "more": _qwen_images,
    "image_token_id": IMAGE,
    "video_token_id": IMAGE + 1,
    "vision_start_token_id": IMAGE + 2,
    "vision_end_token_id": IMAGE + 3,
    "vision_token_id": IMAGE + 4,
}
_IDEFICS: dict[str, Any] = {
    "patches": PATCHES // 4,
    "more": lambda: {"pixel_values": noise(2, 1, 3, SIDE, SIDE)},
    "image_token_id": IMAGE,
    "scale_factor": 2,
    "text_config": {"model_type": "llama"},
}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}

MULTIMODAL: list[Architecture] = [
    multimodal(
        "llava",
        "LlavaForConditionalGeneration",
        image_token_index=IMAGE,
        vision_config={"model_type": "clip_vision_model"},
        text_config={"model_type": "llama"},
        vision_feature_layer=-1,
        image_seq_length=PATCHES,
    ),
    multimodal(
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        image_token_index=IMAGE,
        projection_dim=64,
        vision_config={"model_type": "siglip_vision_model", "vision_use_head": False},
        text_config={"model_type": "gemma"},
    ),
    multimodal(
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        **_QWEN,
        vision_config={"embed_dim": 64, "hidden_size": 64, "patch_size": 8, "spatial_merge_size": 2},
        text_config=_ROPE,
    ),
    multimodal(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        **_QWEN,
        vision_config={
            "hidden_size": 64,
            "out_hidden_size": 64,
            "patch_size": 8,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        text_config=_ROPE,
    ),
    multimodal(
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        **{name: value for name, value in _QWEN.items() if name != "vision_token_id"},
        vision_config={
            "out_hidden_size": 64,
            "patch_size": 8,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
        text_config=_ROPE,
    ),
    multimodal("idefics3", "Idefics3ForConditionalGeneration", **_IDEFICS),
    multimodal("smolvlm", "SmolVLMForConditionalGeneration", **_IDEFICS),
    multimodal(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        patches=4,
        image_token_id=IMAGE,
        mm_tokens_per_image=4,
        vision_config={"model_type": "siglip_vision_model", "vision_use_head": False},
    ),
    multimodal(
        "internvl",
        "InternVLForConditionalGeneration",
        patches=4,
        image_token_id=IMAGE,
        image_seq_length=4,
        vision_config={"image_size": [32, 32], "patch_size": [8, 8]},
        text_config={"model_type": "qwen2"},
    ),
    multimodal(
        "blip-2",
        "Blip2ForConditionalGeneration",
        patches=4,
        image_token_index=IMAGE,
        num_query_tokens=4,
        qformer_config={"encoder_hidden_size": 64},
        text_config={"model_type": "opt", "word_embed_proj_dim": 64},
    ),
]
