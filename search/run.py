"""Searching a plan, and building a named one: where the rest of autopar comes in."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from autopar.cost_models import AnalyticCostModel, CostModel
from autopar.cost_models.steps import predict_steps
from autopar.errors import InfeasibleError, PlanError
from autopar.formatting import size
from autopar.ir.training_graph import TrainingGraph
from autopar.search.base import Budget, Candidate, Problem, Progress, SearchResult, choose
from autopar.search.builders import MANY_GROUPS, builder_named, names
from autopar.search.evaluate import Evaluator, overflow_bytes
from autopar.search.journal import Journal
from autopar.search.local import LocalSearch
from autopar.search.reasons import Reasons
from autopar.search.searcher import Searcher
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import FIDELITIES, Alternative, Fidelity, Plan, SyncGroup
from autopar.spec.summary import BASELINE
from autopar.spec.topology import topology_of
from autopar.strategies import Context
from autopar.strategies.lowering import fidelity_of

ALWAYS = (BASELINE, "sharded")
"""Seeds that are priced in any case: what plans are compared with, and what takes the least memory."""
SEEDS_SHARE, SEEDS_LEAST_S = 0.6, 0.5
"""Seeds may take this part of a search's time, and these seconds in any case."""
HOPELESS = 0.2
"""Nothing is searched where the leanest seed needs more memory than a device has by more than this part of it."""
EXPLAINED_SHARE = 0.2
"""The part of a search's time that is kept for the runners-up of the plan's groups."""
EXPLAINED_S = 1.0
"""Seconds that may go into them where a plan is priced, and not searched."""
EDITED = " (edited)"
"""Behind the name of a plan that was changed by hand."""


