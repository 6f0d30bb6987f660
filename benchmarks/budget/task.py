"""What a task is: a model, its batches, its optimizer and schedule, and the metric on a test set that can resolve the
budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.budget.metrics import Metric

Batch = tuple[Any, torch.Tensor]
"""Inputs (a tensor, or a tuple of several), and targets."""
Role = str
"""`learned`: the map from probes to degradation may learn from it; `judged`: the choice is judged on it."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training job of a minute or less. Everything is a function of its seed: the same weights, batches and test set
    for every method."""

    name: str
    about: str
    role: Role
    model: Callable[[], nn.Module]
    """Makes the model under the seed that is set; without dropout, whose stream would differ between methods."""
    batch: Callable[[torch.Generator, int], Batch]
    """`batch(generator, samples)`: samples that were never seen before."""
    test_batch: Callable[[torch.Generator, int], Batch] | None = None
    """The same for the test set, where samples are not made but drawn from a store."""
    loss_fn: Callable[[Any, torch.Tensor], torch.Tensor]
    optimizer: Callable[[nn.Module], Optimizer]
    steps: int
    ranks: int
    rank_samples: int
    """Samples of one rank's batch."""
    metric: Metric
    test_samples: int = 20_000
    warm_up: float = 0.05
    """Part of the steps in which the learning rate rises; behind it, it falls to 0 as a cosine."""

    def rate(self, step: int) -> float:
        """What the learning rate is multiplied by in a step."""
        rising = max(1, int(self.warm_up * self.steps))
        if step < rising:
            return (step + 1) / rising
        return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, self.steps - rising)))

    def build(self, seed: int) -> nn.Module:
        """The model with this seed's weights; torch's global stream is as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.model().train()

    def rank_batch(self, seed: int, step: int, rank: int) -> Batch:
        """The batch of a rank in a step."""
        return self.batch(_generator(seed, 1, step, rank), self.rank_samples)

    def evaluate(self, model: nn.Module, part: int = 0, parts: int = 1) -> torch.Tensor:
        """The metric of each sample of the test set, which is one for all seeds. Where it is cut, only one part of it
        is evaluated, and the other samples' are 0."""
        values = torch.zeros(self.test_samples, dtype=torch.float64)
        told = model.training
        model.eval()
        with torch.no_grad():
            for i in range(part, -(-self.test_samples // TEST_PART), parts):
                inputs, target = self._test_part(i)
                output = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
                values[i * TEST_PART :][: len(target)] = self.metric.of(output, target).double()
        model.train(told)
        return values

    def metric_on(self, model: nn.Module, samples: int, part: int) -> torch.Tensor:
        """The metric of each sample of a set that is not the test set; `part`: which of its parts. Of texts, it is
        drawn from the bytes to train on, of which a training sees about a fifth."""
        with torch.no_grad():
            inputs, target = self.batch(_generator(0, 3, part, 0), samples)
            output = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
            return self.metric.of(output, target).double()

    def trivial(self) -> torch.Tensor:
        """The metric of each test sample for the best prediction that looks at no input."""
        target = torch.cat([self._test_part(i)[1] for i in range(-(-self.test_samples // TEST_PART))])
        return self.metric.of(self.metric.constant(target), target).double()

    def _test_part(self, index: int) -> Batch:
        samples = min(TEST_PART, self.test_samples - index * TEST_PART)
        return (self.test_batch or self.batch)(_generator(0, 2, index, 0), samples)


TEST_PART = 1_000
"""Samples of the test set that are evaluated at once."""


def _generator(*numbers: int) -> torch.Generator:
    """A stream of its own for each tuple of numbers."""
    mixed = 0
    for n in numbers:
        mixed = (mixed * 1_000_003 + n + 1) % (1 << 61)
    return torch.Generator().manual_seed(mixed)
