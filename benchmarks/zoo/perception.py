"""Tiny configurations of architectures that take images, sound, or both with text, and of one for time series."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.architecture import Architecture
from benchmarks.zoo.batches import (
    BOXES,
    CLASSES,
    captioned_images,
    detection,
    features,
    images,
    masked_images,
    segmentation,
    series,
    transcription,
)
from benchmarks.zoo.recipes import Contrastive, Detection, freeze_feature_encoder
from benchmarks.zoo.text import BART, BERT, SPECIAL, Fields

VIT: Fields = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": CLASSES,
}
SWIN: Fields = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [1, 1],
    "num_heads": [2, 4],
    "window_size": 4,
    "num_labels": CLASSES,
}
STAGES: Fields = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": CLASSES}
RESNET: Fields = STAGES | {"embedding_size": 16, "layer_type": "basic"}
PYRAMID: Fields = STAGES | {
    "num_encoder_blocks": 2,
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [2, 4],
    "mlp_ratios": [2, 2],
}
"""PoolFormer and SegFormer."""
SPEECH: Fields = (
    BERT
    | SPECIAL
    | {
        "conv_dim": (16, 16),
        "conv_kernel": (10, 8),
        "conv_stride": (5, 4),
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 2,
        "apply_spec_augment": False,  # masks drawn with numpy, outside of any graph
        "mask_time_prob": 0.0,
        "num_labels": CLASSES,
    }
)
DETR: Fields = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_queries": 2 * BOXES,
    "num_labels": CLASSES,
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
}
TEXT_TOWER: Fields = BERT | SPECIAL | {"projection_dim": 32}
IMAGE_TOWER: Fields = VIT | {"projection_dim": 32}
TOWERS: Fields = {"text_config": TEXT_TOWER, "vision_config": IMAGE_TOWER}


def _classifier(name: str, prefix: str, fields: Fields, **more: Any) -> Architecture:
    return Architecture(name, f"{prefix}Config", f"{prefix}ForImageClassification", images(), fields | more)


def _speech(name: str, prefix: str, **more: Any) -> Architecture:
    """Fine-tuned as its paper does: the convolutions that read the sound stay as they were pretrained."""
    model, batch = f"{prefix}ForSequenceClassification", features("input_values", (1000,))
    prepare = freeze_feature_encoder
    return Architecture(name, f"{prefix}Config", model, batch, SPEECH | more, prepare=prepare)


def _detector(name: str, prefix: str, **more: Any) -> Architecture:
    return Architecture(
        name,
        f"{prefix}Config",
        f"{prefix}ForObjectDetection",
        detection(),
        DETR | more,
        backbone=RESNET | {"out_features": ["stage2"]},
        prepare=Detection,
    )


VISION = (
    _classifier("vit", "ViT", VIT),
    _classifier("deit", "DeiT", VIT),
    _classifier("beit", "Beit", VIT),
    _classifier("dinov2", "Dinov2", VIT),
    _classifier("swin", "Swin", SWIN),
    _classifier("convnext", "ConvNext", STAGES | {"num_stages": 2}),
    _classifier("resnet", "ResNet", RESNET),
    _classifier("regnet", "RegNet", RESNET | {"groups_width": 8, "layer_type": "y"}),
    _classifier("poolformer", "PoolFormer", PYRAMID | {"padding": [2, 1]}),
    Architecture(
        "segformer",
        "SegformerConfig",
        "SegformerForSemanticSegmentation",
        segmentation(),
        PYRAMID | {"sr_ratios": [2, 1], "decoder_hidden_size": 32},
    ),
    Architecture(
        "vit-mae",
        "ViTMAEConfig",
        "ViTMAEForPreTraining",
        masked_images(),
        VIT
        | {
            "decoder_hidden_size": 32,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 4,
            "decoder_intermediate_size": 64,
        },
    ),
    Architecture(
        "videomae",
        "VideoMAEConfig",
        "VideoMAEForVideoClassification",
        features("pixel_values", (4, 3, 32, 32)),
        VIT | {"num_frames": 4},
    ),
)

AUDIO = (
    Architecture(
        "whisper",
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        transcription("input_features", (16, 32)),
        BART
        | {
            "num_mel_bins": 16,
            "max_source_positions": 16,
            "max_target_positions": 32,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
    _speech("wav2vec2", "Wav2Vec2"),
    _speech("hubert", "Hubert"),
    _speech("wavlm", "WavLM", num_buckets=16, max_bucket_distance=32),
    Architecture(
        "wav2vec2-ctc",
        "Wav2Vec2Config",
        "Wav2Vec2ForCTC",
        transcription("input_values", (1000,), target=6),
        SPEECH | {"ctc_loss_reduction": "mean", "ctc_zero_infinity": True},
        prepare=freeze_feature_encoder,
    ),
    Architecture(
        "speech-to-text",
        "Speech2TextConfig",
        "Speech2TextForConditionalGeneration",
        transcription("input_features", (32, 16)),
        BART
        | {
            "input_feat_per_channel": 16,
            "max_source_positions": 64,
            "max_target_positions": 64,
            "conv_channels": 32,
        },
    ),
    Architecture(
        "audio-spectrogram-transformer",
        "ASTConfig",
        "ASTForAudioClassification",
        features("input_values", (32, 16)),
        VIT | {"frequency_stride": 8, "time_stride": 8, "max_length": 32, "num_mel_bins": 16},
    ),
)

DETECTION = (
    _detector("detr", "Detr"),
    _detector("conditional-detr", "ConditionalDetr"),
    _detector("deformable-detr", "DeformableDetr", num_feature_levels=1),
    Architecture(
        "yolos",
        "YolosConfig",
        "YolosForObjectDetection",
        detection(),
        VIT | {"image_size": [64, 64], "num_detection_tokens": 2 * BOXES},
        prepare=Detection,
    ),
)

MULTIMODAL = (
    Architecture(
        "clip",
        "CLIPConfig",
        "CLIPModel",
        captioned_images(),
        TOWERS | {"projection_dim": 32},
        prepare=Contrastive,
    ),
    Architecture("siglip", "SiglipConfig", "SiglipModel", captioned_images(), TOWERS, prepare=Contrastive),
    Architecture(
        "blip",
        "BlipConfig",
        "BlipForConditionalGeneration",
        captioned_images(labels=True),
        TOWERS | {"projection_dim": 32, "image_text_hidden_size": 32},
    ),
    Architecture(
        "git",
        "GitConfig",
        "GitForCausalLM",
        captioned_images(labels=True),
        BERT | SPECIAL | {"vision_config": IMAGE_TOWER},
    ),
)

TIME_SERIES = (
    Architecture(
        "patchtst",
        "PatchTSTConfig",
        "PatchTSTForPrediction",
        series(),
        {
            "num_input_channels": 3,
            "context_length": 32,
            "prediction_length": 8,
            "patch_length": 8,
            "patch_stride": 8,
            "d_model": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "loss": "mse",
        },
    ),
)
