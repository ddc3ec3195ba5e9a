"""Models of diffusers and timm."""

from __future__ import annotations

from typing import Any

from .architecture import Architecture, Inputs, noise


def diffusion(name: str, model: str, inputs: Inputs, **options: Any) -> Architecture:
    """Describe a model of diffusers."""

    def build() -> Any:
        import diffusers

        return getattr(diffusers, model)(**options)

    return Architecture(name, "diffusion", build, inputs, library="diffusers")


def _long(*values: int) -> Any:
    import torch

    return torch.tensor(values)


DIFFUSION: list[Architecture] = [
    diffusion(
        "unet2d",
        "UNet2DModel",
        lambda: {"sample": noise(2, 3, 8, 8), "timestep": 10},
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    ),
    diffusion(
        "unet2d_condition",
        "UNet2DConditionModel",
        lambda: {"sample": noise(2, 4, 8, 8), "timestep": 10, "encoder_hidden_states": noise(2, 5, 32)},
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        norm_num_groups=8,
        cross_attention_dim=32,
        attention_head_dim=8,
    ),
    diffusion(
        "autoencoder_kl",
        "AutoencoderKL",
        lambda: {"sample": noise(2, 3, 16, 16)},
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
        latent_channels=4,
    ),
    diffusion(
        "pixart",
        "PixArtTransformer2DModel",
        lambda: {
            "hidden_states": noise(2, 4, 8, 8),
            "encoder_hidden_states": noise(2, 5, 32),
            "timestep": _long(7, 9),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=64,
        sample_size=8,
        caption_channels=32,
        use_additional_conditions=False,
    ),
    diffusion(
        "sd3",
        "SD3Transformer2DModel",
        lambda: {
            "hidden_states": noise(2, 4, 8, 8),
            "encoder_hidden_states": noise(2, 5, 32),
            "pooled_projections": noise(2, 32),
            "timestep": _long(7, 9),
        },
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=32,
        pos_embed_max_size=8,
    ),
    diffusion(
        "flux",
        "FluxTransformer2DModel",
        lambda: {
            "hidden_states": noise(2, 16, 4),
            "encoder_hidden_states": noise(2, 5, 32),
            "pooled_projections": noise(2, 32),
            "timestep": _long(1, 1) * 0.5,
            "img_ids": noise(16, 3).mul(4).round(),
            "txt_ids": noise(5, 3) * 0,
        },
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    ),
    diffusion(
        "dit",
        "DiTTransformer2DModel",
        lambda: {"hidden_states": noise(2, 4, 8, 8), "timestep": _long(7, 9), "class_labels": _long(1, 2)},
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=16,
    ),
    diffusion(
        "wan",
        "WanTransformer3DModel",
        lambda: {
            "hidden_states": noise(2, 4, 2, 8, 8),
            "timestep": _long(7, 9),
            "encoder_hidden_states": noise(2, 5, 32),
        },
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=64,
        num_layers=2,
        cross_attn_norm=True,
        rope_max_seq_len=32,
    ),
]


def image_model(name: str, model: str, **options: Any) -> Architecture:
    """Describe a model of timm."""

    def build() -> Any:
        import timm

        return timm.create_model(model, pretrained=False, num_classes=10, **options)

    return Architecture(name, "timm", build, lambda: {"x": noise(2, 3, 32, 32)}, library="timm")


TIMM: list[Architecture] = [
    image_model(
        "timm_vit", "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=4
    ),
    image_model("timm_resnet", "resnet10t", channels=(32, 32, 32, 32)),
    image_model("timm_convnext", "convnext_atto", depths=(1, 1, 1, 1), dims=(32, 32, 64, 64)),
]
