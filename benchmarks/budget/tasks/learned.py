"""Small tasks that the map from probes to degradation is learned from: none is like one that the choice is judged on.

Ten families, each once with SGD and once with AdamW, of 2 to 8 ranks. Some are hard for a method on purpose: a
rotation's gradient has full rank, a plain deep net passes on what it is given, tables get gradients in few rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from benchmarks.budget.metrics import ERROR, LOG_LOSS, NATS, SQUARED, Metric
from benchmarks.budget.task import Batch, Task
from benchmarks.zoo.workload import adamw, sgd


@cache
def _fixed(seed: int, *shape: int) -> torch.Tensor:
    """Numbers of a normal distribution, the same each time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def planted(generator: torch.Generator, samples: int, classes: int) -> Batch:
    """Points in 32 dimensions; the class is the largest output of a fixed net, by chance."""
    x = torch.randn(samples, 32, generator=generator)
    scores = torch.tanh(x @ _fixed(1, 32, 24) * 0.4) @ _fixed(2, 24, classes)
    gumbel = -torch.log(-torch.log(torch.rand(scores.shape, generator=generator).clamp(1e-9, 1 - 1e-7)))
    return x, (scores + 0.5 * gumbel).argmax(1)


def rotated(generator: torch.Generator, samples: int) -> Batch:
    """Points in 64 dimensions, and where a fixed rotation behind a fold puts them."""
    x = torch.randn(samples, 64, generator=generator)
    turned = x.abs() @ torch.linalg.qr(_fixed(3, 64, 64))[0]
    return x, turned + 0.3 * torch.randn(samples, 64, generator=generator)


def textures(generator: torch.Generator, samples: int) -> Batch:
    """Patches (samples, 1, 12, 12) of stripes in noise; the class is their direction, of eight."""
    target = torch.randint(8, (samples,), generator=generator)
    angle = (target + 0.4 * (torch.rand(samples, generator=generator) - 0.5))[:, None, None] * (torch.pi / 8)
    axis = torch.arange(12.0)
    wave = 0.6 + 0.8 * torch.rand(samples, 1, 1, generator=generator)
    along = axis[:, None] * torch.sin(angle) + axis[None, :] * torch.cos(angle)
    phase = 6.3 * torch.rand(samples, 1, 1, generator=generator)
    return (torch.sin(wave * along + phase) + 0.9 * torch.randn(samples, 12, 12, generator=generator))[:, None], target


def counted(generator: torch.Generator, samples: int) -> Batch:
    """Sequences of 16 symbols; the class is how many of the first kind stand before the last of the second."""
    ids = torch.randint(8, (samples, 16), generator=generator)
    last = torch.where(ids == 1, torch.arange(16), -1).amax(1, keepdim=True)
    return ids, ((ids == 0) & (torch.arange(16) < last)).sum(1).clamp(max=4)


def chained(generator: torch.Generator, samples: int) -> Batch:
    """Sequences of 24 symbols of 32, of a fixed chain of second order; each next symbol is asked for."""
    table = (4.0 * _fixed(5, 32, 32, 32)).softmax(2).view(1024, 32)
    ids = [torch.randint(32, (samples,), generator=generator) for _ in range(2)]
    for _ in range(23):
        ids.append(torch.multinomial(table[32 * ids[-2] + ids[-1]], 1, generator=generator)[:, 0])
    whole = torch.stack(ids, 1)
    return whole[:, :-1], whole[:, 1:]


def likes(generator: torch.Generator, samples: int) -> Batch:
    """Pairs of 300 users and 300 items, the first of which come oftenest; how likely a user likes an item."""
    ids = (300 * torch.rand(samples, 2, generator=generator) ** 2).long()
    liked = (_fixed(6, 300, 6)[ids[:, 0]] * _fixed(7, 300, 6)[ids[:, 1]]).sum(1)
    return ids, liked.sigmoid()


def rated(generator: torch.Generator, samples: int) -> Batch:
    """The same; whether the user does."""
    ids, liked = likes(generator, samples)
    return ids, (torch.rand(samples, generator=generator) < liked).float()


def folded(generator: torch.Generator, samples: int) -> Batch:
    """Points of a curved surface of eight dimensions in 96, which are asked for again."""
    x = torch.tanh(torch.randn(samples, 8, generator=generator) @ _fixed(8, 8, 40)) @ _fixed(9, 40, 96) / 40**0.5
    return x, x + 0.2 * torch.randn(samples, 96, generator=generator)


def chirps(generator: torch.Generator, samples: int) -> Batch:
    """Sounds (samples, 1, 96) that rise or fall; the class is how fast, of six."""
    target = torch.randint(6, (samples,), generator=generator)
    time = torch.linspace(0, 1, 96)
    begin = 8 + 16 * torch.rand(samples, 1, generator=generator)
    phase = 6.3 * (begin * time + (target[:, None] - 2.5) * 4 * time**2 + torch.rand(samples, 1, generator=generator))
    return (torch.sin(phase) + 0.8 * torch.randn(samples, 96, generator=generator))[:, None], target


