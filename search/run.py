"""Searching a plan, and building a named one: where the rest of autopar comes in."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autopar.cost_models import AnalyticCostModel, CostModel
from autopar.cost_models.steps import mean_step_s
from autopar.errors import InfeasibleError, PlanError
from autopar.formatting import size
from autopar.ir.garbage import among_new_alone
from autopar.ir.training_graph import TrainingGraph
from autopar.search.base import Budget, Candidate, Problem, Progress, SearchResult, choose
from autopar.search.builders import builder_named
from autopar.search.constraints import NONE, Constraints
from autopar.search.evaluate import Evaluator, overflow_bytes
from autopar.search.infeasible import NoPlanFits, named_does_not_fit
from autopar.search.journal import Journal, known
from autopar.search.memory_use import memory_use
from autopar.search.moves import Choice, Neighbourhood
from autopar.search.priced_apart import baselines, beside, candidate_of
from autopar.search.reasons import Reasons
from autopar.search.recorded import constraints_of, lessons_of, recorded_pins
from autopar.search.searchers import DEFAULT, Searcher, searcher_named
from autopar.search.seeds import built, is_hopeless, named, seeds_of
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import FIDELITIES, Alternative, Fidelity, Plan, SyncGroup
from autopar.spec.summary import BASELINE
from autopar.spec.topology import topology_of
from autopar.strategies import Context
from autopar.strategies.lowering import fidelity_of

EXPLAINED_SHARE, EXPLAINED_MOST_S = 0.2, 20.0
"""The part of a search's time that is kept for the runners-up of the plan's groups, and the most seconds of it."""
EXPLAINED_S = 1.0
"""Seconds that may go into them where a plan is priced, and not searched."""
EDITED = " (edited)"
"""Ends the name of a plan that was changed by hand."""


def search(
    graph: TrainingGraph,
    cluster: ClusterSpec,
    context: Context,
    *,
    fidelity: Fidelity = "exact",
    constraints: Constraints = NONE,
    budget: Budget | None = None,
    seed: int = 0,
    cost_model: CostModel | None = None,
    searcher: Searcher | None = None,
    journal: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """The best plan found for a model on a cluster, within a fidelity and a budget.

    Never predicted slower than the best of the seeds, which are all plans a person would write. The plan holds its
    prediction, those of the seeds, and a reason for each group. `cost_model`: the analytic one, for AdamW, where none
    is given. `searcher`: the default one, which combines the others. `journal`: a JSONL file to which every priced plan
    is appended; with `resume`, plans that the same search has priced there before are not priced again, so that one
    that was cut short ends as it would have ended.

    Raises `InfeasibleError` where no plan fits the devices' memory. Where one fits, but none that leaves as much of it
    free as `constraints` say, the leanest is returned: `plan.memory.short_bytes` says by how much.
    """
    return search_result(
        graph,
        cluster,
        context,
        fidelity=fidelity,
        constraints=constraints,
        budget=budget,
        seed=seed,
        cost_model=cost_model,
        searcher=searcher,
        journal=journal,
        resume=resume,
        progress=progress,
    ).plan


@among_new_alone()
def search_result(
    graph: TrainingGraph,
    cluster: ClusterSpec,
    context: Context,
    *,
    fidelity: Fidelity = "exact",
    constraints: Constraints = NONE,
    budget: Budget | None = None,
    seed: int = 0,
    cost_model: CostModel | None = None,
    searcher: Searcher | None = None,
    journal: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    starts: Sequence[Candidate] = (),
) -> SearchResult:
    """Searches as `search` does; returns all plans that were priced, too. `starts`: other plans to begin with, which
    are priced anew."""
    problem = _problem(graph, cluster, context, fidelity, cost_model, constraints)
    apart = baselines(problem)
    if progress is not None and apart:
        progress = beside(progress, apart[BASELINE])
    whole, searcher = budget or Budget(), searcher or searcher_named(DEFAULT)
    kept_s = min(EXPLAINED_SHARE * whole.time_s, EXPLAINED_MOST_S)
    with contextlib.ExitStack() as stack:
        log = None
        header = _header(problem, searcher, whole, seed)
        before = known(journal, context.world_size, **header) if journal is not None and resume else None
        if journal is not None:
            log = stack.enter_context(Journal(journal, **header))
        evaluate = Evaluator(problem, replace(whole, time_s=whole.time_s - kept_s), log, progress)
        if before is not None:
            evaluate.resume(before)
        seeds, lean, left_out = seeds_of(evaluate)
        further = [c for c in (evaluate(start.name, start.groups) for start in starts) if c is not None] + lean
        if context.world_size > 1 and not is_hopeless(evaluate):
            evaluate.end_of_seeds()
            searcher.search(list({id(s): s for s in (*seeds.values(), *further)}.values()), evaluate, seed=seed)
    candidates = (*evaluate.candidates, *evaluate.unasked)
    fitting = [c for c in candidates if c.feasible]
    if not fitting:
        leanest = min(candidates, key=lambda c: c.order)
        evaluate.check(leanest)
        if overflow_bytes(problem, leanest.estimate.peak_memory_bytes, reserved=False):
            raise NoPlanFits(problem, candidates)
        plan = _plan(problem, leanest, seeds | apart, left_out)
        return SearchResult(plan, candidates, problem, seeds, apart, leanest)
    seed_times = [c.step_time_s for c in seeds.values() if c.feasible]
    best = choose(fitting, min(seed_times, default=float("inf")))
    evaluate.check(best)
    plan = _plan(problem, best, seeds | apart, left_out, kept_s)
    return SearchResult(plan, candidates, problem, seeds, apart, best)


def plan_of(found: SearchResult, candidate: Candidate) -> Plan:
    """The plan of another candidate of a search, with its reasons."""
    if candidate is found.chosen:
        return found.plan
    return _plan(found.problem, candidate, found.seeds | found.baselines, found.plan.left_out)


def search_again(
    found: SearchResult,
    cost_model: CostModel,
    starts: Sequence[Candidate],
    budget: Budget,
    *,
    searcher: Searcher | None = None,
    seed: int = 0,
) -> SearchResult:
    """Searches the same problem with what the cost model has learned since, from other plans as well. Plans are named
    as before."""
    of = found.problem
    return search_result(
        of.graph,
        of.cluster,
        of.context,
        fidelity=of.fidelity,
        constraints=of.constraints,
        budget=budget,
        seed=seed,
        cost_model=cost_model,
        searcher=searcher,
        starts=starts,
    )


def build_plan(
    name: str,
    graph: TrainingGraph,
    cluster: ClusterSpec,
    context: Context,
    *,
    fidelity: Fidelity | None = None,
    cost_model: CostModel | None = None,
    constraints: Constraints = NONE,
) -> Plan:
    """The plan of one builder, by name (`ddp`, `PS`, `Parallax`, `zero1+bf16`), priced but not improved.
    It may not fit the devices: `plan.memory.over_bytes` says by how much. Pinned parameters go by their pins; the plan
    is then called `ddp (pinned)`.

    Raises `PlanError` with the nearest name for an unknown one, with the reason where the builder's strategy cannot
    be used, and where `fidelity` is given and does not allow the plan; `InfeasibleError` where it is forbidden.
    """
    problem = _problem(graph, cluster, context, fidelity or FIDELITIES[-1], cost_model, constraints)
    said, groups = named(problem, name)
    if forbidden := problem.rules.forbidden_in(groups):
        raise InfeasibleError(
            f"plan '{name}' uses {', '.join(forbidden)}, which is forbidden: allow it, or take another strategy"
        )
    used = fidelity_of(groups, problem.context)
    if fidelity is not None and FIDELITIES.index(used) > FIDELITIES.index(fidelity):
        raise PlanError(
            f"plan '{name}' is '{used}', but only '{fidelity}' is allowed: pass fidelity=\"{used}\", or --fidelity "
            f"{used}"
        )
    problem = replace(problem, fidelity=used)
    return _plan(problem, candidate_of(problem, said, groups), {})


def price(
    plan: Plan,
    graph: TrainingGraph,
    cluster: ClusterSpec,
    context: Context,
    *,
    cost_model: CostModel | None = None,
    constraints: Constraints = NONE,
) -> Plan:
    """A plan as it is, edited by hand say, with the prediction, the label and the reasons that its groups have, beside
    what DDP would take; on a cluster of as many ranks. Pins and forbidden strategies change nothing; those that the
    plan records, it keeps as long as it goes by them.

    Raises `PlanMismatchError` where it was made for another model or number of ranks, and `PlanError` where a strategy
    cannot be used as it says.
    """
    plan.check_model(graph.model)
    plan.check_world_size(context.world_size)
    before = constraints_of(plan)
    kept = replace(constraints, pins=before.pins, forbidden=before.forbidden)
    problem = _problem(graph, cluster, context, "exact", cost_model, kept)
    problem = replace(problem, fidelity=fidelity_of(plan.groups, problem.context))
    if not replace(problem, fidelity=FIDELITIES[-1]).rules.admit(plan.groups):
        problem = replace(problem, constraints=replace(kept, pins=(), forbidden=frozenset()))
    name = plan.name if plan.priced == plan.basis else plan.name.removesuffix(EDITED) + EDITED
    ddp = builder_named(BASELINE)(graph.parameters, problem.context, cluster)
    return _plan(problem, candidate_of(problem, name, plan.groups), {BASELINE: candidate_of(problem, BASELINE, ddp)})


def training_step_s(
    plan: Plan,
    graph: TrainingGraph,
    cluster: ClusterSpec,
    context: Context,
    steps: int,
    *,
    cost_model: CostModel | None = None,
) -> float:
    """Seconds of a plan's step, in the mean over a training of `steps` steps, those before groups begin included."""
    of = _problem(graph, cluster, context, FIDELITIES[-1], cost_model)
    return mean_step_s(of.cost_model, plan.groups, of.graph, of.context, of.topology, steps)


