"""The plans that a search begins with: those that a person would write, and leaner ones where memory is short."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.search.base import SEARCHED, Candidate, Problem
from autopar.search.builders import MANY_GROUPS, builder_named, names
from autopar.search.builders.common import issue_order
from autopar.search.evaluate import Evaluator
from autopar.search.moves import choices
from autopar.spec.plan import SyncGroup
from autopar.spec.summary import BASELINE
from autopar.strategies import strategy_named

ALWAYS = (BASELINE, "sharded")
"""Seeds that are priced in any case: what plans are compared with, and what takes the least memory."""
SEEDS_SHARE, SEEDS_LEAST_S = 0.6, 0.5
"""Seeds may take this part of a search's time, and these seconds in any case; those of many groups, which take long,
begin in the first half of both."""
LEAN = ("sharded", "PartitionedPS", "zero1")
"""Seeds that take less memory with a group for each parameter, as less is gathered, or packed, at a time. Where nothing
fits, they are tried in turn, until one spreads parameters over the ranks, or fits."""
SHARED_OUT = "column_parallel"
"""The builder that shares out tables, heads and linear layers."""
PINNED = " (pinned)"
"""Ends the name of a builder's plan that pins have changed, so that it never passes for the plan of that name."""
HOPELESS = 0.2
"""Nothing is searched where the leanest plan, `LEAN` included, needs more memory on a rank than its device has by more
than this part of it."""


def seeds_of(evaluate: Evaluator) -> tuple[dict[str, Candidate], list[Candidate], tuple[str, ...]]:
    """Every builder's plan that is allowed and can be used here, priced, by name; leaner ones where memory is short;
    and the names of those left out. With one rank they are all one.

    The baseline comes first, and those of many groups last, for they take long; where the time is running out, the rest
    is left out, as it is where none can fit."""
    problem = evaluate.problem
    found = names(problem.allows("rounded"), problem.context.late_parameters)
    if problem.context.world_size == 1:
        found = found[:1]
    seeds: dict[str, Candidate] = {}
    found = sorted(found, key=lambda name: (name not in ALWAYS, name.split("+")[0] in MANY_GROUPS))
    left_out: list[str] = []
    lean: list[Candidate] = []
    for place, name in enumerate(found):
        if place == len(ALWAYS):
            lean = _lean(evaluate)
        part = 0.5 if name.split("+")[0] in MANY_GROUPS else 1.0
        used_up = evaluate.elapsed_s > part * max(SEEDS_SHARE * evaluate.budget.time_s, SEEDS_LEAST_S)
        if name not in ALWAYS and (used_up or evaluate.budget.stop.is_set() or is_hopeless(evaluate)):
            left_out = found[place:]
            break
        said, groups = named(problem, name)
        candidate = evaluate(said, groups)
        if candidate is not None and (candidate.name == said or "+" not in name):  # a suffix that changes nothing
            seeds[said] = candidate
    if not seeds:  # each of them uses a strategy that is forbidden
        offered = {strategy: found[0].options for strategy, found in choices(problem).items()}
        candidate = evaluate(SEARCHED, problem.rules.allowed(offered))
        seeds |= {SEARCHED: candidate} if candidate is not None else {}
    return seeds, lean, tuple(left_out)


def _lean(evaluate: Evaluator) -> list[Candidate]:
    """Plans of `LEAN`, where nothing fits that is priced so far; then, where nothing fits still, the same with tables,
    heads and linear layers shared out over the ranks, of which none has to gather them."""
    found = _spreading(evaluate, ())
    shared = () if _fits(evaluate) else _shared_out(evaluate.problem)
    return found + _spreading(evaluate, shared) if shared else found


def _spreading(evaluate: Evaluator, shared: tuple[SyncGroup, ...]) -> list[Candidate]:
    """Plans of `LEAN` for the parameters that are in none of the `shared` groups, beside these."""
    found: list[Candidate] = []
    names = {m.name for g in shared for m in g.members}
    for name in LEAN:
        if _fits(evaluate) or evaluate.budget.stop.is_set():
            break
        members = ((g, m) for g in built(evaluate.problem, name) for m in g.members if m.name not in names)
        rest = [g.model_copy(update={"members": (m,)}) for g, m in members]
        candidate = evaluate(SEARCHED, issue_order((*shared, *rest), evaluate.problem.graph.parameters))
        found += [candidate] if candidate is not None else []
        if candidate is not None and (not rest or _spread(rest)):
            break
    return found


def _fits(evaluate: Evaluator) -> bool:
    """Whether a plan that was priced fits."""
    return evaluate.best is not None and evaluate.best.feasible


def _shared_out(problem: Problem) -> tuple[SyncGroup, ...]:
    """The groups of tables, heads and linear layers that ranks share out, as far as the constraints allow it."""
    return tuple(g for g in built(problem, SHARED_OUT) if _spread([g]) and problem.rules.admit((g,)))


def _spread(groups: Sequence[SyncGroup]) -> bool:
    """Whether any of the groups spreads parameters over the ranks between steps."""
    return any(strategy_named(group.strategy).spreads for group in groups)


def is_hopeless(evaluate: Evaluator) -> bool:
    """Whether the leanest plan that was priced needs so much more memory than a device has that none will fit."""
    if evaluate.best is None:
        return False
    memory = (place.device.memory_bytes.value for place in evaluate.problem.topology.ranks)
    peaks = evaluate.best.estimate.peak_memory_bytes
    return any(peak > (1 + HOPELESS) * size for peak, size in zip(peaks, memory, strict=True))


def built(problem: Problem, name: str) -> tuple[SyncGroup, ...]:
    """The groups of one builder, those of pinned parameters as their pins have it."""
    return named(problem, name)[1]


def named(problem: Problem, name: str) -> tuple[str, tuple[SyncGroup, ...]]:
    """The groups as `built` has them, and what their plan is called."""
    plain = builder_named(name)(problem.graph.parameters, problem.context, problem.cluster)
    groups = problem.rules.applied(plain)
    return (name if groups == plain else name + PINNED), groups
