"""What is to be planned, and what a searcher makes of it within a number of evaluations."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.cost_models import AnalyticCostModel, optimizer_cost
from autopar.errors import AutoparWarning, InfeasibleError
from autopar.ir.training_graph import TrainingGraph
from autopar.runtime.compiled import Settings
from autopar.search import Budget, searcher_named
from autopar.search.base import SEARCHED
from autopar.search.run import search_result
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import Fidelity, Plan, Recompute
from autopar.strategies import Context
from autopar.training import Training

EVALUATIONS = 600
"""The budget of every searcher: what `autopar` prices where nothing is said."""


@dataclass(frozen=True)
class Job:
    """One model on one cluster."""

    about: str
    graph: TrainingGraph
    cluster: ClusterSpec
    context: Context
    cost_model: AnalyticCostModel
    fidelity: Fidelity = "exact"


@dataclass(frozen=True)
class Found:
    """What one search found. Times in seconds a step."""

    step_s: float
    """Of the plan that the search returns; infinity where none fits."""
    fastest_s: float
    """Of the fastest plan that was priced and fits: of plans that tie with it, the search returns the simplest."""
    best_seed_s: float
    """Of the fastest plan that a person would write; infinity where none fits."""
    priced: int
    """Plans, seeds included."""
    searched: int
    """Plans that no builder made: what the search itself priced."""
    wall_s: float
    settled: bool
    """Whether the searcher says that no better plan is left; only an exhaustive search does."""
    plan: Plan | None

    @property
    def figures(self) -> dict[str, Any]:
        """All but the plan, as JSON has it."""
        return {name: value for name, value in vars(self).items() if name != "plan"}


def captured(
    about: str,
    model: nn.Module,
    batch: Any,
    loss_fn: Any,
    cluster: ClusterSpec,
    optimizer: Optimizer,
    recompute: Recompute = "none",
    **given: Any,
) -> Job:
    """The job of a model, whose weights are not needed, as `autopar.plan` would have it. `given`: for `Settings`."""
    torch.set_num_threads(1)
    training = Training(model.train(), batch, Settings(loss_fn=loss_fn, **given), optimizer, "step")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoparWarning)  # of batches without values
        graph = training.graph(recompute)
    context = training.context(cluster.world_size, late_parameters=False)
    cost = optimizer_cost(type(optimizer).__name__, optimizer.param_groups[0])
    return Job(about, graph, cluster, context, AnalyticCostModel(cost))


def found(job: Job, searcher: str, evaluations: int = EVALUATIONS, seed: int = 0, time_s: float = 1e9) -> Found:
    """What a searcher finds. Its budget is evaluations; `time_s` only ends what would not end in time."""
    budget = Budget(time_s=time_s, evaluations=evaluations)
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            result = search_result(
                job.graph,
                job.cluster,
                job.context,
                fidelity=job.fidelity,
                budget=budget,
                seed=seed,
                cost_model=job.cost_model,
                searcher=searcher_named(searcher),
            )
        except InfeasibleError:
            return Found(
                float("inf"), float("inf"), float("inf"), 0, 0, time.monotonic() - began, searcher == "exhaustive", None
            )
    cut_short = any("before all was settled" in str(w.message) for w in said)
    plan = result.plan
    assert plan.prediction is not None
    seeds = [a.prediction.step_time_s for a in plan.alternatives if not a.note]
    return Found(
        plan.prediction.step_time_s,
        min((c.step_time_s for c in result.candidates if c.feasible), default=float("inf")),
        min(seeds, default=float("inf")),
        len(result.candidates),
        sum(c.name == SEARCHED for c in result.candidates),
        time.monotonic() - began,
        searcher == "exhaustive" and not cut_short,
        plan,
    )
