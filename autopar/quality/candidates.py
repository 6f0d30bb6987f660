"""Plans that lose something, and are faster for it: of every lossy strategy and rate, and of every period.

Nothing is lost where nothing is gained: of a candidate's groups, those whose transfer is hidden behind compute anyway
are synchronized exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autopar.cost_models import CostModel
from autopar.errors import AutoparError
from autopar.ir.training_graph import TrainingGraph
from autopar.search.constraints import Constraints
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import FIDELITIES, Fidelity, Plan, SyncGroup
from autopar.strategies import STRATEGIES, Context, strategy_named
from autopar.strategies.lowering import check_options, fidelity_of

PERIODS = (4, 16)
"""Steps from one average of parameters to the next."""
DELAY = 1
WORTH = 0.95
"""A plan that loses something must take at most so much of the time of one that does not."""
HIDDEN = 0.002
"""A group is as good as hidden where the step is slower by at most so much without what it loses."""

PLAIN = "all_reduce"
EXACT, ROUNDED = "exact", "rounded"
"""What the fastest plans are called that lose nothing, or bits alone."""
FROM_STEP = "+from_step="


@dataclass(frozen=True)
class Candidate:
    """A plan, and the name of what it does."""

    name: str
    plan: Plan
    """As it is tried: what it loses, it loses from the first step on, or as soon as it can."""
    training_step_s: float
    """The time of a step as predicted, in the mean over the training, the exact ones included that it begins with."""

    @property
    def step_time_s(self) -> float:
        """As predicted, of a step behind these."""
        return predicted_s(self.plan)


@dataclass(frozen=True)
class Plans:
    """How plans are made and priced; called on rank 0 alone."""

    searched: Callable[[Fidelity], Plan]
    """The best plan of a fidelity."""
    build: Callable[[str], Plan]
    """The plan of a name, as `autopar.plan(strategy=...)` makes it; raises `AutoparError` where the model or the
    optimizer does not allow it."""
    price: Callable[[Plan], Plan]
    """A plan whose groups were changed, with what is predicted of it."""
    training_step_s: Callable[[Plan, int], float]
    """Of a plan, and of how many steps the training has: the predicted seconds of a step, in the mean over all."""

    @classmethod
    def of(
        cls,
        graph: TrainingGraph,
        cluster: ClusterSpec,
        context: Context,
        cost_model: CostModel | None,
        limits: Constraints,
        searched: Callable[[Fidelity], Plan],
    ) -> Plans:
        """For a model on a cluster."""
        from autopar.search import build_plan, price, training_step_s

        return cls(
            searched,
            lambda name: build_plan(name, graph, cluster, context, cost_model=cost_model, constraints=limits),
            lambda plan: price(plan, graph, cluster, context, cost_model=cost_model, constraints=limits),
            lambda plan, steps: training_step_s(plan, graph, cluster, context, steps, cost_model=cost_model),
        )


def predicted_s(plan: Plan) -> float:
    """The step time of a plan that was priced."""
    assert plan.own_prediction is not None
    return plan.own_prediction.step_time_s


def names(context: Context, steps: int) -> Iterator[str]:
    """Plans by name: each strategy that compresses with each rate that it offers, behind the exact steps that it cannot
    do without, unless the training's `steps` are too few for it; all-reduces from time to time; and all-reduces that
    are late."""
    for name, strategy in STRATEGIES.items():
        begins = f"{FROM_STEP}{strategy.first_step}" if strategy.first_step else ""
        for options in strategy.options(context):
            if strategy.fidelity(options) == "compressed" and strategy.exact_steps(options, steps, context) is not None:
                said = ",".join(f"{k}={v}" for k, v in options.model_dump(exclude_defaults=True).items())
                yield (f"{name}({said})" if said else name) + begins
    for bucket in ("ddp", "all_reduce_one_bucket"):
        yield from (f"{bucket}+every={k}" for k in PERIODS)
        yield f"{bucket}+delay={DELAY}"


def priced(context: Context, plans: Plans, steps: int) -> list[Candidate]:
    """The fastest exact plan; the fastest that rounds, where it is worth it; and those that lose more, and are worth it
    beside both, the fastest of these first."""
    exact, rounded = plans.searched("exact"), plans.searched("rounded")
    found = [Candidate(EXACT, exact, predicted_s(exact))]
    if predicted_s(rounded) <= WORTH * predicted_s(exact):
        found.append(Candidate(ROUNDED, rounded, predicted_s(rounded)))
    return [*found, *candidates(context, plans, found[-1].plan, steps)]


def candidates(context: Context, plans: Plans, exact: Plan, steps: int) -> list[Candidate]:
    """All that are worth it over a training of `steps` steps, the fastest first. `exact`: the plan to be faster
    than."""
    found: dict[str, Candidate] = {}  # by what groups say
    limit = WORTH * predicted_s(exact)
    for name in names(context, steps):
        try:
            plan = plans.build(name)
        except AutoparError:
            continue
        if predicted_s(plan) <= limit and not (plan.memory is not None and plan.memory.over_bytes):
            plan = _exact_where_hidden(plan, plans.price, context)
            training_step_s = plans.training_step_s(begun_exactly(plan, steps, context), steps)
            if training_step_s <= limit:
                found.setdefault(repr(plan.groups), Candidate(name.partition(FROM_STEP)[0], plan, training_step_s))
    return sorted(found.values(), key=lambda c: c.training_step_s)


def _exact_where_hidden(plan: Plan, price: Callable[[Plan], Plan], context: Context) -> Plan:
    """The plan, each of whose groups is a plain all-reduce where the step is no slower for it."""
    for i, group in enumerate(plan.groups):
        if not loses(group, context):
            continue
        plain = SyncGroup(strategy=PLAIN, members=group.members)
        groups = (*plan.groups[:i], plain, *plan.groups[i + 1 :])
        changed = price(plan.model_copy(update={"groups": groups}))
        if predicted_s(changed) <= (1 + HIDDEN) * predicted_s(plan):
            plan = changed
    return plan


def loses(group: SyncGroup, context: Context) -> bool:
    """Whether a group is more than rounded."""
    return FIDELITIES.index(fidelity_of((group,), context)) > FIDELITIES.index("rounded")


def begun_exactly(plan: Plan, steps: int, context: Context) -> Plan:
    """The plan, whose lossy groups begin with the exact steps that their strategies ask for in a training of `steps`
    steps."""
    begins = [_begins(g, steps, context) for g in plan.groups]
    each = zip(plan.groups, begins, strict=True)
    return plan.model_copy(update={"groups": tuple(g.model_copy(update={"from_step": s}) if s else g for g, s in each)})


def first_lossy(plan: Plan, steps: int, context: Context) -> int:
    """The first of a training's `steps` in which a plan loses something; 0 where it loses nothing."""
    return min((_begins(g, steps, context) for g in plan.groups if loses(g, context)), default=0)


def _begins(group: SyncGroup, steps: int, context: Context) -> int:
    if not loses(group, context):
        return 0
    strategy = strategy_named(group.strategy)
    return strategy.exact_steps(check_options(strategy, group, context), steps, context) or 0


def exactly(plan: Plan, context: Context) -> tuple[str, ...]:
    """The names of parameters of which a plan loses nothing."""
    lossy = {m.name for g in plan.groups if fidelity_of((g,), context) != "exact" for m in g.members}
    return tuple(sorted({m.name for g in plan.groups for m in g.members} - lossy))


def fastest(found: Sequence[Candidate], most: int) -> list[Candidate]:
    """At most so many, but of each strategy or period at least the fastest, as quality differs more between them than
    between rates."""
    first: dict[str, Candidate] = {}
    for one in found:
        first.setdefault(one.name.partition("(")[0], one)
    kept = list(first.values())[:most]
    rest = [one for one in found if one not in kept]
    return sorted((*kept, *rest[: most - len(kept)]), key=lambda c: c.training_step_s)
