"""Pilots: longer trainings of copies of the user's job, judged by the user's own metric."""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import SpecError
from autopar.quality.budget import Metric, stream_kept
from autopar.quality.probe import Job
from autopar.runtime.job.process_group import Rendezvous
from autopar.spec.plan import Plan

_FAILED = "failed: "


@dataclass(frozen=True)
class Piloted:
    """What a pilot came to."""

    metric: float
    lost: float
    """Of what the exact pilot gained over the model that pilots begin with; infinite where the metric is no number."""


class Pilots:
    """An exact pilot, and one more on other batches, which shows what chance does; plans are compared with them. By all
    ranks together."""

    def __init__(
        self, job: Job, exact: Plan, batches: Sequence[Any], steps: int, metric: Metric, higher_is_better: bool
    ) -> None:
        """`batches`: of this rank, at least twice as many as there are steps."""
        self._job, self._metric, self._sign = job, metric, 1 if higher_is_better else -1
        self._batches, others = batches[:steps], batches[steps : 2 * steps]
        if all(map(operator.is_, self._batches, others)):  # they are gone through again: then in another order
            others = [*others[steps // 2 :], *others[: steps // 2]]
        self.start = self._judged(job.copy())
        self.exact = self._trained(exact, self._batches)
        self.other = self._trained(exact, others)
        if not all(map(math.isfinite, (self.start, self.exact, self.other))):
            raise SpecError(
                f"the quality budget's metric is {self.start} before exact training, and {self.exact} and {self.other} "
                f"after {steps} steps of it: expected numbers, on every rank"
            )

    @property
    def gained(self) -> bool:
        """Whether exact training made the metric better; else pilots are too short to say anything."""
        return self._sign * (self.exact - self.start) > 0

    @property
    def chance(self) -> float:
        """What the second exact pilot differs by from the first, in what that gained; infinite where that is
        nothing."""
        return abs(self._lost(self.other))

    def of(self, plan: Plan) -> Piloted:
        """Trains a copy with the plan."""
        metric = self._trained(plan, self._batches)
        return Piloted(metric, self._lost(metric))

    def _lost(self, metric: float) -> float:
        is_known = math.isfinite(metric) and self.gained
        return (self.exact - metric) / (self.exact - self.start) if is_known else math.inf

    def _trained(self, plan: Plan, batches: Sequence[Any]) -> float:
        job = self._job.copy()
        program = job.program(plan)
        for batch in batches:
            program.step(batch)
        with program.evaluation():
            return self._judged(job)

    def _judged(self, job: Job) -> float:
        """The mean of what the ranks find. Replicas that are apart between averages are averaged before."""
        parameters = [p for group in job.optimizer.param_groups for p in group["params"]]
        training = job.model.training
        job.model.eval()
        with torch.no_grad():
            for parameter, value in zip(parameters, job.means(parameters), strict=True):
                parameter.copy_(value)
            with job.shown_in_users_loss():
                found = self._found(job)
        job.model.train(training)
        return statistics.fmean(found)

    def _found(self, job: Job) -> list[float]:
        """The metric of each rank. Raises where it fails on one of them, on all of them."""
        failure: Exception | None = None
        try:
            with stream_kept(job.device):
                mine = repr(float(self._metric(job.model)))
        except Exception as e:  # whatever the user's function raises
            failure, mine = e, f"{type(e).__name__}: {e}"
        each = Rendezvous(job.group).exchange("metric", f"{'' if failure is None else _FAILED}{mine}")
        if failure is not None:
            raise failure
        failed = next((rank for rank, text in enumerate(each) if text.startswith(_FAILED)), None)
        if failed is not None:
            raise SpecError(
                f"the quality budget's metric fails on rank {failed}: {each[failed].removeprefix(_FAILED)}. Every rank "
                "evaluates the whole, or a part of its own, and returns a number"
            )
        return [float(text) for text in each]
