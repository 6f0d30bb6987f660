"""Exact steps in the shadow of a plan's: a few, from where the plan was, on the same batches; then they are dropped.

Where the plan only sends less, both fall alike. Where it holds training up, as gradients that come too late at a high
learning rate do, the loss of exact steps falls at once, which no look at the plan's own losses shows.

Before each of the program's steps all that training keeps is as it was, so that training goes on as if nobody had
looked.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from autopar.runtime.lasting import Lasting
from autopar.runtime.model.copies import all_of
from autopar.runtime.model.eager import kept_attributes
from autopar.runtime.proofs.proof import free_bytes
from autopar.runtime.proofs.subject import summed

SHADOW_STEPS = 16
FIRST, LATER = 100, 8
"""The lossy step from which on exact ones run beside, and how many times as many steps lie before the next such look:
of 1,000 steps, 32 are taken twice, of 20,000 steps 48."""
COPIES = 10
"""Of the parameters, that must be free in memory: with Adam's moments and a residual, twice what training keeps, and
room to work."""


def is_due(lossy_step: int) -> bool:
    """Whether exact steps begin to run beside a step, counted from the first one that loses something."""
    due = FIRST
    while due < lossy_step:
        due *= LATER
    return due == lossy_step


def fits(lasting: Lasting) -> bool:
    """Whether all ranks have the memory for it. By all ranks together."""
    free, held = free_bytes(lasting.model), sum(p.numel() * p.element_size() for p in lasting.parameters.values())
    return not summed(torch.tensor(float(free is not None and free < COPIES * held)), lasting.group)


class Shadow:
    """Begins before a step, where training is. By all ranks together, as are its steps."""

    def __init__(self, lasting: Lasting) -> None:
        self._lasting = lasting
        self._is_first = True
        self._there = self._kept()
        self.plans: list[float] = []
        self.exact: list[float] = []
        """The losses of the plan's steps, and of exact steps on the same batches."""

    @property
    def has_ended(self) -> bool:
        return len(self.exact) == SHADOW_STEPS

    def step(self, loss: float, exactly: Callable[[], float]) -> None:
        """Behind a step of the plan, with its loss: takes the same step by `exactly`, from where exact steps have come
        to, and has all as it was."""
        lasting = self._lasting
        here, steps = self._kept(), lasting.steps
        try:
            self._there()
            lasting.steps = steps - 1
            if self._is_first:
                lasting.meet()
            self._is_first = False
            self.plans.append(loss)
            self.exact.append(exactly())
            self._there = self._kept()
        finally:
            here()
            lasting.steps = steps

    def _kept(self) -> Callable[[], None]:
        """What training keeps, and what the model's own Python does."""
        return all_of([self._lasting.snapshot(), kept_attributes(self._lasting.owners.values())])
