"""Models of timm (https://github.com/huggingface/pytorch-image-models), the smallest of each of its families, made
narrower and shallower where their arguments allow it. They return logits of images with one class each. Those that
timm's names make in one size alone are made by their class.

Images are no smaller than a family takes: 64 pixels leave 2 x 2 pixels behind five strides of two, so that batch
normalization has more than one value a channel and sample.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo.batches import CLASSES, classes, generator
from benchmarks.zoo.entry import Entry


def _make(name: str, fields: dict[str, Any], dropout: float) -> nn.Module:
    import timm

    if name in timm.list_models():
        model = timm.create_model(name, num_classes=CLASSES, **fields)
    else:
        model = getattr(timm.models, name)(num_classes=CLASSES, **fields)
    for module in model.modules():
        set_drop(module, dropout)
    return model


def set_drop(module: nn.Module, probability: float) -> None:
    """Sets the dropout probability of one module, and never leaves out a whole path, which is drawn for each sample."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        module.p = probability
    for key, value in (("drop_rate", probability), ("drop_prob", 0.0), ("drop_path_rate", 0.0)):
        if isinstance(getattr(module, key, None), float):
            setattr(module, key, value)


def _pictures(size: int, n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = generator(seed)
    return torch.randn(n, 3, size, size, generator=g), classes(g, n)


def _entry(name: str, size: int = 64, **fields: Any) -> Entry:
    """A model that takes images of any size."""
    return Entry(f"timm/{name}", "vision", partial(_make, name, fields), partial(_pictures, size), F.cross_entropy)


def _fixed(name: str, size: int = 64, **fields: Any) -> Entry:
    """A model that is made for images of one size."""
    return _entry(name, size, img_size=size, **fields)


WIDTHS = (16, 24, 32, 48)
"""Channels of the four stages that most families have."""
ONE = (1, 1, 1, 1)
"""Layers of the four stages."""
HEADS = (1, 2, 4, 4)

CONVOLUTIONAL = (
    _entry("test_byobnet"),
    _entry("mobileone_s1"),
    _entry("ConvMixer", dim=32, depth=2),
    _entry("test_convnext", depths=ONE),
    _entry("convnextv2_atto", depths=ONE, dims=WIDTHS),
    _entry("csatv2"),
    _entry("cs3darknet_focus_s"),
    _entry("cspnext_tiny"),
    _entry("densenet121", growth_rate=8, block_config=(2, 2, 2, 2)),
    _entry("dla46x_c"),
    _entry("dpn48b", k_sec=(1, 1, 1, 1)),
    _entry("test_efficientnet"),
    _entry("fasternet_t0", depths=ONE, embed_dim=16),
    _entry("FocalNet", depths=ONE, embed_dim=16),
    _entry("ghostnet_050"),
    _entry("hardcorenas_b"),
    _entry("hgnetv2_b0"),
    _entry("hrnet_w18_small"),
    _entry("inception_next_atto", depths=ONE, dims=WIDTHS),
    _entry("inception_v3", 128),
    _entry("lcnetv2_small", depths=ONE, scale=0.25),
    _entry("test_mambaout", depths=ONE),
    _entry("lcnet_035"),
    _entry("mobilenetv3_small_050"),
    _entry("mobilenetv5_base", channel_multiplier=0.25),
    _entry("nasnetalarge", 96, stem_size=16, num_features=192),
    _entry("test_nfnet"),
    _entry("rdnet_tiny"),
    _entry("regnetx_002"),
    _entry("repghostnet_050"),
    _entry("repvit_m1"),
    _entry("res2next50", layers=ONE),
    _entry("resnest14d"),
    _entry("test_resnet"),
    _entry("resnetv2_18", layers=ONE, channels=WIDTHS),
    _entry("rexnet_100", width_mult=0.25, depth_mult=0.5),
    _entry("selecsls42"),
    _entry("legacy_seresnet18", layers=ONE),
    _entry("skresnet18", layers=ONE),
    _entry("starnet_s050"),
    _entry("tresnet_m", layers=ONE, width_factor=0.5),
    _entry("vgg11", 32, mlp_ratio=0.0625),
    _entry("ese_vovnet19b_slim_dw"),
    _entry("legacy_xception", 96),
    _entry("xception41p"),
)
"""Convolutions, and what takes attention's place beside them."""

MIXED = (
    _fixed("eca_botnext26ts_256"),
    _fixed("lambda_resnet26rpt_256"),
    _entry("cpubone_nano"),
    _entry("davit_tiny", depths=ONE, embed_dims=WIDTHS, num_heads=HEADS),
    _entry("edgenext_xx_small", depths=(1, 1, 2, 1)),
    _fixed("efficientformer_l1", 224, depths=ONE, embed_dims=WIDTHS),
    _fixed("efficientformerv2_s0"),
    _entry("efficientvim_m1"),
    _entry("efficientvit_b0"),
    _fixed("efficientvit_m0"),
    _entry("fastvit_t8", layers=ONE, embed_dims=(16, 32, 64, 128)),
    _entry("iformer_t", depths=(1, 1, 3, 3), attn_groups=(0, 0, 1, 1)),
    _entry("lowformer_b0"),
    _fixed("test_coatnet"),
    _fixed("test_maxvit"),
    _entry("MetaFormer", depths=ONE, dims=WIDTHS),
    _entry("mobilevit_xxs"),
    _entry("nextvit_small", depths=(1, 1, 5, 1)),
    _entry("shvit_s1"),
    _entry("swiftformer_xs", layers=ONE),
    _entry("tiny_vit_5m_224"),
    _fixed("visformer_tiny", depth=ONE[:3]),
    _fixed("vit_tiny_r_s16_p8_224"),
    _fixed("levit_128s"),
    _fixed("vitamin_small_224", depth=2),
)
"""Convolutions and attention."""

TRANSFORMERS = (
    _fixed("beit_base_patch16_224", depth=2, embed_dim=32, num_heads=4),
    _fixed("cait_xxs24_224", depth=2, embed_dim=32, num_heads=4),
    _fixed("coat_tiny", embed_dims=(32,) * 4, serial_depths=ONE, parallel_depth=1),
    _fixed("convit_tiny", depth=3, local_up_to_layer=2, embed_dim=8),
    _fixed("crossvit_tiny_240", 48, img_scale=(1.0, 1.0), depth=[[1, 1, 0]], embed_dim=[24, 48]),
    _entry("deepseek_vit_412m", 84, depth=2, embed_dim=32, num_heads=4),
    _fixed("deit_tiny_patch16_224", depth=2, embed_dim=32, num_heads=4),
    _fixed("deit_tiny_distilled_patch16_224", depth=2, embed_dim=32, num_heads=4),
    _fixed("vit_tiny_patch16_dinov3_qkvb", depth=2, embed_dim=32, num_heads=4),
    _fixed("GlobalContextVit", depths=ONE, embed_dim=16, num_heads=HEADS),
    _entry("gemma4_vit_167m", 96, depth=2, embed_dim=32, num_heads=4, head_dim=8, intermediate_size=64),
    _fixed("hiera_tiny_224", embed_dim=16, stages=ONE),
    _entry("sam2_hiera_tiny", 128, embed_dim=16, stages=(1, 2, 3, 1), global_att_blocks=(4,)),
    _fixed("MlpMixer", num_blocks=2, embed_dim=32),
    _entry("mvitv2_tiny"),
    _entry("naflexvit_base_patch16_gap", depth=2, embed_dim=32, num_heads=4),
    _fixed("Nest", embed_dims=(16, 32, 64), num_heads=(1, 2, 4), depths=(1, 1, 1)),
    _fixed("pit_ti_224", depth=(1, 1, 1)),
    _entry("pvt_v2_b0", depths=ONE),
    _entry("qwen3_vit_88m", depth=2, embed_dim=32, num_heads=4),
    _fixed("sequencer2d_s", 56, layers=ONE, embed_dims=(16, 32, 32, 32), hidden_sizes=(4, 8, 8, 8)),
    _fixed("swin_tiny_patch4_window7_224", window_size=4, depths=ONE, embed_dim=16, num_heads=HEADS),
    _fixed("swinv2_tiny_window8_256", window_size=4, depths=ONE, embed_dim=16, num_heads=HEADS),
    _fixed("swinv2_cr_tiny_224", depths=ONE, embed_dim=16, num_heads=HEADS),
    _fixed("tnt_s_legacy_patch16_224", depth=2, embed_dim=32, inner_dim=8, num_heads_outer=4),
    _fixed("twins_svt_small", depths=ONE, embed_dims=(16, 32, 32, 64), num_heads=HEADS),
    _fixed("twins_pcpvt_small", depths=ONE, embed_dims=(16, 32, 32, 64), num_heads=HEADS),
    _fixed("test_vit", depth=2),
    _fixed("test_vit_relpos", depth=2),
    _fixed("samvit_base_patch16_224", depth=2, embed_dim=32, num_heads=4, global_attn_indexes=(1,)),
    _fixed("VOLO", layers=ONE, embed_dims=(24, 48, 48, 48), num_heads=(2, 4, 4, 4)),
    _fixed("xcit_nano_12_p8_224", depth=2, embed_dim=32),
)

ENTRIES: tuple[Entry, ...] = (*CONVOLUTIONAL, *MIXED, *TRANSFORMERS)

LARGE = ("inception_resnet_v2", "inception_v4", "pnasnet5large")
"""Families that have no small model, and no arguments that make one smaller: 41 to 82 million parameters."""
