"""Convolutional networks that no graph shows: a detector that picks by masks, and a critic with a gradient penalty."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

Loss = dict[str, torch.Tensor]


class _Residual(nn.Module):
    """Two convolutions beside their input, at half its size where the number of channels changes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.beside = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride)
        self.norms = nn.ModuleList([nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(F.silu(self.norms[0](x)))
        found: torch.Tensor = self.beside(x) + self.second(F.silu(self.norms[1](h)))
        return found


def _residuals(widths: tuple[int, ...]) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, widths[0], 3, 1, 1), *(_Residual(a, b) for a, b in pairwise(widths)))


class Detector(nn.Module):
    """Says of each place of its features whether a box's centre is there, of which class, and where its sides are."""

    def __init__(self, classes: int = 10, widths: tuple[int, ...] = (16, 32, 64, 128, 192)) -> None:
        super().__init__()
        self.body = _residuals(widths)
        self.scores = nn.Sequential(nn.Conv2d(widths[-1], 192, 3, 1, 1), nn.SiLU(), nn.Conv2d(192, classes, 1))
        self.sides = nn.Sequential(nn.Conv2d(widths[-1], 192, 3, 1, 1), nn.SiLU(), nn.Conv2d(192, 4, 1))

    def forward(self, images: torch.Tensor, boxes: torch.Tensor, labels: torch.Tensor) -> Loss:
        features = self.body(images)
        scores, sides = self.scores(features), self.sides(features).permute(0, 2, 3, 1)
        size = features.shape[-1]
        centres = ((boxes[..., :2] + boxes[..., 2:]) / 2 * size).long().clamp(max=size - 1)
        wanted, there = torch.zeros_like(scores), torch.zeros(scores.shape[0], size, size, dtype=torch.bool)
        truth = torch.zeros(*there.shape, 4)
        for i in range(len(images)):
            large = ((boxes[i, :, 2:] - boxes[i, :, :2]).prod(-1) > 0.01).nonzero()[:, 0]
            x, y = centres[i, large].unbind(-1)
            wanted[i, labels[i, large], y, x] = 1
            there[i, y, x] = True
            truth[i, y, x] = boxes[i, large]
        loss = F.binary_cross_entropy_with_logits(scores, wanted)
        if there.any():
            loss = loss + F.smooth_l1_loss(sides[there], truth[there])
        return {"loss": loss}


class Critic(nn.Module):
    """Tells real pictures from made ones, with a gradient of norm 1 between them (Gulrajani et al., 2017)."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256)) -> None:
        super().__init__()
        self.body = _residuals(widths)
        self.out = nn.Linear(widths[-1], 1)

    def judged(self, pictures: torch.Tensor) -> torch.Tensor:
        """How real each picture looks."""
        found: torch.Tensor = self.out(self.body(pictures).mean((2, 3)))[:, 0]
        return found

    def forward(self, real: torch.Tensor, made: torch.Tensor, mix: torch.Tensor) -> Loss:
        between = (mix * real + (1 - mix) * made).requires_grad_()
        (slope,) = torch.autograd.grad(self.judged(between).sum(), between, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        return {"loss": self.judged(made).mean() - self.judged(real).mean() + 10 * penalty}