class Prices:
    """Step times of plans of one job, which differ in their groups alone."""

    def __init__(
        self,
        graph: TrainingGraph,
        cluster: ClusterSpec,
        context: Context,
        cost_model: CostModel | None = None,
        constraints: Constraints = NONE,
    ) -> None:
        self._problem = _problem(graph, cluster, context, FIDELITIES[-1], cost_model, constraints)
        self._near = Neighbourhood(self._problem)

    def step_s(self, groups: tuple[SyncGroup, ...]) -> float:
        """Predicted seconds; infinite where a strategy cannot synchronize such groups, or a device has too little
        memory."""
        try:
            found = candidate_of(self._problem, "", groups)
        except PlanError:
            return float("inf")
        over = overflow_bytes(self._problem, found.estimate.peak_memory_bytes, reserved=False)
        return float("inf") if over else found.step_time_s

    def bucketed(self, groups: tuple[SyncGroup, ...], count: int) -> tuple[SyncGroup, ...]:
        """The members of the groups in about so many groups of equal size, each synchronized as before."""
        return self._near.rebucketed(groups, max(1, self._near.bytes_total // count))

    def switched(self, groups: tuple[SyncGroup, ...], like: SyncGroup) -> tuple[SyncGroup, ...]:
        """Those of the groups that can be synchronized as another one is, so synchronized; the others as before."""
        choice = Choice(like.strategy, like.options)
        return tuple(
            choice.of(group).model_copy(update=like.timing) if self._near.possible(choice, group) else group
            for group in groups
        )


def infeasible(
    name: str,
    graphs: Sequence[TrainingGraph],
    cluster: ClusterSpec,
    context: Context,
    *,
    cost_model: CostModel | None = None,
    constraints: Constraints = NONE,
) -> InfeasibleError:
    """Says why the plan of one builder, by name, does not fit, and with which change it would. `graphs`: the model's,
    then with ever more of the activations computed again, with which it does not fit either."""
    problems = [_problem(g, cluster, context, FIDELITIES[-1], cost_model, constraints) for g in graphs]
    return InfeasibleError(named_does_not_fit(problems, candidate_of(problems[0], name, built(problems[0], name))))


def _problem(
    graph: TrainingGraph,
    cluster: ClusterSpec,
    context: Context,
    fidelity: Fidelity,
    cost_model: CostModel | None,
    constraints: Constraints = NONE,
) -> Problem:
    if cluster.world_size != context.world_size:
        raise PlanError(
            f"the cluster has {cluster.world_size} ranks ({cluster.summary}), the job has {context.world_size}: "
            "describe the cluster that it runs on"
        )
    if not graph.parameters:
        raise PlanError(f"model '{graph.model.name}' has no trainable parameter: there is nothing to plan")
    model = cost_model or AnalyticCostModel()
    return Problem(graph, cluster, topology_of(cluster), context.on(cluster), model, fidelity, constraints)


def _header(problem: Problem, searcher: Searcher, budget: Budget, seed: int) -> dict[str, object]:
    """What tells a search from others in a journal. Prices are compared apart, by some of its plans."""
    taught = lessons_of(problem.cost_model)
    return {
        "model": problem.graph.model.digest,
        "cluster": problem.cluster.fingerprint.digest,
        "fidelity": problem.fidelity,
        "memory_reserve": problem.constraints.memory_reserve,
        "pins": [str(pin) for pin in problem.constraints.pins],
        "forbidden": sorted(problem.constraints.forbidden),
        "late_parameters": problem.context.late_parameters,
        "recompute": problem.graph.recompute,
        "searcher": type(searcher).__name__,
        "evaluations": budget.evaluations,
        "seed": seed,
        **({"lessons": hashlib.sha256(repr(taught).encode()).hexdigest()[:16]} if taught else {}),
    }


def _plan(
    problem: Problem,
    best: Candidate,
    seeds: dict[str, Candidate],
    left_out: tuple[str, ...] = (),
    explained_s: float = EXPLAINED_S,
) -> Plan:
    ordered = sorted(seeds.items(), key=lambda item: item[1].order)
    made = Plan(
        name=best.name if problem.context.world_size > 1 else "one rank",
        model=problem.graph.model,
        cluster=problem.cluster.fingerprint,
        fidelity=fidelity_of(best.groups, problem.context),
        groups=Reasons(problem).of(best.groups, best.estimate, explained_s),
        recompute=problem.graph.recompute,
        prediction=best.estimate.prediction(),
        memory=memory_use(problem, best),
        alternatives=tuple(
            Alternative(
                name=name,
                prediction=c.estimate.prediction(),
                note=_note(problem, c),
            )
            for name, c in ordered
            if problem.context.world_size > 1
        ),
        left_out=left_out,
        pins=recorded_pins(problem.constraints),
        forbidden=tuple(sorted(problem.constraints.forbidden)),
        lessons=len(lessons_of(problem.cost_model)),
    )
    return made.model_copy(update={"priced": made.basis})


def _note(problem: Problem, candidate: Candidate) -> str:
    """Says of a plan that is not chosen why it could not be; empty where it could."""
    if not problem.rules.admit(candidate.groups):
        return "priced for comparison alone: it does not keep to what was pinned or forbidden"
    over = overflow_bytes(problem, candidate.estimate.peak_memory_bytes, reserved=False)
    if over:
        return f"does not fit: {size(over)} more than the device has"
    if candidate.overflow_bytes:
        return f"leaves {size(candidate.overflow_bytes)} less memory free than is to be kept free"
    return ""
