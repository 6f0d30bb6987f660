"""A program whose plan a quality budget has chosen, with the guard that watches it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.ops.context import Context
from autopar.quality.candidates import loses
from autopar.quality.guard import Guard
from autopar.runtime.compiled import Settings
from autopar.runtime.job.process_group import Group
from autopar.runtime.program import Program
from autopar.runtime.step_result import StepResult
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
        self._lossy = [loses(g, self.context) for g in self.plan.groups]
        if any(self._lossy) and group.world_size > 1:
            begins = min(g.from_step for g, is_lossy in zip(self.plan.groups, self._lossy, strict=True) if is_lossy)
            self.guard = Guard(begins, self._lasting.states.residual_norm, group.rank == 0)
            self._lasting.guard = self.guard
            self._lasting.watched_groups = frozenset(i for i, is_lossy in enumerate(self._lossy) if is_lossy)
            self._is_timed = True  # so that a step can be another one, also where all of the plan's are alike

    def _step(self, *asked: Any) -> torch.Tensor | StepResult:
        step, result = self._lasting.steps, super()._step(*asked)
        if self.guard is not None and not self.guard.reason:
            self.guard.look(step, float(result if isinstance(result, torch.Tensor) else result.loss))
            if self.guard.reason:
                self._lasting.meet()
        return result

    def _moments(self) -> Moments:
        moments = super()._moments()
        has_ended = self.guard is not None and self.guard.reason
        return exactly(moments, self._lossy) if has_ended else moments
