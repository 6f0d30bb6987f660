"""What changes the decision for a plan: its price, and that of the best other plan, under changed circumstances.

    found = sensitivity(plan, graph, context, cost_model=model)
    for outcome in found.outcomes:
        print(outcome.text)         # at half the bandwidth: structured_zero1 would be 12 % faster

A plan rests on figures that may be wrong or may change: the bandwidth, the batch of each rank, the number of hosts. In
each circumstance the plan is priced as it is, beside the plans that a search finds there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost_models import AnalyticCostModel, CostModel
from autopar.cost_models.carried import carried_model
from autopar.errors import InfeasibleError, PlanError
from autopar.formatting import duration, size
from autopar.ir.training_graph import TrainingGraph
from autopar.search.base import SEARCHED, TIE, Budget, Candidate, Problem, executed
from autopar.search.builders import builder_named
from autopar.search.circumstances import AS_IT_IS, Circumstance, LeftOut, circumstances
from autopar.search.constraints import Constraints
from autopar.search.priced_apart import candidate_of
from autopar.search.recorded import constraints_of, lessons_of
from autopar.search.run import search_result
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import OptionValue, Plan, SyncGroup
from autopar.spec.topology import topology_of
from autopar.strategies import Context

BUDGET = Budget(time_s=3.0, evaluations=60)
"""What the search in each circumstance may spend."""
UNTAUGHT = "not decided: trials had a part in the plan, and these prices know nothing of them"
"""The verdict on a circumstance where a price would have to say which plan is the fastest, and cannot."""
CARRIED = "collectives are taken to be as many times slower than the cluster's figures say as was measured"
"""What a price rests on where the calibration is of another cluster."""


@dataclass(frozen=True)
class Outcome:
    """What a plan, and the best other one, would take in one circumstance. Times in seconds a step."""

    name: str
    """`bandwidth x 1/2`."""
    circumstance: str
    """The circumstance in words: `at half the bandwidth`; empty where it was left out."""
    left_out: str = ""
    """Why the circumstance was not priced; empty where it was."""
    step_time_s: float | None = None
    """Step time of the plan in seconds; `None` where one of its strategies cannot be used there."""
    overflow_bytes: int = 0
    """By how much the plan exceeds what it may take of a device's memory there; 0 where it fits."""
    best: str = ""
    """The name of the fastest other plan that fits: a builder's, or `searched`; empty where none fits."""
    best_step_time_s: float | None = None
    best_groups: tuple[SyncGroup, ...] = ()
    written: str = ""
    """The name of the fastest other plan that fits, of those that a person would write; empty where none fits."""
    written_step_time_s: float | None = None
    assumption: str = ""
    """What the circumstance's prices rest on, besides the cost model."""
    is_untaught: bool = False
    """Whether trials had a part in the plan, and what they taught is not in the prices."""

    @property
    def usable(self) -> bool:
        """Whether the plan can be used there, and fits."""
        return self.step_time_s is not None and self.overflow_bytes == 0

    @property
    def lead(self) -> float | None:
        """By which part of the plan's own time the best other plan takes longer; negative where it is faster. `None`
        where one of the two cannot be used."""
        return self._lead(self.best_step_time_s)

    @property
    def changes(self) -> bool:
        """Whether another plan would be chosen: one that is faster by more than a tie, or the only one that fits."""
        if self.left_out or not self.best:
            return False
        return not self.usable or (not self.is_untaught and self.lead is not None and self.lead < -TIE)

    @property
    def verdict(self) -> str:
        """Whether the plan stays the best in the circumstance, in words."""
        if self.left_out:
            return f"not priced: {self.left_out}"
        other = "a plan that a search finds" if self.best == SEARCHED else self.best
        if self.step_time_s is None:
            return f"the plan cannot be used; {other} can" if self.best else "no plan can be used, or fits"
        if self.overflow_bytes:
            lacking = f"the plan needs {size(self.overflow_bytes)} more memory than it may take of a device"
            return f"{lacking}; {other} fits" if self.best else f"{lacking}, and no other plan fits"
        if self.lead is None:
            return "holds: no other plan fits"
        if self.is_untaught:
            return UNTAUGHT
        if self.changes:
            head = "is not the best here" if self.name == AS_IT_IS else "changes"
            return f"{head}: {other} would take {_percent(-self.lead)} less time"
        tied = self.lead <= TIE
        said = f"{other} is as fast" if tied else f"stays the best by {_percent(self.lead)} ({other} is next)"
        lead = self._lead(self.written_step_time_s)
        if lead is not None and self.written != self.best:
            said += f"; of those that a person would write, {self.written} is "
            said += "as fast" if lead <= TIE else f"next, by {_percent(lead)}"
        return f"holds: {said}"

    @property
    def text(self) -> str:
        """The outcome in one sentence."""
        head = self.circumstance or self.name
        if self.step_time_s is None:
            return f"{head}: {self.verdict}"
        return f"{head}: {duration(self.step_time_s)}; {self.verdict}"

    def _lead(self, other_s: float | None) -> float | None:
        """By which part of the plan's own time one that takes `other_s` seconds a step takes longer."""
        if not self.usable or other_s is None or not self.step_time_s:
            return None
        return other_s / self.step_time_s - 1


