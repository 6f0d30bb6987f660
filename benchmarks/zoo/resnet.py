"""A compact ResNet of any depth and width (He et al. 2016, table 1; a bottleneck strides in its 3x3 convolution)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class Residual(nn.Module):
    """A residual block: `expansion` 1 is the basic one of two convolutions, 4 the bottleneck of three."""

    def __init__(self, inputs: int, width: int, stride: int, expansion: int) -> None:
        super().__init__()
        outputs = width * expansion
        if expansion == 1:
            convolutions = [_convolution(inputs, width, 3, stride), nn.ReLU(), _convolution(width, outputs, 3)]
        else:
            convolutions = [
                *(_convolution(inputs, width, 1), nn.ReLU()),
                *(_convolution(width, width, 3, stride), nn.ReLU()),
                _convolution(width, outputs, 1),
            ]
        self.body = nn.Sequential(*convolutions)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else _convolution(inputs, outputs, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


RESNET18 = (2, 2, 2, 2)
RESNET50 = (3, 4, 6, 3)
"""Blocks in each stage; ResNet-50 has an expansion of 4."""


class ResNet(nn.Module):
    """Images (n, 3, h, w) to logits (n, classes)."""

    def __init__(
        self, depths: Sequence[int], width: int = 64, expansion: int = 1, classes: int = 1000, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(_convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        blocks: list[nn.Module] = []
        inputs = width
        for stage, depth in enumerate(depths):
            for block in range(depth):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(Residual(inputs, width << stage, stride, expansion))
                inputs = (width << stage) * expansion
        self.blocks = nn.Sequential(*blocks)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.stem(x)).mean((2, 3))
        logits: torch.Tensor = self.classifier(self.dropout(x))
        return logits
