"""Exact steps in the shadow of a plan's: a few, from where the plan was, on the same batches; then they are dropped.

Where the plan only sends less, both fall alike. Where it holds training up, as gradients that come too late at a high
learning rate do, the loss of exact steps falls at once, which no look at the plan's own losses shows.

Before each of the program's steps all that training keeps is as it was, so that training goes on as if nobody had
looked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch

from autopar.runtime.lasting import Lasting
from autopar.runtime.model.copies import all_of, copies
from autopar.runtime.model.eager import kept_attributes
from autopar.runtime.proofs.proof import free_bytes
from autopar.runtime.proofs.subject import summed

SHADOW_STEPS = 16
FIRST, LATER = 100, 8
"""The lossy step from which on exact ones run beside, and how many times as many steps lie before the next such look:
of 1,000 steps, 32 are taken twice, of 20,000 steps 48."""
COPIES = 20
"""Of the parameters, that must be free in memory. [Empirical: under AdamW, 8 to 9 with 8 bits, 13 with gradients two
steps late, 17 with an outer optimizer]"""


def is_due(lossy_step: int) -> bool:
    """Whether exact steps begin to run beside a step, counted from the first one that loses something."""
    due = FIRST
    while due < lossy_step:
        due *= LATER
    return due == lossy_step


def fits(lasting: Lasting, is_able: bool) -> bool:
    """Whether all ranks have the memory for it, and are able to. By all ranks together."""
    free, held = free_bytes(lasting.device), sum(p.numel() * p.element_size() for p in lasting.parameters.values())
    is_short = free is not None and free < COPIES * held
    return not summed(torch.tensor(float(is_short or not is_able)), lasting.group)


class Shadow:
    """Begins before a step, where training is. By all ranks together, as are its steps."""

    def __init__(self, lasting: Lasting, counters: Sequence[object]) -> None:
        """`counters`: what the program counts besides, that a step in the shadow must not count."""
        self._lasting, self._counters = lasting, counters
        self._is_first = True
        self._there: Callable[[], None] | None = lasting.snapshot()
        """Puts back where exact steps have come to."""
        self.plans: list[float] = []
        self.exact: list[float] = []
        """The losses of the plan's steps, and of exact steps on the same batches."""

    @property
    def has_ended(self) -> bool:
        return len(self.exact) == SHADOW_STEPS

    def step(self, loss: float, settings: Callable[[], None], exactly: Callable[[], float]) -> None:
        """Behind a step of the plan, with its loss: takes the same step by `exactly`, from where exact steps have come
        to, and has all as it was. `settings` puts back those that the optimizer had before the plan's step: they are
        the schedule's, not what a step has come to."""
        lasting, there = self._lasting, self._there
        assert there is not None, "a shadow ends where one of its steps fails"
        here, steps = self._kept(), lasting.steps
        try:
            there()
            there = self._there = None  # it holds a copy of all
            settings()
            lasting.steps = steps - 1
            if self._is_first:
                lasting.meet()
            self._is_first = False
            found = exactly()
            self._there = lasting.snapshot()
        finally:
            here()
            lasting.steps = steps
        self.plans.append(loss)
        self.exact.append(found)

    def _kept(self) -> Callable[[], None]:
        """All that a step changes, what the model's own Python keeps included."""
        owners = self._lasting.owners.values()
        buffers = copies(b for owner in owners for b in owner.buffers())
        return all_of([self._lasting.snapshot(), buffers, kept_attributes(owners), *map(_fields, self._counters)])


def _fields(counter: object) -> Callable[[], None]:
    """Keeps an object's fields; what is returned puts them back."""
    before = {k: copy.copy(v) if isinstance(v, (list, dict, set)) else v for k, v in vars(counter).items()}
    return lambda: vars(counter).update(before)
