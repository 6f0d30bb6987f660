"""Denoisers of diffusers for videos, sound and embeddings, and autoencoders, shrunk by their configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.zoo.batches import VOCABULARY, tokens
from benchmarks.zoo.libraries.diffusers_model import (
    HEADS,
    PATCHES,
    PROMPT,
    STAGES,
    TEXT,
    WIDTH,
    Frames,
    Model,
    Tiny,
    Variational,
    copied,
    embedded,
    quantized,
    worded,
)
from benchmarks.zoo.libraries.draws import STEPS, Draw, each, normal, ones, same, steps, times

_PICTURE = normal(3, 32, 32)
_VIDEO = normal(3, 5, 16, 16)
_VAE: Mapping[str, Any] = {**STAGES, "latent_channels": 4, "sample_size": 32}
_DOWN: Mapping[str, Any] = {"down_block_types": ("DownEncoderBlock2D",) * 2}
_UP: Mapping[str, Any] = {"up_block_types": ("UpDecoderBlock2D",) * 2}
_IMAGE: Mapping[str, Draw] = {"sample": _PICTURE}

MODELS: tuple[Model, ...] = (
    Model(
        "CogVideoXTransformer3DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 16,
            "text_embed_dim": WIDTH,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 9,
            "max_text_seq_length": TEXT,
        },
        {"hidden_states": normal(3, 4, 8, 8), "encoder_hidden_states": PROMPT, "timestep": steps},
        normal(3, 4, 8, 8),
    ),
    Model(
        "LatteTransformer3DModel",
        {
            **PATCHES,
            "out_channels": 4,
            "cross_attention_dim": WIDTH,
            "caption_channels": WIDTH,
            "norm_type": "ada_norm_single",
            "num_embeds_ada_norm": STEPS,
            "norm_elementwise_affine": False,
            "sample_size": 8,
            "video_length": 3,
        },
        {"hidden_states": normal(4, 3, 8, 8), "timestep": steps, "encoder_hidden_states": PROMPT},
        normal(4, 3, 8, 8),
    ),
    Model(
        "LTXVideoTransformer3DModel",
        {**HEADS, "in_channels": 8, "out_channels": 8, "cross_attention_dim": WIDTH, "caption_channels": WIDTH},
        {
            "hidden_states": normal(2 * 4 * 4, 8),
            "encoder_hidden_states": PROMPT,
            "timestep": steps,
            "encoder_attention_mask": ones(TEXT),
        },
        normal(2 * 4 * 4, 8),
        wrap=lambda model: Frames(model, num_frames=2, height=4, width=4),
    ),
    Model(
        "MochiTransformer3DModel",
        {
            **HEADS,
            "in_channels": 4,
            "pooled_projection_dim": 16,
            "text_embed_dim": WIDTH,
            "time_embed_dim": 16,
            "max_sequence_length": TEXT,
        },
        {
            "hidden_states": normal(4, 2, 8, 8),
            "encoder_hidden_states": PROMPT,
            "timestep": steps,
            "encoder_attention_mask": ones(TEXT, dtype=torch.bool),
        },
        normal(4, 2, 8, 8),
    ),
    Model(
        "WanTransformer3DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": WIDTH,
            "freq_dim": 16,
            "ffn_dim": 64,
            "rope_max_seq_len": 16,
        },
        {"hidden_states": normal(4, 2, 8, 8), "timestep": steps, "encoder_hidden_states": PROMPT},
        normal(4, 2, 8, 8),
    ),
    Model(
        "HunyuanVideoTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "text_embed_dim": WIDTH,
            "pooled_projection_dim": 16,
            "rope_axes_dim": (4, 6, 6),
        },
        {
            "hidden_states": normal(4, 2, 8, 8),
            "timestep": steps,
            "encoder_hidden_states": PROMPT,
            "encoder_attention_mask": ones(TEXT),
            "pooled_projections": normal(16),
            "guidance": times,
        },
        normal(4, 2, 8, 8),
    ),
    Model(
        "StableAudioDiTModel",
        {
            "sample_size": 16,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "num_key_value_attention_heads": 1,
            "cross_attention_dim": 16,
            "time_proj_dim": 16,
            "global_states_input_dim": WIDTH,
            "cross_attention_input_dim": WIDTH,
        },
        {
            "hidden_states": normal(4, 16),
            "timestep": times,
            "encoder_hidden_states": PROMPT,
            "global_hidden_states": normal(1, WIDTH),
            "rotary_embedding": same(lambda: (torch.ones(17, 8), torch.zeros(17, 8))),
        },
        normal(4, 16),
    ),
    Model(
        "PriorTransformer",
        {**HEADS, "embedding_dim": WIDTH, "num_embeddings": TEXT, "additional_embeddings": 4},
        {
            "hidden_states": normal(WIDTH),
            "timestep": steps,
            "proj_embedding": normal(WIDTH),
            "encoder_hidden_states": PROMPT,
            "attention_mask": ones(TEXT, dtype=torch.bool),
        },
        normal(WIDTH),
        embedded,
    ),
    Model(
        "UVit2DModel",
        {
            "hidden_size": WIDTH,
            "cond_embed_dim": WIDTH,
            "micro_cond_encode_dim": 8,
            "micro_cond_embed_dim": 40,
            "encoder_hidden_size": WIDTH,
            "vocab_size": VOCABULARY,
            "codebook_size": VOCABULARY,
            "in_channels": WIDTH,
            "block_out_channels": WIDTH,
            "num_res_blocks": 1,
            "block_num_heads": 4,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "sample_size": 8,
        },
        {
            "input_ids": lambda g, n: tokens(g, n, 64).view(n, 8, 8),
            "encoder_hidden_states": PROMPT,
            "pooled_text_emb": normal(WIDTH),
            "micro_conds": each(64, 64, 0, 0, 6),
        },
        lambda g, n: tokens(g, n, 64).view(n, 8, 8),
        worded,
    ),
    Model("AutoencoderKL", {**_VAE, **_DOWN, **_UP}, _IMAGE, "sample", None, Variational),
    Model(
        "AsymmetricAutoencoderKL",
        {
            **_DOWN,
            **_UP,
            "down_block_out_channels": (8, 16),
            "up_block_out_channels": (16, 24),
            "norm_num_groups": 4,
        },
        _IMAGE,
        "sample",
    ),
    Model("VQModel", {**_VAE, **_DOWN, **_UP, "num_vq_embeddings": 16}, _IMAGE, "sample", quantized),
    Model(
        "AutoencoderTiny",
        {
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "num_encoder_blocks": (1, 1),
            "num_decoder_blocks": (1, 1),
        },
        _IMAGE,
        "sample",
        wrap=Tiny,
    ),
    Model(
        "AutoencoderDC",
        {
            "latent_channels": 4,
            "attention_head_dim": 8,
            "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "encoder_block_out_channels": (8, 16),
            "decoder_block_out_channels": (8, 16),
            "encoder_layers_per_block": (1, 1),
            "decoder_layers_per_block": (1, 1),
            "encoder_qkv_multiscales": ((), (5,)),
            "decoder_qkv_multiscales": ((), (5,)),
        },
        _IMAGE,
        "sample",
    ),
    Model(
        "AutoencoderKLWan",
        {
            "base_dim": 8,
            "z_dim": 4,
            "dim_mult": [1, 2],
            "num_res_blocks": 1,
            "temperal_downsample": [True],
            "latents_mean": [0.0] * 4,
            "latents_std": [1.0] * 4,
        },
        {"sample": _VIDEO},
        "sample",
    ),
    Model(
        "AutoencoderKLTemporalDecoder",
        {**_DOWN, "block_out_channels": (32, 64), "layers_per_block": 1, "sample_size": 32},
        _IMAGE,
        "sample",
    ),
    Model(
        "AutoencoderOobleck",
        {
            "encoder_hidden_size": 8,
            "downsampling_ratios": [2, 4],
            "channel_multiples": [1, 2],
            "decoder_channels": 8,
            "decoder_input_channels": 4,
        },
        {"sample": normal(2, 64)},
        "sample",
        wrap=copied,
    ),
)
"""By kind: UNets, transformers of pictures, of videos and sound, autoencoders."""
