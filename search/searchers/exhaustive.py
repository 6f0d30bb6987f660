"""Branch and bound over every plan of whole parameters: all ways to put them into groups, and all choices for each.

For small models only. It settles what the best plan is, which shows what the other searchers are worth. A way to form
groups is a branch; of the choices for its groups, those are simulated whose lower bound is below the best so far.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.cost_models.analytic import AnalyticCostModel
from autopar.cost_models.bound import Bound
from autopar.errors import AutoparWarning, PlanError
from autopar.ir.training_graph import Parameter
from autopar.search.base import SEARCHED, Candidate
from autopar.search.builders.common import issue_order, whole
from autopar.search.evaluate import Evaluator
from autopar.search.moves import Choice, Groups, Neighbourhood
from autopar.search.searchers.base import Searcher
from autopar.spec.plan import ParameterSlice, SyncGroup
from autopar.strategies.lowering import StepProgram

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]

MOST_PARAMETERS = 8
"""Which can be put into groups in 4,140 ways (the eighth Bell number)."""
MOST_PLANS = 30_000_000
"""Plans whose bounds are kept, 8 bytes each: about what seven parameters with nine choices each have."""
BLOCK = 1 << 16
"""Plans that are bounded at a time."""


class Exhaustive(Searcher):
    """Ends when all is settled: give it a budget without an end."""

    def search(self, seeds: Sequence[Candidate], evaluate: Evaluator, *, seed: int = 0) -> None:
        """Raises `PlanError` for a model of too many parameters, or plans."""
        parameters = evaluate.problem.graph.parameters
        if len(parameters) > MOST_PARAMETERS:
            raise PlanError(
                f"an exhaustive search takes up to {MOST_PARAMETERS} parameters, the model has {len(parameters)}: "
                "take another searcher"
            )
        if not Branches(evaluate).search():
            warnings.warn(
                "the exhaustive search ended before all was settled, so a better plan may be left: give it more "
                "--evaluations and a longer --time-budget",
                AutoparWarning,
                stacklevel=2,
            )


@dataclass(frozen=True)
class Branch:
    """One way to form groups, with all choices for each."""

    offered: Sequence[Sequence[SyncGroup]]
    """The ways to synchronize each group."""
    bounds: Floats
    """Of all combinations, the last group's choices changing fastest."""

    def plan(self, index: int) -> Groups:
        """A combination by its place."""
        chosen = np.unravel_index(index, [len(o) for o in self.offered])
        return tuple(o[int(k)] for o, k in zip(self.offered, chosen, strict=True))


class Branches:
    """The whole space of one problem."""

    def __init__(self, evaluate: Evaluator) -> None:
        self.evaluate = evaluate
        self.near = Neighbourhood(evaluate.problem)
        model, pricer = evaluate.problem.cost_model, evaluate.problem.pricer
        # What corrects the simulation may say less than the bound of it.
        self._bound = Bound(pricer) if pricer is not None and isinstance(model, AnalyticCostModel) else None
        self._known: dict[frozenset[str], list[tuple[SyncGroup, StepProgram]]] = {}
        self._rows: dict[frozenset[str], Numbers] = {}

    def search(self) -> bool:
        """Visits the ways to form groups, those whose lowest bound is the lowest first. Returns whether all that was
        not visited can be no better than the best. Raises `PlanError` where there are too many plans."""
        ways: list[list[list[Parameter]]] = []
        count = 0
        for parts in partitions(list(self.near.parameters)):
            if self.evaluate.spent:
                return False
            number = math.prod(len(self._offered(part)) for part in parts)
            ways += [parts] if number else []
            count += number
        if count > MOST_PLANS:
            raise PlanError(
                f"an exhaustive search bounds up to {MOST_PLANS:,} plans, the model has {count:,} on this cluster: "
                "take another searcher"
            )
        branches = []
        for parts in ways:
            if self.evaluate.spent:
                return False
            branches.append(self._branch(parts))
        for branch in sorted(branches, key=lambda b: float(b.bounds.min())):
            for i in map(int, np.argsort(branch.bounds, kind="stable")):
                best = self.evaluate.best
                if best is not None and best.feasible and branch.bounds[i] >= best.step_time_s:
                    break
                if self.evaluate.spent:
                    return False
                self.evaluate(SEARCHED, issue_order(branch.plan(i), self.near.parameters))
        return True

    def _branch(self, parts: Sequence[Sequence[Parameter]]) -> Branch:
        """One way to form groups. Bounds are left at 0 where the budget is spent before all are known."""
        offered = [[group for group, _ in self._offered(part)] for part in parts]
        counts = [len(o) for o in offered]
        bounds = np.zeros(math.prod(counts))
        if self._bound is not None:
            rows = [self._rows_of(part, self._bound) for part in parts]
            for begin in range(0, len(bounds), BLOCK):
                if self.evaluate.spent:
                    break
                chosen = np.unravel_index(np.arange(begin, min(begin + BLOCK, len(bounds))), counts)
                plans = np.stack([r[c] for r, c in zip(rows, chosen, strict=True)], axis=1)
                bounds[begin : begin + BLOCK] = self._bound.of(plans)
        return Branch(offered, bounds)

    def _offered(self, part: Sequence[Parameter]) -> list[tuple[SyncGroup, StepProgram]]:
        """The ways to synchronize one group, each lowered by itself."""
        key = frozenset(p.name for p in part)
        if key not in self._known:
            members = tuple(whole(p)[0] for p in part)
            groups = (self._group(c, members) for offered in self.near.choices.values() for c in offered)
            lowered = [(g, self.evaluate.problem.alone(g)) for g in groups if g is not None]
            self._known[key] = [(group, program) for group, program in lowered if program is not None]
        return self._known[key]

    def _rows_of(self, part: Sequence[Parameter], bound: Bound) -> Numbers:
        """The rows of the bound of the ways to synchronize one group."""
        key = frozenset(p.name for p in part)
        if key not in self._rows:
            self._rows[key] = np.array([bound.add(program) for _, program in self._offered(part)])
        return self._rows[key]

    def _group(self, choice: Choice, members: tuple[ParameterSlice, ...]) -> SyncGroup | None:
        group = choice.of(SyncGroup(strategy=choice.strategy, members=members))
        return group if self.near.possible(choice, group) else None


def partitions(parameters: list[Parameter]) -> Iterator[list[list[Parameter]]]:
    """All ways to put parameters into groups, each group of one dtype; in the order of their gradients."""
    ordered = sorted(parameters, key=lambda p: p.ready)

    def extended(parts: list[list[Parameter]], rest: list[Parameter]) -> Iterator[list[list[Parameter]]]:
        if not rest:
            yield [list(part) for part in parts]
            return
        first = rest[0]
        for part in parts:
            if part[0].spec.dtype == first.spec.dtype:
                part.append(first)
                yield from extended(parts, rest[1:])
                part.pop()
        yield from extended([*parts, [first]], rest[1:])

    return extended([], ordered)