def search(
    graph: TrainingGraph,
    cluster: ClusterSpec,
    context: Context,
    *,
    fidelity: Fidelity = "exact",
    budget: Budget | None = None,
    seed: int = 0,
    cost_model: CostModel | None = None,
    searcher: Searcher | None = None,
    journal: str | Path | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The best plan found for a model on a cluster, within a fidelity and a budget.

    Never predicted slower than the best of the seeds, which are all plans a person would write. The plan holds its
    prediction, those of the seeds, and a reason for each group. `cost_model`: the analytic one, for AdamW, where none
    is given. `journal`: a JSONL file to which every priced plan is appended.

    Raises `InfeasibleError` where no plan fits the devices' memory.
    """
    return search_result(
        graph,
        cluster,
        context,
        fidelity=fidelity,
        budget=budget,
        seed=seed,
        cost_model=cost_model,
        searcher=searcher,
        journal=journal,
        progress=progress,
    ).plan


def search_result(
    graph: TrainingGraph,
    cluster: ClusterSpec,
    context: Context,
    *,
    fidelity: Fidelity = "exact",
    budget: Budget | None = None,
    seed: int = 0,
    cost_model: CostModel | None = None,
    searcher: Searcher | None = None,
    journal: str | Path | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """As `search`, with everything that was priced."""
    problem = _problem(graph, cluster, context, fidelity, cost_model)
    whole = budget or Budget()
    kept_s = EXPLAINED_SHARE * whole.time_s
    with contextlib.ExitStack() as stack:
        log = None
        if journal is not None:
            header = {"model": graph.model.digest, "cluster": cluster.fingerprint.digest, "seed": seed}
            log = stack.enter_context(Journal(journal, fidelity=fidelity, **header))
        evaluate = Evaluator(problem, replace(whole, time_s=whole.time_s - kept_s), log, progress)
        seeds = _seeds(evaluate)
        if context.world_size > 1 and not _hopeless(problem, seeds):
            evaluate.end_of_seeds()
            (searcher or LocalSearch()).search(list({id(s): s for s in seeds.values()}.values()), evaluate, seed=seed)
    fitting = [c for c in evaluate.candidates if c.feasible]
    if not fitting:
        raise InfeasibleError(_does_not_fit(problem, evaluate))
    seed_times = [c.step_time_s for c in seeds.values() if c.feasible]
    best = choose(fitting, min(seed_times, default=float("inf")))
    return SearchResult(_plan(problem, best, seeds, kept_s), tuple(evaluate.candidates))


def build_plan(
    name: str,
    graph: TrainingGraph,
    cluster: ClusterSpec,
    context: Context,
    *,
    fidelity: Fidelity | None = None,
    cost_model: CostModel | None = None,
) -> Plan:
    """The plan of one builder, by name (`ddp`, `PS`, `Parallax`, `zero1+bf16`), priced but not improved.

    Raises `PlanError` with the nearest name for an unknown one, with the reason where the builder's strategy cannot
    be used, and where `fidelity` is given and does not allow the plan.
    """
    problem = _problem(graph, cluster, context, fidelity or "exact", cost_model)
    context = problem.context
    groups = builder_named(name)(graph.parameters, context, cluster)
    used = fidelity_of(groups, context)
    if fidelity is not None and FIDELITIES.index(used) > FIDELITIES.index(fidelity):
        raise PlanError(f"plan '{name}' is '{used}', but only '{fidelity}' is allowed: pass fidelity=\"{used}\"")
    problem = replace(problem, fidelity=used)
    return _plan(problem, _candidate(problem, name, groups), {})


def price(
    plan: Plan, graph: TrainingGraph, cluster: ClusterSpec, context: Context, *, cost_model: CostModel | None = None
) -> Plan:
    """A plan as it is, edited by hand say, with the prediction, the label and the reasons that its groups have, beside
    what DDP would take; on a cluster of as many ranks.

    Raises `PlanMismatchError` where it was made for another model or number of ranks, and `PlanError` where a strategy
    cannot be used as it says.
    """
    plan.check_model(graph.model)
    plan.check_world_size(context.world_size)
    problem = _problem(graph, cluster, context, "exact", cost_model)
    problem = replace(problem, fidelity=fidelity_of(plan.groups, problem.context))
    name = plan.name if plan.priced == plan.basis else plan.name.removesuffix(EDITED) + EDITED
    ddp = builder_named(BASELINE)(graph.parameters, problem.context, cluster)
    return _plan(problem, _candidate(problem, name, plan.groups), {BASELINE: _candidate(problem, BASELINE, ddp)})


def _candidate(problem: Problem, name: str, groups: tuple[SyncGroup, ...]) -> Candidate:
    estimate = predict_steps(problem.cost_model, groups, problem.graph, problem.context, problem.topology)
    return Candidate(name, groups, estimate, overflow_bytes(problem, estimate.peak_memory_bytes))


def _problem(
    graph: TrainingGraph, cluster: ClusterSpec, context: Context, fidelity: Fidelity, cost_model: CostModel | None
) -> Problem:
    if cluster.world_size != context.world_size:
        raise PlanError(
            f"the cluster has {cluster.world_size} ranks ({cluster.summary}), the job has {context.world_size}: "
            "describe the cluster that it runs on"
        )
    if not graph.parameters:
        raise PlanError(f"model '{graph.model.name}' has no trainable parameter: there is nothing to plan")
    return Problem(
        graph, cluster, topology_of(cluster), context.on(cluster), cost_model or AnalyticCostModel(), fidelity
    )


def _seeds(evaluate: Evaluator) -> dict[str, Candidate]:
    """Every builder's plan that is allowed and can be used here, priced; by name. With one rank they are all one.

    The baseline comes first, and those of many groups last, for they take long; where the time is running out, the rest
    is left out."""
    problem = evaluate.problem
    found = names(problem.allows("rounded"), problem.context.late_parameters)
    if problem.context.world_size == 1:
        found = found[:1]
    seeds = {}
    for name in sorted(found, key=lambda name: (name not in ALWAYS, name.split("+")[0] in MANY_GROUPS)):
        if name not in ALWAYS and evaluate.elapsed_s > max(SEEDS_SHARE * evaluate.budget.time_s, SEEDS_LEAST_S):
            break
        candidate = evaluate(name, builder_named(name)(problem.graph.parameters, problem.context, problem.cluster))
        if candidate is not None and (candidate.name == name or "+" not in name):  # a suffix that changes nothing
            seeds[name] = candidate
    return seeds


def _hopeless(problem: Problem, seeds: dict[str, Candidate]) -> bool:
    smallest = min(place.device.memory_bytes.value for place in problem.topology.ranks)
    return bool(seeds) and min(c.overflow_bytes for c in seeds.values()) > HOPELESS * smallest


def _plan(problem: Problem, best: Candidate, seeds: dict[str, Candidate], explained_s: float = EXPLAINED_S) -> Plan:
    ordered = sorted(seeds.items(), key=lambda item: item[1].order)
    made = Plan(
        name=best.name if problem.context.world_size > 1 else "one rank",
        model=problem.graph.model,
        cluster=problem.cluster.fingerprint,
        fidelity=fidelity_of(best.groups, problem.context),
        groups=Reasons(problem).of(best.groups, best.estimate, explained_s),
        recompute=problem.graph.recompute,
        prediction=best.estimate.prediction(),
        alternatives=tuple(
            Alternative(
                name=name,
                prediction=c.estimate.prediction(),
                note="" if c.feasible else f"does not fit: {size(c.overflow_bytes)} more than the device has",
            )
            for name, c in ordered
            if problem.context.world_size > 1
        ),
    )
    return made.model_copy(update={"priced": made.basis})


def _does_not_fit(problem: Problem, evaluate: Evaluator) -> str:
    least = min(evaluate.candidates, key=lambda c: c.order)
    peaks = least.estimate.peak_memory_bytes
    places = problem.topology.ranks
    rank = max(range(len(peaks)), key=lambda r: peaks[r] - places[r].device.memory_bytes.value)
    device = places[rank].device
    graph = problem.graph
    live = max((n.live_bytes for n in graph.compute), default=0)
    advice = ["a smaller batch on each rank (activations shrink with it)", "an optimizer with less state"]
    if not problem.context.has_optimizer:
        advice.append("passing the optimizer, so that its state can be spread over the ranks")
    elif not problem.context.elementwise_update:
        advice.append("an optimizer whose update is elementwise, so that its state can be spread over the ranks")
    advice.append("devices with more memory, or the right figure for it in the cluster description")
    return (
        f"no plan fits: the leanest of {len(evaluate.candidates)} needs {size(peaks[rank])} on rank {rank} "
        f"({device.kind}, {size(device.memory_bytes.value)}), {size(least.overflow_bytes)} too much. Of it, "
        f"{size(graph.parameter_bytes)} are trainable parameters and up to {size(live)} activations. What helps: "
        + "; ".join(advice)
        + ("" if graph.recompute == "none" else ". Activations are computed again in the backward pass already")
    )
