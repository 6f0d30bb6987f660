"""Plans that lose something, and are faster for it: of every lossy strategy and rate, and of every period.

Nothing is lost where nothing is gained: of a candidate's groups, those whose transfer is hidden behind compute anyway
are synchronized exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autopar.errors import AutoparError
from autopar.spec.plan import FIDELITIES, Plan, SyncGroup
from autopar.strategies import STRATEGIES, Context
from autopar.strategies.lowering import fidelity_of

PERIODS = (4, 16)
"""Steps from one average of parameters to the next."""
DELAY = 1
WORTH = 0.95
"""A plan that loses something must take at most so much of the time of one that does not."""
HIDDEN = 0.002
"""A group is as good as hidden where the step is slower by at most so much without what it loses."""

PLAIN = "all_reduce"


@dataclass(frozen=True)
class Candidate:
    """A plan, and the name of what it does."""

    name: str
    plan: Plan

    @property
    def step_time_s(self) -> float:
        """As predicted, of a step behind the exact ones that it may begin with."""
        return predicted_s(self.plan)


def predicted_s(plan: Plan) -> float:
    """The step time of a plan that was priced."""
    assert plan.own_prediction is not None
    return plan.own_prediction.step_time_s


def names(context: Context) -> Iterator[str]:
    """Plans by name: each strategy that compresses with each rate that it offers, all-reduces from time to time, and
    all-reduces that are late."""
    for name, strategy in STRATEGIES.items():
        for options in strategy.options(context):
            if strategy.fidelity(options) == "compressed":
                said = ",".join(f"{k}={v}" for k, v in options.model_dump(exclude_defaults=True).items())
                yield f"{name}({said})" if said else name
    for bucket in ("ddp", "all_reduce_one_bucket"):
        yield from (f"{bucket}+every={k}" for k in PERIODS)
        yield f"{bucket}+delay={DELAY}"


def candidates(
    context: Context, build: Callable[[str], Plan], price: Callable[[Plan], Plan], exact: Plan
) -> list[Candidate]:
    """All that are worth it, the fastest first.

    Args:
        build: makes a priced plan of a name; raises `AutoparError` where the model or the optimizer does not allow it.
        price: prices a plan whose groups were changed.
        exact: the plan to be faster than.
    """
    found: dict[str, Candidate] = {}  # by what groups say
    limit = WORTH * predicted_s(exact)
    for name in names(context):
        try:
            plan = build(name)
        except AutoparError:
            continue
        if predicted_s(plan) <= limit and not (plan.memory is not None and plan.memory.over_bytes):
            plan = _exact_where_hidden(plan, price, context)
            found.setdefault(repr(plan.groups), Candidate(name, plan))
    return sorted(found.values(), key=lambda c: c.step_time_s)


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
    """The plan, whose lossy groups are exact in the first steps."""
    groups = (g.model_copy(update={"from_step": steps}) if loses(g, context) else g for g in plan.groups)
    return plan.model_copy(update={"groups": tuple(groups)})


def fastest(found: Sequence[Candidate], most: int) -> list[Candidate]:
    """At most so many, but of each strategy or period at least the fastest, as quality differs more between them than
    between rates."""
    first: dict[str, Candidate] = {}
    for one in found:
        first.setdefault(one.name.partition("(")[0], one)
    kept = list(first.values())[:most]
    rest = [one for one in found if one not in kept]
    return sorted((*kept, *rest[: most - len(kept)]), key=lambda c: c.step_time_s)
