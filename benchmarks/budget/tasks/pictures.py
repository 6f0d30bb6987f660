"""Pictures that a formula draws: a shape of one of ten kinds, somewhere, turned, in two colours on a striped ground."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.budget.metrics import ERROR
from benchmarks.budget.task import Batch, Task
from benchmarks.zoo.workload import sgd

CLASSES, SIDE = 10, 16


def pictures(generator: torch.Generator, samples: int) -> Batch:
    """Pictures (samples, 3, 16, 16). A shape's edge is a radius that swings k times around it, by much or little."""

    def drawn(*shape: int) -> torch.Tensor:
        return torch.rand(samples, *shape, generator=generator)

    target = torch.randint(CLASSES, (samples,), generator=generator)
    swings, deep = 1 + target % 5, target // 5
    axis = torch.linspace(-1, 1, SIDE)
    y = axis[:, None] - (drawn(1, 1) - 0.5) * 0.4
    x = axis[None, :] - (drawn(1, 1) - 0.5) * 0.4
    angle = torch.atan2(y, x) + drawn(1, 1) * 0.5 * math.pi
    edge = torch.cos(swings[:, None, None] * angle)
    radius = 0.6 * (0.9 + 0.2 * drawn(1, 1)) * (1 + (0.15 + 0.35 * deep)[:, None, None] * edge)
    inside = torch.sigmoid(12 * (radius - (x**2 + y**2).sqrt()))[:, None]
    stripes = 0.5 + 0.5 * torch.sin(6 * drawn(1, 1) * x + 6 * drawn(1, 1) * y + 6 * drawn(1, 1))[:, None]
    front, back = 0.4 + 0.6 * drawn(3, 1, 1), 0.5 * drawn(3, 1, 1)
    picture = inside * front + (1 - inside) * back * stripes
    return picture + 0.05 * torch.randn(samples, 3, SIDE, SIDE, generator=generator) - 0.5, target


def _layer(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.GroupNorm(8, outputs), nn.ReLU()]


class Small(nn.Sequential):
    """Four convolutions with group norms."""

    def __init__(self, width: int = 24) -> None:
        super().__init__(
            *_layer(3, width, 1),
            *_layer(width, width, 2),
            *_layer(width, 2 * width, 2),
            *_layer(2 * width, 2 * width, 1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, CLASSES),
        )


TASKS = (
    Task(
        name="pictures",
        about="a CNN with group norms on drawn shapes; SGD with momentum",
        role="judged",
        model=Small,
        batch=pictures,
        loss_fn=F.cross_entropy,
        optimizer=sgd(0.1, 0.9, 5e-4),
        steps=1_200,
        ranks=4,
        rank_samples=16,
        metric=ERROR,
        test_samples=15_000,
    ),
)
