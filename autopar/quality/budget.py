"""What a user allows lossy synchronization to cost, and how it is measured."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from autopar.errors import SpecError

Metric = Callable[[nn.Module], float]
"""The metric of a model, which is in evaluation mode. Each rank may look at its part of the data: the mean counts."""
HELD_BYTES = 4 << 30
"""Of batches that are held in memory, as different plans are tried on the same ones."""
LEAST_HELD = 64
"""Batches that are held however large they are: those of two exact probes."""
LEAST_STEPS = 500
"""The fewest steps of a training that a budget chooses a plan for: with fewer, a tenth of them is too short to tell
plans apart."""


@dataclass(frozen=True)
class QualityBudget:
    """Lossy synchronization is allowed as far as the metric loses no more than this, for `optimize(..., budget=)`.

    At the same number of steps and the same schedule, the metric loses at most `loss` of what exact training gains.
    """

    loss: float
    """The part of the metric's gain over training that may be lost: 0.01 for one per cent."""
    metric: Metric
    batches: Iterable[Any]
    """Batches of this rank, as it will train on them; they are gone through again where there are too few, or where
    `HELD_BYTES` hold no more."""
    steps: int
    """Steps that the training will have. Pilots on copies of the model take at most a tenth as many; before, probes
    take about a minute."""
    higher_is_better: bool = True
    """Whether a larger metric is a better one: an accuracy, not a loss."""

    def __post_init__(self) -> None:
        """Raises `SpecError` where no plan can be chosen by the budget."""
        if not 0 < self.loss < 1:
            raise SpecError(
                f"the quality budget is {self.loss}, expected a part of what training gains: 0.01 for one per cent"
            )
        if self.steps < LEAST_STEPS:
            raise SpecError(
                f"steps is {self.steps}: with fewer than {LEAST_STEPS} steps, a tenth of them is too short to tell "
                "lossy methods apart; name a strategy, or take fidelity='rounded'"
            )

    @property
    def said(self) -> str:
        """What has to be the same on all ranks."""
        better = "higher" if self.higher_is_better else "lower"
        return f"{self.loss} of the metric, of which {better} is better, in {self.steps} steps"

    def taken(self, count: int) -> list[Any]:
        """The first `count` batches. Raises `SpecError` where there is none."""
        source = iter(self.batches)
        first = next(source, None)
        if first is None:
            raise SpecError("the quality budget's batches are empty: plans are tried on batches of the training")
        size = sum(t.nbytes for t in tree_leaves(first) if isinstance(t, torch.Tensor))
        most = max(LEAST_HELD, HELD_BYTES // max(1, size))
        # A loader may fill the same few buffers again and again.
        found = list(map(_copied, itertools.chain([first], itertools.islice(source, min(count, most) - 1))))
        return list(itertools.islice(itertools.cycle(found), count))


@contextmanager
def stream_kept(device: torch.device) -> Iterator[None]:
    """While it is open, the user's code may draw random numbers: all streams are as they were behind it."""
    python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    random.setstate(python)
    np.random.set_state(of_numpy)


def _copied(batch: Any) -> Any:
    def copied(leaf: Any) -> Any:
        return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(copied, batch)
