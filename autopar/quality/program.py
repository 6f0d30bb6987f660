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
from autopar.ops.moments import Moment
from autopar.quality.candidates import loses
from autopar.quality.guard import Guard
from autopar.quality.shadow import Shadow, fits, is_due
from autopar.runtime.compiled import Settings
from autopar.runtime.job.process_group import Group
from autopar.runtime.looks import Observers
from autopar.runtime.optimizers.own_settings import kept_settings
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
        if is_due(step - guard.begins) and fits(self._lasting, self._casts_a_shadow):
            self._shadow = Shadow(self._lasting, (self._meaning, self._looks, self._times))
        settings = kept_settings(self.optimizer) if self._shadow is not None else None
        result = super()._step(batches, given, sizes, asked)
        loss = _loss_of(result)
        if self._shadow is not None and settings is not None:
            run = partial(super()._step, batches, given, sizes, asked)
            self._in_the_shadow(self._shadow, loss, settings, run)
        guard.look(step, loss)
        if guard.reason:
            self._shadow = None
            self._lasting.meet()
        return result

    @property
    def _casts_a_shadow(self) -> bool:
        """Whether all that a step changes can be put back: not what a model does that runs eagerly, nor the scale of
        the loss."""
        runs_eagerly = self._eager is not None or any(True for _ in self._stand_ins)
        return not runs_eagerly and self.settings.scaler is None

    def _in_the_shadow(
        self, shadow: Shadow, loss: float, settings: Callable[[], None], run: Callable[[], torch.Tensor | StepResult]
    ) -> None:
        """An exact step beside the one that was taken. No observer sees it."""
        self._is_exact, self._shadow = True, None
        try:
            with self._looking.also(Observers(), alone=True):
                shadow.step(loss, settings, lambda: _loss_of(run()))
            self._shadow = shadow
        finally:
            self._is_exact = False
        if shadow.has_ended:
            self._shadow = None
            assert self.guard is not None
            self.guard.compare(self._lasting.steps - 1, shadow.plans, shadow.exact)

    @property
    def _goes_exactly(self) -> bool:
        return self._is_exact or (self.guard is not None and bool(self.guard.reason))

    def _moments(self) -> Moments:
        moments = super()._moments()
        return exactly(moments, self._lossy) if self._goes_exactly else moments

    def _moment(self, index: int) -> Moment:
        moment = super()._moment(index)
        return exactly((moment,), (self._lossy[index],))[0] if self._goes_exactly else moment


def _loss_of(result: torch.Tensor | StepResult) -> float:
    return float(result if isinstance(result, torch.Tensor) else result.loss)
