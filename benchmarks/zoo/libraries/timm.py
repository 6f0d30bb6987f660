"""Models of timm (https://github.com/huggingface/pytorch-image-models), the smallest of each of its families, made
narrower and shallower where their arguments allow it. They return logits of images with one class each. Those that
timm's names make in one size alone are made by their class.

Images are no smaller than a family takes: 64 pixels leave 2 x 2 pixels behind five strides of two, so that batch
normalization has more than one value a channel and sample.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo.batches import CLASSES, classes, generator
from benchmarks.zoo.entry import Entry
from benchmarks.zoo.libraries.drop import with_dropout
from benchmarks.zoo.libraries.shallow import shallow


def _make(name: str, fields: dict[str, Any], dropout: float) -> nn.Module:
    import timm

    if name in timm.list_models():
        model = timm.create_model(name, num_classes=CLASSES, **fields)
    else:
        model = getattr(timm.models, name)(num_classes=CLASSES, **fields)
    return with_dropout(model, dropout)


def _make_shallow(name: str, fields: dict[str, Any], dropout: float) -> nn.Module:
    return shallow(_make(name, fields, dropout))


def _pictures(size: int, n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = generator(seed)
    return torch.randn(n, 3, size, size, generator=g), classes(g, n)


def _entry(name: str, size: int = 64, **fields: Any) -> Entry:
    """A model that takes images of any size."""
    return Entry(f"timm/{name}", "vision", partial(_make, name, fields), partial(_pictures, size), F.cross_entropy)


def _shallow(name: str, size: int = 64, **fields: Any) -> Entry:
    """A model of many layers, of which those that are alike are left out."""
    return replace(_entry(name, size, **fields), make=partial(_make_shallow, name, fields))


def _shallow_fixed(name: str, size: int = 64, **fields: Any) -> Entry:
    return _shallow(name, size, img_size=size, **fields)


def _fixed(name: str, size: int = 64, **fields: Any) -> Entry:
    """A model that is made for images of one size."""
    return _entry(name, size, img_size=size, **fields)


def _mvit(dropout: float) -> nn.Module:
    from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg

    model = MultiScaleVit(MultiScaleVitCfg(depths=(1, 1, 1, 1), embed_dim=16), img_size=(64, 64), num_classes=CLASSES)
    return with_dropout(model, dropout)


WIDTHS = (16, 24, 32, 48)
"""Channels of the four stages that most families have."""
ONE = (1, 1, 1, 1)
"""Layers of the four stages."""
HEADS = (1, 2, 4, 4)

CONVOLUTIONAL = (
    _shallow("test_byobnet"),
    _shallow("mobileone_s1"),
    _shallow("ConvMixer", dim=32, depth=2),
    _shallow("test_convnext", depths=ONE),
    _shallow("convnextv2_atto", depths=ONE, dims=WIDTHS),
    _shallow("csatv2"),
    _shallow("cs3darknet_focus_s"),
    _shallow("cspnext_tiny"),
    _shallow("densenet121", growth_rate=8, block_config=(2, 2, 2, 2)),
    _shallow("dla46x_c"),
    _shallow("dpn48b", k_sec=(1, 1, 1, 1)),
    _shallow("test_efficientnet"),
    _shallow("fasternet_t0", depths=ONE, embed_dim=16),
    _shallow("FocalNet", depths=ONE, embed_dim=16),
    _shallow("ghostnet_050"),
    _shallow("hardcorenas_b"),
    _shallow("hgnetv2_b0"),
    _entry("hrnet_w18_small"),
    _shallow("inception_next_atto", depths=ONE, dims=WIDTHS),
    _shallow("inception_resnet_v2", 128),
    _shallow("inception_v3", 128),
    _shallow("inception_v4", 128),
    _shallow("lcnetv2_small", depths=ONE, scale=0.25),
    _shallow("test_mambaout", depths=ONE),
    _shallow("lcnet_035"),
    _shallow("mobilenetv3_small_050"),
    _shallow("mobilenetv5_base", channel_multiplier=0.25),
    _shallow("test_nfnet"),
    _entry(
        "RDNet",
        num_init_features=16,
        growth_rates=(16, 16, 24),
        num_blocks_list=(1, 2, 1),
        is_downsample_block=(None, True, True),
        block_type=("Block", "Block", "BlockESE"),
    ),
    _shallow("regnetx_002"),
    _shallow("repghostnet_050"),
    _shallow("repvit_m1"),
    _shallow("res2next50", layers=ONE),
    _shallow("resnest14d"),
    _shallow("test_resnet"),
    _shallow("resnetv2_18", layers=ONE, channels=WIDTHS),
    _shallow("rexnet_100", width_mult=0.25, depth_mult=0.5),
    _shallow("selecsls42"),
    _shallow("legacy_seresnet18", layers=ONE),
    _shallow("skresnet18", layers=ONE),
    _shallow("starnet_s050"),
    _shallow("tresnet_m", layers=ONE, width_factor=0.5),
    _shallow("vgg11", 32, mlp_ratio=0.0625),
    _shallow("ese_vovnet19b_slim_dw"),
    _shallow("legacy_xception", 96),
    _entry(
        "xception41p",
        block_cfg=[
            {"in_chs": 64, "out_chs": 64, "stride": 2},
            {"in_chs": 64, "out_chs": 64, "stride": 1},
            {"in_chs": 64, "out_chs": (64, 96, 96), "stride": 2},
            {"in_chs": 96, "out_chs": (128, 128, 160), "no_skip": True, "stride": 1},
        ],
    ),
)
"""Convolutions, and what takes attention's place beside them."""

