"""Workloads that no cost model has learned from: neither of the suite, nor of the data set of trials.

Small enough that a rank with one core trains them for real in some tenths of a second a step. Data are random: nothing
but the time of a step is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo.workload import Workload, adamw, drawn, seeded, sgd

CLASSES, WORDS = 100, 4_000


VIT: dict[str, Any] = {
    "image_size": 64,
    "patch_size": 8,
    "hidden_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 3,
    "intermediate_size": 768,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": CLASSES,
}
T5: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": 192,
    "d_kv": 32,
    "d_ff": 512,
    "num_layers": 3,
    "num_heads": 6,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "use_cache": False,
}
CONVNEXT: dict[str, Any] = {
    "image_size": 64,
    "hidden_sizes": [48, 96, 192, 384],
    "depths": [2, 2, 4, 2],
    "num_labels": CLASSES,
}


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**VIT))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(**T5))


def _convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(ConvNextConfig(**CONVNEXT))


class _Mixer(nn.Module):
    """An MLP-Mixer (Tolstikhin et al., 2021) on 64 patches."""

    def __init__(self, patches: int = 64, width: int = 256, layers: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 8, stride=8)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.across = nn.ModuleList(_two_layers(patches, 2 * patches) for _ in range(layers))
        self.within = nn.ModuleList(_two_layers(width, 4 * width) for _ in range(layers))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, pixels: torch.Tensor) -> Any:
        x = self.stem(pixels).flatten(2).transpose(1, 2)
        for i, (across, within) in enumerate(zip(self.across, self.within, strict=True)):
            x = x + across(self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + within(self.norms[2 * i + 1](x))
        return self.head(x.mean(1))


def _two_layers(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class _UNet(nn.Module):
    """Maps pictures to masks, over three resolutions."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        sides = (width, 2 * width, 4 * width)
        self.down = nn.ModuleList(_two_convolutions(i, o) for i, o in zip((3, *sides), sides, strict=False))
        self.middle = _two_convolutions(sides[-1], 8 * width)
        self.up = nn.ModuleList(_two_convolutions(3 * s, s) for s in reversed(sides))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, pixels: torch.Tensor) -> Any:
        x, kept = pixels, []
        for block in self.down:
            kept.append(block(x))
            x = F.max_pool2d(kept[-1], 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], 1))
        return self.head(x)


def _two_convolutions(inputs: int, outputs: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before in (inputs, outputs):
        layers += [nn.Conv2d(before, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class _Towers(nn.Module):
    """A recommender of two towers: large tables, little compute."""

    def __init__(self, rows: int = 20_000, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(4))
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * width, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 128))
            for _ in range(2)
        )

    def forward(self, ids: torch.Tensor) -> Any:
        rows = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        left, right = self.towers[0](torch.cat(rows[:2], 1)), self.towers[1](torch.cat(rows[2:], 1))
        return (left * right).sum(1) / 128**0.5


def _pictures(samples: int, side: int = 64) -> Callable[[torch.Generator], Any]:
    def make(draw: torch.Generator) -> Any:
        labels = torch.randint(0, CLASSES, (samples,), generator=draw)
        return torch.randn(samples, 3, side, side, generator=draw), labels

    return make


def _labelled(samples: int) -> Callable[[torch.Generator], Mapping[str, torch.Tensor]]:
    def make(draw: torch.Generator) -> Mapping[str, torch.Tensor]:
        pixels, labels = _pictures(samples)(draw)
        return {"pixel_values": pixels, "labels": labels}

    return make


def _translations(draw: torch.Generator) -> Mapping[str, torch.Tensor]:
    ids, labels = (torch.randint(2, WORDS, (8, 32), generator=draw) for _ in range(2))
    return {"input_ids": ids, "labels": labels}


def _masks(draw: torch.Generator) -> Any:
    return torch.randn(8, 3, 32, 32, generator=draw), torch.randint(0, 2, (8, 32, 32), generator=draw)


def _clicks(draw: torch.Generator) -> Any:
    return torch.randint(0, 20_000, (512, 4), generator=draw), torch.rand(512, generator=draw).round()


UNSEEN: dict[str, Workload] = {
    w.name: w
    for w in (
        Workload(
            name="vit",
            about="A vision transformer of six layers on 64 patches.",
            model=seeded(_vit),
            batch=drawn(_labelled(8)),
            optimizer=adamw(1e-3),
        ),
        Workload(
            name="t5",
            about="A T5 of three and three layers.",
            model=seeded(_t5),
            batch=drawn(_translations),
            optimizer=adamw(1e-3),
        ),
        Workload(
            name="convnext",
            about="A ConvNeXt of ten blocks.",
            model=seeded(_convnext),
            batch=drawn(_labelled(8)),
            optimizer=sgd(0.01, momentum=0.9),
        ),
        Workload(
            name="mixer",
            about="An MLP-Mixer of six layers.",
            model=seeded(_Mixer),
            batch=drawn(_pictures(8)),
            loss_fn=F.cross_entropy,
            optimizer=adamw(1e-3),
        ),
        Workload(
            name="unet",
            about="A U-Net over three resolutions, two million parameters.",
            model=seeded(_UNet),
            batch=drawn(_masks),
            loss_fn=F.cross_entropy,
            optimizer=sgd(0.01, momentum=0.9),
        ),
        Workload(
            name="towers",
            about="A recommender of two towers over four tables of 20,000 rows.",
            model=seeded(_Towers),
            batch=drawn(_clicks),
            loss_fn=F.binary_cross_entropy_with_logits,
            optimizer=adamw(1e-3),
        ),
    )
}