@dataclass(frozen=True)
class Sensitivity:
    """A plan under changed circumstances."""

    digest: str
    """The plan's digest."""
    outcomes: tuple[Outcome, ...]
    """What the plan would take in each circumstance; the first is the one in which nothing is changed."""

    @property
    def is_untaught(self) -> bool:
        """Whether trials had a part in the plan, and what they taught is not in the prices."""
        return any(outcome.is_untaught for outcome in self.outcomes)

    @property
    def changing(self) -> tuple[Outcome, ...]:
        """The outcomes in which another plan would be chosen."""
        return tuple(outcome for outcome in self.outcomes if outcome.changes)


def sensitivity(
    plan: Plan,
    graph: TrainingGraph,
    context: Context,
    *,
    cost_model: CostModel | None = None,
    budget: Budget = BUDGET,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Sensitivity:
    """What would be decided with the bandwidth, the batch of each rank and the number of hosts halved and doubled.

    graph: of the model that the plan is for, as captured.
    context: what strategies may depend on; its number of ranks is that of the plan's cluster.
    cost_model: the one that priced the plan; the analytic one, for AdamW, where none is given. What it was measured on
        the plan's cluster is carried over (`autopar.cost_models.carried`). Where trials had a part in the plan, it has
        to have learned from them, or nothing is said of which plan is the best.
    budget: for the search in each circumstance, of plans of the same fidelity, with the plan's own constraints.
    progress: is told which circumstance comes next.

    Raises `PlanMismatchError` where the plan is of another model or number of ranks.
    """
    plan.check_model(graph.model)
    plan.check_world_size(context.world_size)
    cluster = plan.cluster.cluster
    late = any(g.options.get("late") for g in plan.groups)
    context = replace(context, late_parameters=late)
    model = cost_model or AnalyticCostModel()
    outcomes = []
    for place in circumstances(cluster, graph):
        if isinstance(place, LeftOut):
            outcomes.append(Outcome(place.name, "", left_out=place.why))
            continue
        if progress is not None:
            progress(place.text)
        outcomes.append(_outcome(plan, cluster, place, context, model, budget, seed))
    return Sensitivity(plan.digest, tuple(outcomes))


def _outcome(
    plan: Plan, cluster: ClusterSpec, place: Circumstance, context: Context, model: CostModel, budget: Budget, seed: int
) -> Outcome:
    there = place.cluster
    n = there.world_size
    context = replace(context, world_size=n, hosts=(), rates=(), servers=())
    problem = Problem(
        place.graph,
        there,
        topology_of(there),
        context.on(there),
        model if place.name == AS_IT_IS else carried_model(model, cluster, there, float(place.batch)),
        plan.fidelity,
        _constraints(plan, n),
    )
    try:
        problem.rules.admit(())
    except PlanError as e:
        return Outcome(place.name, "", left_out=str(e))
    own = _own(plan, cluster, problem)
    others: Sequence[Candidate] = ()
    with contextlib.suppress(InfeasibleError):
        others = search_result(
            problem.graph,
            there,
            context,
            fidelity=plan.fidelity,
            constraints=problem.constraints,
            budget=budget,
            seed=seed,
            cost_model=problem.cost_model,
        ).candidates
    best, written = _fastest(others, own)
    carried = is_calibrated(model) and there != cluster
    return Outcome(
        name=place.name,
        circumstance=place.text,
        step_time_s=float(own.step_time_s) if own else None,
        overflow_bytes=own.overflow_bytes if own else 0,
        best=best.name if best else "",
        best_step_time_s=float(best.step_time_s) if best else None,
        best_groups=best.groups if best else (),
        written=written.name if written else "",
        written_step_time_s=float(written.step_time_s) if written else None,
        assumption="; ".join(a for a in (place.assumption, CARRIED if carried else "") if a),
        is_untaught=plan.is_taught and not lessons_of(model),
    )


def _constraints(plan: Plan, world_size: int) -> Constraints:
    """What was asked for when the plan was made, on another number of ranks."""
    asked = constraints_of(plan)
    pins = tuple(replace(pin, options=_options_on(pin.options, world_size)) for pin in asked.pins)
    return replace(asked, pins=pins)


def _fastest(others: Sequence[Candidate], own: Candidate | None) -> tuple[Candidate | None, Candidate | None]:
    """The fastest other plan that fits, and the fastest of those that a person would write: to one that a search finds
    near it, a plan that holds hardly ever has a lead."""
    mine = own and executed(own.groups)
    fitting = [c for c in others if c.feasible and executed(c.groups) != mine]
    fitting.sort(key=lambda c: (c.step_time_s, c.name == SEARCHED, len(c.groups)))
    return next(iter(fitting), None), next((c for c in fitting if c.name != SEARCHED), None)


def _own(plan: Plan, cluster: ClusterSpec, problem: Problem) -> Candidate | None:
    """The plan, priced in another circumstance; `None` where a strategy cannot be used there."""
    n = problem.context.world_size
    groups = plan.groups
    try:
        if n != plan.cluster.world_size:
            groups = _built(plan, cluster, problem) or tuple(_on(g, n) for g in groups)
        return candidate_of(problem, plan.name, groups)
    except PlanError:
        return None


def _built(plan: Plan, cluster: ClusterSpec, problem: Problem) -> tuple[SyncGroup, ...]:
    """What the builder of the plan's name makes of another number of ranks; nothing where no builder made the plan."""
    try:
        build = builder_named(plan.name)
        before = replace(problem.context, world_size=plan.cluster.world_size).on(cluster)
        if executed(build(problem.graph.parameters, before, cluster)) != executed(plan.groups):
            return ()
        return build(problem.graph.parameters, problem.context, problem.cluster)
    except PlanError:
        return ()


def _on(group: SyncGroup, world_size: int) -> SyncGroup:
    """The group on another number of ranks."""
    return group.model_copy(update={"options": _options_on(group.options, world_size)})


def _options_on(options: Mapping[str, OptionValue], world_size: int) -> dict[str, OptionValue]:
    """Options on another number of ranks: owners that are not there are others, and shares are even."""
    found = {k: v for k, v in options.items() if k != "shares"}
    if "owner" in found:
        found["owner"] = int(found["owner"]) % world_size  # type: ignore[arg-type]
    return found


def is_calibrated(model: CostModel) -> bool:
    """Whether a cost model rests on what was measured on one cluster."""
    base = getattr(model, "base", model)
    return getattr(base, "calibration", None) is not None


def _percent(part: float) -> str:
    return f"{100 * part:.2g} %" if part < 0.1 else f"{100 * part:.0f} %"