MIXED = (
    _shallow_fixed("eca_botnext26ts_256"),
    _shallow_fixed("lambda_resnet26rpt_256"),
    _shallow("cpubone_nano"),
    _shallow("davit_tiny", depths=ONE, embed_dims=WIDTHS, num_heads=HEADS),
    _shallow("edgenext_xx_small", depths=(1, 1, 2, 1)),
    _shallow_fixed("efficientformer_l1", 224, depths=ONE, embed_dims=WIDTHS),
    _shallow_fixed("efficientformerv2_s0"),
    _shallow("efficientvim_m1"),
    _shallow("efficientvit_b0"),
    _shallow_fixed("efficientvit_m0"),
    _shallow("fastvit_t8", layers=ONE, embed_dims=(16, 32, 64, 128)),
    _shallow("iformer_t", depths=(1, 1, 3, 3), attn_groups=(0, 0, 1, 1)),
    _shallow("lowformer_b0"),
    _shallow_fixed("test_coatnet"),
    _shallow_fixed("test_maxvit"),
    _shallow("MetaFormer", depths=ONE, dims=WIDTHS),
    _shallow("mobilevit_xxs"),
    _shallow("nextvit_small", depths=(1, 1, 5, 1)),
    _shallow("shvit_s1"),
    _shallow("swiftformer_xs", layers=ONE),
    _shallow("tiny_vit_5m_224"),
    _shallow_fixed("visformer_tiny", depth=ONE[:3]),
    _shallow_fixed("vit_tiny_r_s16_p8_224"),
    _shallow_fixed("levit_128s"),
    _shallow_fixed("vitamin_small_224", depth=2),
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
    Entry("timm/MultiScaleVit", "vision", _mvit, partial(_pictures, 64), F.cross_entropy),
    _entry("naflexvit_base_patch16_gap", depth=2, embed_dim=32, num_heads=4),
    _fixed("Nest", embed_dims=(16, 32, 64), num_heads=(1, 2, 4), depths=(1, 1, 1)),
    _fixed("pit_ti_224", depth=(1, 1, 1)),
    _entry("pvt_v2_b0", depths=ONE),
    _entry("qwen3_vit_88m", depth=2, embed_dim=32, num_heads=4),
    _fixed("sequencer2d_s", 56, layers=ONE, embed_dims=(16, 32, 32, 32), hidden_sizes=(4, 8, 8, 8)),
    _fixed("swin_tiny_patch4_window7_224", window_size=4, depths=(2, 2), embed_dim=16, num_heads=(2, 4)),
    _fixed("swinv2_tiny_window8_256", window_size=4, depths=(2, 2), embed_dim=16, num_heads=(2, 4)),
    _fixed("swinv2_cr_tiny_224", depths=(2, 2), embed_dim=16, num_heads=(2, 4)),
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

LARGE = ("nasnetalarge", "pnasnet5large")
"""Families without a small model, or arguments that make one small: 2,000 operations, 82 million parameters."""
