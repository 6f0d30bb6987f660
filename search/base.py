"""What a search is given, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Event
from typing import Protocol, runtime_checkable

from autopar.cost_models.analytic import StepPricer
from autopar.cost_models.base import CostModel, Estimate
from autopar.errors import PlanError
from autopar.ir.training_graph import TrainingGraph
from autopar.search.constraints import NONE, Constraints
from autopar.search.rules import Rules
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import FIDELITIES, Fidelity, Plan, SyncGroup
from autopar.spec.topology import Topology
from autopar.strategies import Context, strategy_named
from autopar.strategies.lowering import StepProgram, lower_plan

SEARCHED = "searched"
"""The name of plans that no builder made."""
TIE = 0.005
"""Plans whose step times differ by less than this fraction are equally fast; the one with fewer groups is better.
AutoSync breaks ties the same way, at the same margin (`SCORE_TH` of its RankRNN)."""

EVALUATIONS = 600
"""Plans that a search prices at most, unless its budget says another number."""

Progress = Callable[[str, int, float], None]
"""Called with what the search is doing, the number of plans priced so far, and the best step time in seconds."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How much a search may spend; what is used up first ends it.

    Only `evaluations` gives the same plan on every machine: where ranks plan each for themselves, rather than take
    the plan of one, leave `time_s` generous.
    """

    time_s: float = 30.0
    evaluations: int = EVALUATIONS
    """Plans that may be priced, seeds not counted."""
    stop: Event = field(default_factory=Event, compare=False)
    """Ends the search when it is set, from another thread or a signal: what was found by then is kept."""


@runtime_checkable
class PricesGroups(Protocol):
    """A cost model that also prices single groups of a plan; others price only whole plans."""

    def pricer(self, graph: TrainingGraph, topology: Topology) -> StepPricer:
        """The pricer of programs for this graph and topology."""


@dataclass(frozen=True)
class Problem:
    """What is to be planned, and within which limits."""

    graph: TrainingGraph
    cluster: ClusterSpec
    topology: Topology
    context: Context
    cost_model: CostModel
    fidelity: Fidelity = "exact"
    constraints: Constraints = NONE

    @cached_property
    def rules(self) -> Rules:
        """The constraints, looked up for the model. Raises `PlanError` where a pin cannot be used."""
        return Rules(self.constraints, self.graph, self.context, self.fidelity)

    def allows(self, fidelity: Fidelity) -> bool:
        """Whether a strategy of this label may be used."""
        return FIDELITIES.index(fidelity) <= FIDELITIES.index(self.fidelity)

    @cached_property
    def memory_limits(self) -> tuple[int, ...]:
        """Bytes that each rank may take of its device's memory: what is left of it without the reserve."""
        part = 1 - self.constraints.memory_reserve
        return tuple(int(place.device.memory_bytes.value * part) for place in self.topology.ranks)

    def alone(self, group: SyncGroup) -> StepProgram | None:
        """The group lowered by itself; `None` where its strategy cannot be used on it."""
        try:
            return lower_plan((group,), self.graph, self.context)
        except PlanError:
            return None

    @property
    def pricer(self) -> StepPricer | None:
        """Prices single groups; None where the cost model prices only whole plans."""
        model = self.cost_model
        return model.pricer(self.graph, self.topology) if isinstance(model, PricesGroups) else None


@dataclass(frozen=True)
class Candidate:
    """A plan that was priced: its groups and its estimate."""

    name: str
    """The name of the seed that the plan is, or that it came from."""
    groups: tuple[SyncGroup, ...]
    estimate: Estimate
    overflow_bytes: int = 0
    """By how much the fullest rank exceeds what it may take of its device's memory; 0 where the plan fits."""

    @property
    def feasible(self) -> bool:
        return self.overflow_bytes == 0

    @property
    def step_time_s(self) -> float:
        return self.estimate.step_time_s

    @property
    def spreads(self) -> bool:
        """Whether the plan spreads parameters over the ranks between steps."""
        return any(strategy_named(group.strategy).spreads for group in self.groups)

    @cached_property
    def order(self) -> tuple[int, float, int]:
        """Sorts candidates, the best first: what fits, then the faster, then the one of fewer groups."""
        return (self.overflow_bytes, self.step_time_s, len(self.groups))


@dataclass(frozen=True)
class SearchResult:
    """The plan that a search chose, and all that it priced."""

    plan: Plan
    candidates: tuple[Candidate, ...] = field(repr=False)
    """All plans that were priced, in that order, the seeds first; then what else the search has priced that this one
    resumes."""
    problem: Problem = field(repr=False)
    seeds: dict[str, Candidate] = field(repr=False)
    """The plans that a person would write, by name."""
    baselines: dict[str, Candidate] = field(repr=False)
    """By name: DDP as users have it today, where pins make another plan of it; else none. What plans are compared with,
    and no candidate."""
    chosen: Candidate = field(repr=False)
    """The candidate that `plan` is made of."""


def executed(groups: Sequence[SyncGroup]) -> tuple[Hashable, ...]:
    """What groups execute: two plans of which this is equal are one plan, whatever is said of them."""
    return tuple((g.strategy, tuple(sorted(g.settings.items())), g.members) for g in groups)


def choose(candidates: Sequence[Candidate], limit_s: float) -> Candidate:
    """The best of candidates that fit, where nothing slower than `limit_s`, the best seed, is taken: of those within
    a tie of the fastest, one that leaves the model whole between steps, and of these the one with the fewest groups."""
    fastest = min(c.step_time_s for c in candidates)
    limit = min(max(limit_s, fastest), fastest * (1 + TIE))
    tied = (c for c in candidates if c.step_time_s <= limit)
    return min(tied, key=lambda c: (c.spreads, len(c.groups), c.step_time_s))
