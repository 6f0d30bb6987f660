"""Classes of curves of 40 points, shifted, stretched and noisy, after the idea of MNIST-1D (Greydanus and Kobak,
"Scaling down deep learning", ICML 2024): a generator of its own, which makes as many samples as are asked for."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.budget.metrics import ERROR
from benchmarks.budget.task import Batch, Task
from benchmarks.zoo.workload import sgd

CLASSES, POINTS, TEMPLATE = 10, 40, 14


def templates(classes: int, points: int = TEMPLATE, seed: int = 7) -> torch.Tensor:
    """A smooth curve for each class, from 0 to 0."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(classes, 1, points // 2 + 1, generator=generator)
    smooth = F.interpolate(drawn, points, mode="linear", align_corners=True)[:, 0]
    return smooth * torch.hann_window(points, periodic=False) ** 0.3


def curves(generator: torch.Generator, samples: int, noise: float = 0.25) -> Batch:
    """Curves (samples, 1, 40): a template somewhere, stretched and scaled, on a slope, in noise."""
    target = torch.randint(CLASSES, (samples,), generator=generator)
    start = torch.rand(samples, 1, generator=generator) * (POINTS - 1.6 * TEMPLATE)
    stretch = 0.8 + 0.6 * torch.rand(samples, 1, generator=generator)
    place = (torch.arange(POINTS) - start) / stretch  # in points of the template
    table = F.pad(templates(CLASSES), (1, 2))[target]
    low = place.clamp(-1, TEMPLATE).floor()
    left = table.gather(1, (low + 1).long())
    right = table.gather(1, (low + 2).long())
    values = left + (right - left) * (place - low).clamp(0, 1)
    values = values * (0.7 + 0.6 * torch.rand(samples, 1, generator=generator))
    slope = torch.linspace(-1, 1, POINTS) * torch.randn(samples, 1, generator=generator) * 0.3
    return (values + slope + noise * torch.randn(samples, POINTS, generator=generator))[:, None], target


class Convolutional(nn.Sequential):
    """Three convolutions of stride 2, and a linear layer behind them."""

    def __init__(self, width: int = 32) -> None:
        super().__init__(
            nn.Conv1d(1, width, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv1d(width, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv1d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * (POINTS // 8), CLASSES),
        )


TASKS = (
    Task(
        name="waves",
        about="a 1-D convolutional net on shifted curves, after MNIST-1D; SGD with momentum",
        role="judged",
        model=Convolutional,
        batch=curves,
        loss_fn=F.cross_entropy,
        optimizer=sgd(0.05, 0.9, 1e-4),
        steps=1_500,
        ranks=4,
        rank_samples=16,
        metric=ERROR,
    ),
)
