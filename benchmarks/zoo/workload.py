"""What a workload is: a model, its batches, its loss and its optimizer, the same for autopar and for every peer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.zoo.entry import Batch, LossFn, eager_loss

SEED = 0
"""Of weights and data."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training job at a size that four ranks sharing two cores can bear.

    Everything is a function of its arguments: `model()` has the same weights on every rank and in every run, and
    `batch(step, rank)` is the same batch for every system that trains on it.
    """

    name: str
    about: str
    """What it is in the field, what was scaled down, and where its data come from."""
    model: Callable[[], nn.Module]
    """Makes the model, in train mode, without dropout, whose random stream would differ between systems."""
    batch: Callable[[int, int], Batch]
    """`batch(step, rank)`: a dict of keyword inputs with labels, or `(inputs, target)` where there is a `loss_fn`."""
    loss_fn: LossFn | None = None
    """`loss_fn(output, target)`, a mean over the batch; None where the model computes its loss."""
    optimizer: Callable[[nn.Module], Optimizer]
    """As the field uses it. Its sums are over elements, so that it may act on a shard of a parameter."""
    sparse_model: Callable[[], nn.Module] | None = None
    """The same model, with the same weights, whose embeddings give sparse gradients. Only where the optimizer does the
    same with them as with dense ones, which plain SGD does."""
    eager: bool = False
    """Whether no graph shows it, so that it runs eagerly."""
    leaves_unused: bool = False
    """Whether some parameters get no gradient in some steps, as those of experts that nothing was sent to. DDP's user
    must say so."""

    @property
    def sparse(self) -> bool:
        """Whether there is a variant with sparse gradients."""
        return self.sparse_model is not None

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The loss of an eager forward pass of `model`, which may be wrapped (DDP, FSDP), on this rank's batch."""
        return eager_loss(model, batch, self.loss_fn)


def drawn(make: Callable[[torch.Generator], Any]) -> Callable[[int, int], Any]:
    """`batch(step, rank)` of a workload: each batch is made from a random generator of its own."""
    return lambda step, rank: make(torch.Generator().manual_seed(SEED + 1000 * step + rank))


def seeded(make: Callable[[], nn.Module], seed: int = SEED) -> Callable[[], nn.Module]:
    """Makes a model from a seed, by default the suite's, in train mode, and leaves torch's global generator alone."""

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make().train()

    return build


def sgd(lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> Callable[[nn.Module], Optimizer]:
    """Makes SGD for a model."""

    def build(model: nn.Module) -> Optimizer:
        return torch.optim.SGD(_trainable(model), lr=lr, momentum=momentum, weight_decay=weight_decay)

    return build


def adamw(lr: float, weight_decay: float = 0.01) -> Callable[[nn.Module], Optimizer]:
    """Makes AdamW for a model."""

    def build(model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(_trainable(model), lr=lr, weight_decay=weight_decay)

    return build


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]
