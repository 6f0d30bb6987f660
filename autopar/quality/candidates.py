"""Plans that lose something, and are faster for it: of every lossy strategy and rate, and of every period.

They are cut into as many groups as are fastest. And nothing is lost where nothing is gained: groups whose transfer is
hidden behind compute anyway are synchronized exactly, and those that the fastest plan without loss has a better way
for, as the rows of tables, go that way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.cost_models import CostModel
from autopar.errors import AutoparError
from autopar.ir.training_graph import TrainingGraph
from autopar.search.constraints import Constraints
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import FIDELITIES, Fidelity, ParameterSlice, Plan, SyncGroup
from autopar.strategies import STRATEGIES, Context, strategy_named
from autopar.strategies.lowering import check_options, fidelity_of

if TYPE_CHECKING:
    from autopar.search import Prices

Groups = tuple[SyncGroup, ...]

PERIODS = (4, 16)
"""Steps from one average of parameters to the next."""
ADAM_PERIODS = (4, 8, 16)
"""The same of replicas whose Adam takes steps as long as exact training's: what they lose grows with these alone. In
few bits, the shortest."""
DELAY = 1
WORTH = 0.95
"""A plan that loses something must take at most so much of the time of one that does not."""
HIDDEN = 0.002
"""Groups are as good as hidden where the step is slower by at most so much without what they lose."""
BUCKETS = (2, 4, 8, 16)
"""Groups of equal size that a plan is cut into."""
STRETCHES = 16
"""Of neighbouring groups of a plan that loses nothing, that are kept as they are, or lose something."""

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
    plain: Callable[[], Plan]
    """All-reduces of all gradients, whatever is pinned or forbidden."""
    price: Callable[[Plan], Plan]
    """A plan whose groups were changed, with what is predicted of it."""
    training_step_s: Callable[[Plan, int], float]
    """Of a plan, and of how many steps the training has: the predicted seconds of a step, in the mean over all."""
    prices: Prices

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
        from autopar.search import Prices, build_plan, price, training_step_s

        return cls(
            searched,
            lambda name: build_plan(name, graph, cluster, context, cost_model=cost_model, constraints=limits),
            lambda: build_plan("ddp", graph, cluster, context, cost_model=cost_model),
            lambda plan: price(plan, graph, cluster, context, cost_model=cost_model, constraints=limits),
            lambda plan, steps: training_step_s(plan, graph, cluster, context, steps, cost_model=cost_model),
            Prices(graph, cluster, context, cost_model, limits),
        )


def predicted_s(plan: Plan) -> float:
    """The step time of a plan that was priced."""
    assert plan.own_prediction is not None
    return plan.own_prediction.step_time_s


def names(context: Context, steps: int) -> Iterator[str]:
    """Plans by name: each strategy that compresses with each rate that it offers, behind the exact steps that it cannot
    do without, unless the training's `steps` are too few for it; averages from time to time; and all-reduces that are
    late."""
    for name, strategy in STRATEGIES.items():
        begins = f"{FROM_STEP}{strategy.first_step}" if strategy.first_step else ""
        for options in strategy.options(context):
            if strategy.fidelity(options) == "compressed" and strategy.exact_steps(options, steps, context) is not None:
                said = ",".join(f"{k}={v}" for k, v in options.model_dump(exclude_defaults=True).items())
                yield (f"{name}({said})" if said else name) + begins
    for bucket in ("ddp", "all_reduce_one_bucket"):
        yield from (f"{bucket}+every={k}" for k in PERIODS)
        yield f"{bucket}+delay={DELAY}"
    yield from (f"local_adam+every={k}" for k in ADAM_PERIODS)
    for wire in ("int8", "int4"):
        yield f"local_adam(wire={wire})+every={ADAM_PERIODS[0]}"


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
    than, which loses nothing but bits."""
    found: dict[str, Candidate] = {}  # by what groups say
    limit, whole = WORTH * predicted_s(exact), _whole(exact.groups)
    for name in names(context, steps):
        try:
            plan = plans.build(name)
        except AutoparError:
            continue
        like = next((g for g in plan.groups if loses(g, context)), None)
        if like is None:
            continue
        cut = _exact_where_hidden(_in_buckets(plan.groups, plans.prices), plans.prices, context)
        groups = min((cut, _mixed(whole, like, plans.prices)), key=plans.prices.step_s)
        if groups != plan.groups:
            plan = plans.price(plan.model_copy(update={"groups": groups}))
        fits = plan.memory is None or not plan.memory.over_bytes
        if predicted_s(plan) <= limit and fits and any(loses(g, context) for g in groups):
            training_step_s = plans.training_step_s(begun_exactly(plan, steps, context), steps)
            if training_step_s <= limit:
                found.setdefault(repr(groups), Candidate(name.partition(FROM_STEP)[0], plan, training_step_s))
    return sorted(found.values(), key=lambda c: c.training_step_s)


def _in_buckets(groups: Groups, prices: Prices) -> Groups:
    """The groups, or their members in the number of groups that is the fastest."""
    return min((groups, *(prices.bucketed(groups, count) for count in BUCKETS)), key=prices.step_s)


def _exact_where_hidden(groups: Groups, prices: Prices, context: Context) -> Groups:
    """The groups, each a plain all-reduce where the step is no slower for it."""
    limit_s = (1 + HIDDEN) * prices.step_s(groups)
    for i, group in enumerate(groups):
        if loses(group, context):
            plain = SyncGroup(strategy=PLAIN, members=group.members)
            changed = (*groups[:i], plain, *groups[i + 1 :])
            groups = changed if prices.step_s(changed) <= limit_s else groups
    return groups


def _whole(groups: Groups) -> Groups:
    """The groups with each parameter whole, in the first of them that has a slice of it: all slices of a parameter lose
    something from the same step on, or nothing."""
    found, seen = list[SyncGroup](), set[str]()
    for group in groups:
        mine = [name for name in dict.fromkeys(m.name for m in group.members) if name not in seen]
        seen.update(mine)
        if mine:
            found.append(group.model_copy(update={"members": tuple(ParameterSlice(name=name) for name in mine)}))
    return tuple(found)


def _mixed(exact: Groups, like: SyncGroup, prices: Prices) -> Groups:
    """The groups of a plan that loses nothing, each of those that can be synchronized as `like` unless the step is no
    slower without; neighbours alike where there are more than `STRETCHES`."""
    groups = prices.switched(exact, like)
    best_s = prices.step_s(groups)
    size = -(-len(exact) // STRETCHES)
    for begin in range(0, len(exact), size):
        own = exact[begin : begin + size]
        if own != groups[begin : begin + size]:
            changed = (*groups[:begin], *own, *groups[begin + size :])
            changed_s = prices.step_s(changed)
            if changed_s <= (1 + HIDDEN) * best_s:
                groups, best_s = changed, min(best_s, changed_s)
    return groups


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
    """At most so many, but of each strategy and period at least the fastest, as quality differs more between them than
    between rates."""
    first: dict[str, Candidate] = {}
    for one in found:
        first.setdefault(re.sub(r"\(.*\)", "", one.name), one)
    kept = list(first.values())[:most]
    rest = [one for one in found if one not in kept]
    return sorted((*kept, *rest[: most - len(kept)]), key=lambda c: c.training_step_s)
