"""How fast each method is on each network, and the fastest that kept a budget on other seeds: the best in hindsight.

Speeds are predicted, as those of the choices are (`choices`); what methods lost is in the journal of trainings.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from autopar.cost_models import AnalyticCostModel, CostModel, optimizer_cost
from autopar.errors import AutoparError
from autopar.ir.training_graph import TrainingGraph
from autopar.ops.context import Context
from autopar.quality.candidates import Plans, candidates, predicted_s
from autopar.quality.methods import method_of
from autopar.runtime.compiled import Settings
from autopar.runtime.optimizers.optimizer import context_for, optimizer_scope
from autopar.search import Budget, build_plan, price, search, training_step_s
from autopar.search.constraints import Constraints
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import Fidelity, Plan
from autopar.training import Training
from benchmarks.budget.choices import cluster_of
from benchmarks.budget.methods import EXACT, METHODS
from benchmarks.budget.outcome import Outcome
from benchmarks.budget.tasks import TASKS

ROUNDED = "bf16"
LEAST = 8
"""Lossy methods among which one can be said to be the best."""
SEARCH_S = 10.0
"""More than these models need."""


@dataclass(frozen=True)
class Speeds:
    """Of all methods on a task and a network."""

    by_method: Mapping[str, float]
    """Exact training's time over the method's, over all steps; of methods that the task's optimizer allows."""
    exact_s: float
    """Of the fastest exact plan, the step."""
    exposed: float
    """Of the fastest plan that rounds: which part of its step no compute hides."""


@dataclass(frozen=True)
class Best:
    """The fastest method that kept a budget, in the mean over seeds."""

    method: str
    speed: float
    """Exact training's time over the method's, over all steps."""


def best(task: str, network: str, budget: float, outcomes: Iterable[Outcome]) -> Best | None:
    """The best of a cell; `None` where fewer than `LEAST` lossy methods were trained on the task, or rounding was not.
    `outcomes`: of other seeds than the choice's. Exact training is one of the methods; the fastest plan that rounds
    loses what `bf16` loses."""
    lost: dict[str, list[float | None]] = {}
    for one in outcomes:
        if one.task == task and not METHODS[one.method].other_batches:
            lost.setdefault(one.method, []).append(one.lost)
    if len(lost.keys() - {EXACT.name}) < LEAST or ROUNDED not in lost:
        return None
    kept = [m for m, each in lost.items() if not METHODS[m].own_momentum and mean_of(each) <= budget]
    found = speeds(task, network).by_method
    method = max((EXACT.name, *kept), key=lambda m: found.get(m, 0.0))
    return Best(method, found[method])


def mean_of(lost: Iterable[float | None]) -> float:
    """The mean of what trainings lost; one that ended in no number lost everything."""
    return statistics.fmean(math.inf if one is None else one for one in lost)


def built(task: str, strategy: str) -> Plan:
    """A plan by name, of a task on this machine."""
    graph, context, prices = _captured(task)
    return build_plan(strategy, graph, ClusterSpec.local(TASKS[task].ranks), context, cost_model=prices)


def speed_of(task: str, network: str, plans: Sequence[Plan]) -> float:
    """Exact training's time over that of a training whose equal parts have these plans."""
    graph, context, prices = _captured(task)
    cluster = cluster_of(TASKS[task].ranks, network)
    each = (price(plan, graph, cluster, context, cost_model=prices) for plan in plans)
    return speeds(task, network).exact_s / statistics.fmean(predicted_s(plan) for plan in each)


@cache
def speeds(task: str, network: str) -> Speeds:
    """Of a task on a network, as predicted."""
    of = TASKS[task]
    graph, context, prices = _captured(task)
    cluster, optimizer = cluster_of(of.ranks, network), of.optimizer(of.build(0))

    @cache
    def searched(fidelity: Fidelity) -> Plan:
        budget = Budget(time_s=SEARCH_S)
        return search(graph, cluster, context, fidelity=fidelity, budget=budget, cost_model=prices)

    exact, rounded = searched("exact"), searched("rounded")
    exact_s, rounded_s = predicted_s(exact), predicted_s(rounded)
    variants: dict[str, float] = {}
    plans = Plans.of(graph, cluster, context, prices, Constraints(), searched)
    for one in candidates(context, plans, exact, of.steps):  # the fastest first
        variants.setdefault(method_of(one.plan.groups, context), one.training_step_s)
    found = {EXACT.name: 1.0, ROUNDED: exact_s / rounded_s}
    for method in METHODS.values():
        if method.name in found or method.other_batches or not method.takes(optimizer):
            continue
        try:
            plan = build_plan(method.plan(of.steps, optimizer), graph, cluster, context, cost_model=prices)
            seconds = training_step_s(plan, graph, cluster, context, of.steps, cost_model=prices)
        except AutoparError:  # the model or the optimizer does not allow it
            continue
        if method.probed:  # whose variants a choice may take: they begin no later
            seconds = min(seconds, variants.get(method_of(plan.groups, context), seconds))
        found[method.name] = exact_s / seconds
    assert rounded.own_prediction is not None
    return Speeds(found, exact_s, rounded.own_prediction.exposed_communication_s / rounded_s)


@cache
def _captured(task: str) -> tuple[TrainingGraph, Context, CostModel]:
    """What plans of a task are made of."""
    of = TASKS[task]
    model = of.build(0)
    optimizer = of.optimizer(model)
    graph = Training(model, of.rank_batch(0, 0, 0), Settings(of.loss_fn), optimizer, "step").graph()
    context = context_for(of.ranks, optimizer, optimizer_scope(optimizer), None, True, False)
    return graph, context, AnalyticCostModel(optimizer_cost(type(optimizer).__name__, optimizer.param_groups[0]))
