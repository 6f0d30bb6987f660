"""One model of the zoo: how it is built, what it is trained on, and its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

Kind = Literal[
    "encoder",
    "decoder",
    "encoder-decoder",
    "mixture of experts",
    "state space",
    "vision",
    "audio",
    "detection",
    "multimodal",
    "time series",
    "diffusion",
    "graph",
    "plain",
]

Batch: TypeAlias = Any
"""A dict of keyword inputs, labels among them; or `(inputs, target)` where the entry has a `loss_fn`."""

LossFn: TypeAlias = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Entry:
    """A model of the zoo. Everything is a function of its arguments: equal seeds give equal models and batches."""

    name: str
    kind: Kind
    make: Callable[[float], nn.Module]
    """Makes the model with the given dropout probability, with random weights from torch's global generator."""
    batch: Callable[[int, int], Batch]
    """`batch(batch_size, seed)`."""
    loss_fn: LossFn | None = None
    """`loss_fn(output, target)`; None where the model computes its loss."""
    batch_size: int = 2
    """The size at which benchmarks run it."""

    def build(self, dropout: float = 0.0, seed: int = 0) -> nn.Module:
        """The model in train mode. A dropout of 0 makes training steps deterministic, for tests of equality."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make(dropout).train()

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss of an eager forward pass."""
        return eager_loss(model, batch, self.loss_fn)


def eager_loss(model: nn.Module, batch: Batch, loss_fn: LossFn | None) -> torch.Tensor:
    """The loss of an eager forward pass of a model, which may be wrapped (DDP, FSDP), on this rank's batch. Found
    without autopar's help, as what autopar computes is compared with it."""
    if loss_fn is None:
        output = model(**batch)
        loss = output["loss"] if isinstance(output, dict) else output.loss
    else:
        inputs, target = batch
        loss = loss_fn(model(**inputs) if isinstance(inputs, dict) else model(inputs), target)
    assert isinstance(loss, torch.Tensor)
    return loss
