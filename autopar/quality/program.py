"""A program whose plan a quality budget has chosen, with the guard that watches it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.ir.batch import Batch
from autopar.ops.context import Context
from autopar.quality.candidates import loses
from autopar.quality.guard import Guard
from autopar.quality.shadow import Shadow, fits, is_due
from autopar.runtime.compiled import Settings
from autopar.runtime.job.process_group import Group
from autopar.runtime.looks import Observers
from autopar.runtime.program import Program
from autopar.runtime.step_result import Asked, StepResult
from autopar.spec.plan import Plan
from autopar.strategies.timing import Moments, exactly


class BudgetedProgram(Program):
    """A program whose plan may lose something, and that goes on exactly where it loses too much.

    From then on, groups that lose something synchronize by a plain all-reduce of each step's gradients; what was not
    sent until then is left out. Where ranks train apart, they go on from the average of their replicas, and of what
    their optimizers keep.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, group: Group, optimizer: Optimizer, settings: Settings, context: Context
    ) -> None:
        super().__init__(model, plan, group, optimizer, settings, context)
        self.guard: Guard | None = None
        """`guard.reason` says why it has stepped in; `None` where nothing is lost."""
        self._shadow: Shadow | None = None
        self._is_exact = False
        """Whether the step that runs is one in the shadow."""
        self._lossy = [loses(g, self.context) for g in self.plan.groups]
        if any(self._lossy) and group.world_size > 1:
            begins = min(g.from_step for g, is_lossy in zip(self.plan.groups, self._lossy, strict=True) if is_lossy)
            self.guard = Guard(begins, self._lasting.states.residual_norm, group.rank == 0)
            self._lasting.guard = self.guard
            self._lasting.watched_groups = frozenset(i for i, is_lossy in enumerate(self._lossy) if is_lossy)
            self._is_timed = True  # so that a step can be another one, also where all of the plan's are alike

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._shadow = None
        super().load_state_dict(state)

    def load(self, folder: str | Path) -> None:
        self._shadow = None
        super().load(folder)

    def _step(
        self, batches: list[Batch], given: list[Any], sizes: tuple[int, ...], asked: Asked
    ) -> torch.Tensor | StepResult:
        guard, step = self.guard, self._lasting.steps
        if guard is None or guard.reason:
            return super()._step(batches, given, sizes, asked)
        if is_due(step - guard.begins) and self.settings.scaler is None and fits(self._lasting):
            self._shadow = Shadow(self._lasting)
        result = super()._step(batches, given, sizes, asked)
        loss = _loss_of(result)
        if self._shadow is not None:
            self._in_the_shadow(self._shadow, loss, partial(super()._step, batches, given, sizes, asked))
        guard.look(step, loss)
        if guard.reason:
            self._shadow = None
            self._lasting.meet()
        return result

    def _in_the_shadow(self, shadow: Shadow, loss: float, run: Callable[[], torch.Tensor | StepResult]) -> None:
        """An exact step beside the one that was taken. No observer sees it."""
        self._is_exact = True
        try:
            with self._looking.also(Observers(), alone=True):
                shadow.step(loss, lambda: _loss_of(run()))
        finally:
            self._is_exact = False
        if shadow.has_ended:
            self._shadow = None
            assert self.guard is not None
            self.guard.compare(self._lasting.steps - 1, shadow.plans, shadow.exact)

    def _moments(self) -> Moments:
        moments = super()._moments()
        has_ended = self.guard is not None and self.guard.reason
        return exactly(moments, self._lossy) if has_ended or self._is_exact else moments


def _loss_of(result: torch.Tensor | StepResult) -> float:
    return float(result if isinstance(result, torch.Tensor) else result.loss)