class Plain(nn.Sequential):
    """A deep net of convolutions, without norms and without residuals, as VGG."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs in ((1, 16), (16, 16), (16, 32), (32, 32)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if inputs == outputs else []
        super().__init__(*layers, nn.Flatten(), nn.Linear(288, 128), nn.ReLU(), nn.Linear(128, 8))


class Counting(nn.Module):
    """A GRU; the last state says the class."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cells, self.head = nn.Embedding(8, 16), nn.GRU(16, 48, batch_first=True), nn.Linear(48, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.cells(self.embed(ids))[0][:, -1])
        return scores


class Attending(nn.Module):
    """Embeddings of a symbol and of those before it, mixed by attention; one block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(32, 64), nn.Parameter(torch.randn(24, 64) * 0.02)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.mlp = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.places
        q, k, v = (part.unflatten(2, (4, 16)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, 2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        scores: torch.Tensor = self.head(x + self.mlp(x))
        return scores


class Rating(nn.Module):
    """A product of two embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(300, 12), nn.Embedding(300, 12)
        nn.init.normal_(self.users.weight, std=0.3)
        nn.init.normal_(self.items.weight, std=0.3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        liked: torch.Tensor = (self.users(ids[:, 0]) * self.items(ids[:, 1])).sum(1)
        return liked


class Residual(nn.Module):
    """Layers with norms and residuals."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(32, 64), nn.Linear(64, classes)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        scores: torch.Tensor = self.head(x)
        return scores


def _perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _hearing() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(1, 24, 9, 2, 4), nn.ReLU(), nn.Conv1d(24, 32, 7, 2, 3), nn.ReLU(),
        nn.Conv1d(32, 32, 5, 2, 2), nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(128, 6),
    )  # fmt: skip


def _symbols(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class _Family:
    """What two tasks share, one for each optimizer."""

    name: str
    about: str
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], Batch]
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    metric: Metric
    sgd_rate: float
    """Of learning, tuned for exact training."""
    adamw_rate: float
    ranks: int
    rank_samples: int
    steps: int = 600
    test_batch: Callable[[torch.Generator, int], Batch] | None = None

    def tasks(self) -> tuple[Task, Task]:
        return self._task("sgd", sgd(self.sgd_rate, 0.9)), self._task("adamw", adamw(self.adamw_rate))

    def _task(self, name: str, optimizer: Callable[[nn.Module], Optimizer]) -> Task:
        return Task(
            name=f"{self.name}_{name}",
            about=f"{self.about}; {name}",
            role="learned",
            model=self.model,
            batch=self.batch,
            test_batch=self.test_batch,
            loss_fn=self.loss_fn,
            optimizer=optimizer,
            steps=self.steps,
            ranks=self.ranks,
            rank_samples=self.rank_samples,
            metric=self.metric,
        )


ENTROPY = F.cross_entropy
FAMILIES = (
    _Family(
        "planted", "a perceptron on a planted net's classes", partial(_perceptron, 32, 96, 96, 6),
        partial(planted, classes=6), ENTROPY, ERROR, 0.1, 3e-3, 4, 16,
    ),
    _Family(
        "residual", "residual layers on a planted net's classes", partial(Residual, 12), partial(planted, classes=12),
        ENTROPY, NATS, 0.1, 3e-3, 2, 16,
    ),
    _Family(
        "wide", "a wide perceptron with one hidden layer on a planted net's classes", partial(_perceptron, 32, 512, 4),
        partial(planted, classes=4), ENTROPY, ERROR, 0.1, 2e-3, 8, 8,
    ),
    _Family(
        "rotated", "a perceptron on a rotation behind a fold", partial(_perceptron, 64, 256, 64), rotated, F.mse_loss,
        SQUARED, 3.0, 3e-3, 4, 16,
    ),
    _Family(
        "textures", "a plain deep net on directions of stripes", Plain, textures, ENTROPY, ERROR, 0.02, 1e-3, 4, 16, 900
    ),
    _Family("counted", "a GRU that counts", Counting, counted, ENTROPY, NATS, 0.3, 5e-3, 2, 32),
    _Family(
        "chained", "attention on a chain of second order", Attending, chained, _symbols, NATS, 0.2, 3e-3, 4, 8, 1_000
    ),
    _Family(
        "rated", "a product of embeddings", Rating, rated, F.binary_cross_entropy_with_logits, LOG_LOSS, 20.0, 2e-2,
        4, 128, test_batch=likes,
    ),
    _Family(
        "folded", "an autoencoder of a curved surface", partial(_perceptron, 96, 64, 8, 64, 96), folded, F.mse_loss,
        SQUARED, 0.5, 3e-3, 8, 16,
    ),
    _Family(
        "chirps", "a 1-D convolutional net on rising sounds", _hearing, chirps, ENTROPY, ERROR, 0.05, 2e-3, 4, 16,
        1_500,
    ),
)  # fmt: skip
TASKS = tuple(task for family in FAMILIES for task in family.tasks())
