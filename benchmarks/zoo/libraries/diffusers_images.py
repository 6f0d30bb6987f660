"""Denoisers of diffusers for pictures: UNets and transformers, shrunk by their configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.zoo.libraries.diffusers_model import (
    HEADS,
    LATENT,
    PATCHES,
    PROMPT,
    STAGES,
    TEXT,
    WIDTH,
    Frames,
    Model,
    PromptOfEachFrame,
)
from benchmarks.zoo.libraries.draws import Draw, classes, each, normal, ones, same, steps, timed, times


def _positions(height: int, width: int) -> torch.Tensor:
    """Of patches, as Flux has them: (height * width, 3)."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], -1).flatten(0, 1).float()


_CROSS: Mapping[str, Any] = {
    **STAGES,
    "cross_attention_dim": WIDTH,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
}
_UNET: Mapping[str, Any] = {**_CROSS, "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "sample_size": 16}
_UNET_INPUTS: Mapping[str, Draw] = {"sample": LATENT, "timestep": steps, "encoder_hidden_states": PROMPT}
_SD3: Mapping[str, Any] = {
    **HEADS,
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "joint_attention_dim": WIDTH,
    "caption_projection_dim": WIDTH,
    "pooled_projection_dim": WIDTH,
    "pos_embed_max_size": 16,
}
_FLUX: Mapping[str, Any] = {
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": WIDTH,
    "axes_dims_rope": (4, 6, 6),
}
_FLUX_INPUTS: Mapping[str, Draw] = {
    "hidden_states": normal(16, 16),
    "encoder_hidden_states": PROMPT,
    "timestep": times,
    "img_ids": same(lambda: _positions(4, 4)),
    "txt_ids": same(lambda: torch.zeros(TEXT, 3)),
}

MODELS: tuple[Model, ...] = (
    Model(
        "UNet2DModel",
        {
            **STAGES,
            "sample_size": 16,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        {"sample": normal(3, 16, 16), "timestep": steps},
        normal(3, 16, 16),
    ),
    Model("UNet2DConditionModel", _UNET, _UNET_INPUTS, LATENT),
    Model(
        "UNet2DConditionModel",
        _UNET,
        {**_UNET_INPUTS, "controlnet_cond": normal(3, 128, 128)},
        LATENT,
        control=("ControlNetModel", {**_CROSS, "conditioning_embedding_out_channels": (8, 8, 8, 8)}),
    ),
    Model(
        "UNet1DModel",
        {
            "in_channels": 2,
            "sample_size": 64,
            "block_out_channels": (32, 32),
            "extra_in_channels": 64,
            "down_block_types": ("DownBlock1DNoSkip", "AttnDownBlock1D"),
            "up_block_types": ("AttnUpBlock1D", "UpBlock1DNoSkip"),
        },
        {"sample": normal(2, 64), "timestep": times},
        normal(2, 64),
    ),
    Model(
        "UNet3DConditionModel",
        {
            **STAGES,
            "cross_attention_dim": WIDTH,
            "attention_head_dim": 8,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        },
        {"sample": normal(4, 3, 8, 8), "timestep": steps, "encoder_hidden_states": PROMPT},
        normal(4, 3, 8, 8),
    ),
    Model(
        "UNetMotionModel",
        {
            **STAGES,
            "cross_attention_dim": WIDTH,
            "num_attention_heads": 2,
            "motion_num_attention_heads": 2,
            "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
            "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"),
        },
        {"sample": normal(4, 3, 8, 8), "timestep": steps, "encoder_hidden_states": PROMPT},
        normal(4, 3, 8, 8),
        wrap=PromptOfEachFrame,
    ),
    Model(
        "UNetSpatioTemporalConditionModel",
        {
            "block_out_channels": (32, 64),
            "layers_per_block": 1,
            "cross_attention_dim": WIDTH,
            "num_attention_heads": (2, 4),
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 24,
            "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        },
        {
            "sample": normal(3, 8, 8, 8),
            "timestep": times,
            "encoder_hidden_states": normal(1, WIDTH),
            "added_time_ids": each(6, 127, 0.02),
        },
        normal(3, 4, 8, 8),
    ),
    Model(
        "Kandinsky3UNet",
        {
            "time_embedding_dim": 16,
            "groups": 4,
            "attention_head_dim": 8,
            "layers_per_block": 2,
            "block_out_channels": (16, 16, 16, 16),
            "cross_attention_dim": 16,
            "encoder_hid_dim": WIDTH,
        },
        {**_UNET_INPUTS, "encoder_attention_mask": ones(TEXT)},
        LATENT,
    ),
    Model(
        "StableCascadeUNet",
        {
            "in_channels": 4,
            "out_channels": 4,
            "timestep_ratio_embedding_dim": 8,
            "conditioning_dim": 16,
            "block_out_channels": (16, 16),
            "num_attention_heads": (2, 2),
            "down_num_layers_per_block": (1, 1),
            "up_num_layers_per_block": (1, 1),
            "clip_text_pooled_in_channels": WIDTH,
            "dropout": (0.0, 0.0),
        },
        {"sample": LATENT, "timestep_ratio": times, "clip_text_pooled": normal(1, WIDTH)},
        LATENT,
    ),
    Model(
        "DiTTransformer2DModel",
        {**PATCHES, "norm_num_groups": 4},
        {"hidden_states": LATENT, "timestep": steps, "class_labels": classes},
        LATENT,
    ),
    Model(
        "PixArtTransformer2DModel",
        {**PATCHES, "out_channels": 4, "cross_attention_dim": WIDTH, "caption_channels": WIDTH},
        {
            "hidden_states": LATENT,
            "encoder_hidden_states": PROMPT,
            "timestep": steps,
            "encoder_attention_mask": ones(TEXT),
        },
        LATENT,
        wrap=lambda model: Frames(model, added_cond_kwargs={"resolution": None, "aspect_ratio": None}),
    ),
    Model(
        "SD3Transformer2DModel",
        _SD3,
        {
            "hidden_states": LATENT,
            "encoder_hidden_states": PROMPT,
            "pooled_projections": normal(WIDTH),
            "timestep": steps,
        },
        LATENT,
    ),
    Model(
        "SD3Transformer2DModel",
        _SD3,
        {
            "hidden_states": LATENT,
            "encoder_hidden_states": PROMPT,
            "pooled_projections": normal(WIDTH),
            "timestep": steps,
            "controlnet_cond": LATENT,
        },
        LATENT,
        control=("SD3ControlNetModel", _SD3),
    ),
    Model(
        "FluxTransformer2DModel",
        {**_FLUX, "pooled_projection_dim": WIDTH, "guidance_embeds": True},
        {**_FLUX_INPUTS, "pooled_projections": normal(WIDTH), "guidance": times},
        normal(16, 16),
    ),
    Model(
        "ChromaTransformer2DModel",
        {**_FLUX, "approximator_num_channels": 16, "approximator_hidden_dim": WIDTH, "approximator_layers": 1},
        {**_FLUX_INPUTS, "attention_mask": ones(TEXT + 16, dtype=torch.bool)},
        normal(16, 16),
    ),
    Model(
        "QwenImageTransformer2DModel",
        {
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": WIDTH,
            "axes_dims_rope": (4, 6, 6),
        },
        {
            "hidden_states": normal(16, 16),
            "encoder_hidden_states": PROMPT,
            "encoder_hidden_states_mask": ones(TEXT),
            "timestep": times,
        },
        normal(16, 16),
        wrap=lambda model: Frames(model, img_shapes=[(1, 4, 4)]),
    ),
    Model(
        "SanaTransformer2DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 2,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": WIDTH,
            "caption_channels": WIDTH,
            "sample_size": 16,
        },
        {
            "hidden_states": LATENT,
            "encoder_hidden_states": PROMPT,
            "timestep": steps,
            "encoder_attention_mask": ones(TEXT),
        },
        LATENT,
    ),
    Model(
        "AuraFlowTransformer2DModel",
        {
            "sample_size": 16,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": WIDTH,
            "caption_projection_dim": WIDTH,
            "pos_embed_max_size": 64,
        },
        {"hidden_states": LATENT, "encoder_hidden_states": PROMPT, "timestep": times},
        LATENT,
    ),
    Model(
        "Lumina2Transformer2DModel",
        {
            "sample_size": 16,
            "in_channels": 4,
            "hidden_size": WIDTH,
            "num_layers": 1,
            "num_refiner_layers": 1,
            "num_attention_heads": 2,
            "num_kv_heads": 1,
            "multiple_of": 8,
            "axes_dim_rope": (4, 6, 6),
            "axes_lens": (32, 16, 16),
            "cap_feat_dim": WIDTH,
        },
        {
            "hidden_states": LATENT,
            "timestep": times,
            "encoder_hidden_states": PROMPT,
            "encoder_attention_mask": ones(TEXT, dtype=torch.bool),
        },
        LATENT,
    ),
    Model(
        "CogView4Transformer2DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "text_embed_dim": WIDTH,
            "time_embed_dim": 16,
            "condition_dim": 8,
            "rope_axes_dim": (16, 16),
            "sample_size": 16,
        },
        {
            "hidden_states": LATENT,
            "encoder_hidden_states": normal(16, WIDTH),
            "timestep": steps,
            "original_size": each(16, 16),
            "target_size": each(16, 16),
            "crop_coords": each(0, 0),
        },
        LATENT,
    ),
    Model(
        "HunyuanDiT2DModel",
        {
            **PATCHES,
            "hidden_size": WIDTH,
            "learn_sigma": False,
            "cross_attention_dim": WIDTH,
            "cross_attention_dim_t5": WIDTH,
            "pooled_projection_dim": 16,
            "text_len": TEXT,
            "text_len_t5": TEXT,
            "use_style_cond_and_image_meta_size": False,
        },
        {
            "hidden_states": LATENT,
            "timestep": timed,
            "encoder_hidden_states": PROMPT,
            "text_embedding_mask": ones(TEXT),
            "encoder_hidden_states_t5": PROMPT,
            "text_embedding_mask_t5": ones(TEXT),
        },
        LATENT,
    ),
)
