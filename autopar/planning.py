"""From a model to a plan: the one way that `autopar.plan`, `autopar.optimize` and the command line take."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from autopar.errors import AutoparWarning, SpecError, did_you_mean
from autopar.formatting import size
from autopar.ir.build import Unused
from autopar.ir.capture import Mode
from autopar.ir.training_graph import TrainingGraph
from autopar.ops.context import Context
from autopar.runtime.compiled import Capture, Check
from autopar.runtime.optimizers.kinds import kind_of
from autopar.runtime.optimizers.optimizer import Scope
from autopar.search.constraints import NONE, Constraints
from autopar.search.options import SearchOptions
from autopar.spec.calibration import Calibration
from autopar.spec.cluster import ClusterSpec
from autopar.spec.memory_use import MemoryUse
from autopar.spec.plan import Fidelity, Plan, Recompute
from autopar.training import Training

if TYPE_CHECKING:
    from autopar.cost_models import CostModel
    from autopar.cost_models.base import Lesson
    from autopar.search.base import SearchResult

Progress = Callable[[str, int, float], None]
"""Is told what the search does, how many plans it has priced, and the best step time so far in seconds."""


_CHOICES: dict[str, Any] = {
    "mode": Mode,
    "fidelity": Fidelity,
    "unused_parameters": Unused,
    "optimizer_acts_on": Scope,
    "check": Check,
    "capture": Capture,
}


def check_choices(**given: str | None) -> None:
    """Raises `SpecError` where an option has a value that is not one of its choices."""
    for name, value in given.items():
        choices: tuple[str, ...] = get_args(_CHOICES[name])
        if value is not None and value not in choices:
            known = ", ".join(map(repr, choices))
            raise SpecError(f"{name} is {value!r}, expected one of {known}{did_you_mean(str(value), choices)}")


def check_objects(
    *, cluster: ClusterSpec | None = None, plan: Plan | None = None, calibration: Calibration | None = None
) -> None:
    """Raises `SpecError` where one of them is another object, such as the path of a file that holds it."""
    kinds: list[tuple[str, object, type, str]] = [
        ("the cluster", cluster, ClusterSpec, ", or describe ranks of this machine by autopar.ClusterSpec.local(4)"),
        ("the plan", plan, Plan, ""),
        ("the calibration", calibration, Calibration, ""),
    ]
    for name, value, kind, otherwise in kinds:
        if value is not None and not isinstance(value, kind):
            raise SpecError(
                f"{name} is {value!r}, expected an object of autopar.{kind.__name__}: read a file by "
                f"autopar.{kind.__name__}.load(path){otherwise}"
            )


@dataclass(frozen=True)
class Planner:
    """How a plan is found; `autopar.optimize` says what each field is."""

    strategy: str | None = None
    fidelity: Fidelity = "exact"
    late_parameters: bool = False
    calibration: Calibration | None = None
    measure_compute: bool = False
    time_budget_s: float = 10.0
    seed: int = 0
    progress: Progress | None = None
    given: Plan | None = None
    """A plan that is priced as it is."""
    constraints: Constraints = NONE
    searching: SearchOptions = field(default_factory=SearchOptions)
    trials: str | Path | None = None
    """A file of trials that were run on the cluster; see `autopar.cost_models.trial_log`."""
    may_not_fit: bool = False
    """Whether a plan by name that does not fit the devices is returned all the same, with a warning, since whoever runs
    it would see whether it does."""

    def plan(self, training: Training, cluster: ClusterSpec) -> Plan:
        """The plan that is given, priced; or one that keeps all activations; where none fits, one that computes some of
        them again, or most. Warns where it keeps less memory free than is asked. Raises `InfeasibleError` where none of
        these fits, `PlanError` where a constraint cannot be kept to, and `SpecError` where a model without values is to
        be timed, or a global batch cannot be shared out."""
        if self.measure_compute and training.without_values:
            raise SpecError(
                f"measure_compute times the model's passes, and '{training.without_values}' has no values (it is on "
                "the meta device, or fake): leave measure_compute out, and compute is priced from what the devices "
                "reach, or make the model with its weights"
            )
        rewrites = training.mode == "step" and not training.eager
        levels: tuple[Recompute, ...] = ("none", "selective", "full") if rewrites else ("none",)
        if self.searching.global_batch is not None:
            cluster = self._shared_out(training, cluster, self.searching.global_batch)
        if self.given is not None:
            plan = self._plan(training, cluster, self.given.recompute)
        elif self.strategy is not None:
            plan = self._named(training, cluster, levels)
        else:
            plan = self._searched(training, cluster, levels)
        if plan.memory is not None and plan.memory.short_bytes:
            _say_memory(plan, plan.memory)
        if cluster.batches:
            _say_batches(training.graph(plan.recompute), cluster)
        return plan

    def plan_on_rank_0(self, training: Training, cluster: Callable[[], ClusterSpec]) -> Plan:
        """The same by all ranks of a job, with rank 0's cluster."""
        text = training.timing.lead(lambda: self.plan(training, cluster()).model_dump_json())
        return Plan.loads(text, "rank 0's plan")

    def _shared_out(self, training: Training, cluster: ClusterSpec, samples: int) -> ClusterSpec:
        """The cluster with a batch on each device, `samples` together."""
        from autopar.search import with_shares

        graph = training.graph()
        context, cost_model = self.setting(training, cluster, graph)
        return with_shares(samples, graph, cluster, context, cost_model, self.constraints)

    def _searched(self, training: Training, cluster: ClusterSpec, levels: tuple[Recompute, ...]) -> Plan:
        """The first level's plan that keeps as much memory free as is asked; else the one that keeps most free. Raises
        `SpecError` where trials would run other batches than those that are priced."""
        from autopar.search.infeasible import NoPlanFits

        if self.searching.finalists is not None:
            _check_batches(training.graph(), cluster)
        found: list[tuple[int, SearchResult]] = []
        failed: list[NoPlanFits] = []
        began = time.monotonic()
        for recompute in levels:
            try:
                one = self._search(training, cluster, recompute, time.monotonic() - began)
            except NoPlanFits as e:
                failed.append(e)
                continue
            memory = one.plan.memory
            found.append((0 if memory is None else memory.short_bytes, one))
            if not found[-1][0]:
                break
        if not found:  # what is computed again may take more than what is kept
            raise min(failed, key=lambda e: e.least_bytes)
        chosen = min(found, key=lambda one: one[0])[1]
        if self.searching.chooses is not None and training.optimizer is not None:
            return self.searching.chooses(chosen, kind_of(training.optimizer))
        return chosen.plan if self.searching.finalists is None else self.searching.finalists(chosen)

    def _named(self, training: Training, cluster: ClusterSpec, levels: tuple[Recompute, ...]) -> Plan:
        """The first level's plan that fits the devices."""
        from autopar.search import infeasible

        plans = []
        for recompute in levels:
            plan = self._plan(training, cluster, recompute)
            if plan.memory is None or not plan.memory.over_bytes:
                return plan
            plans.append(plan)
        if self.may_not_fit:
            return plans[0]
        graphs = [training.graph(recompute) for recompute in levels]
        context, cost_model = self.setting(training, cluster, graphs[0])
        assert self.strategy is not None
        raise infeasible(self.strategy, graphs, cluster, context, cost_model=cost_model, constraints=self.constraints)

    def setting(self, training: Training, cluster: ClusterSpec, graph: TrainingGraph) -> tuple[Context, CostModel]:
        """What strategies may depend on, and what prices plans for the graph."""
        late = self.given is not None and any(g.options.get("late") for g in self.given.groups)
        context = training.context(cluster.world_size, self.late_parameters or late)
        taught = self._taught(cluster)
        return context, training.cost_model(cluster, self.calibration, graph, self.measure_compute, taught)

    def _taught(self, cluster: ClusterSpec) -> Callable[[str], list[Lesson]] | None:
        """What trials of the cluster have taught, from what prices rest on; `None` where there are to be none."""
        from autopar.cost_models.corrected import shipped
        from autopar.cost_models.trial_log import lessons

        trials, of, running = self.trials, cluster.fingerprint, self.searching.finalists is not None
        if trials is None:
            return (lambda basis: []) if running else None
        return lambda basis: lessons(trials, of, basis, shipped().features, may_be_missing=running)

    def _plan(self, training: Training, cluster: ClusterSpec, recompute: Recompute) -> Plan:
        """The plan that is given, or named."""
        from autopar.search import build_plan, price

        graph = training.graph(recompute)
        context, cost_model = self.setting(training, cluster, graph)
        if self.given is not None:
            return price(self.given, graph, cluster, context, cost_model=cost_model, constraints=self.constraints)
        assert self.strategy is not None
        return build_plan(
            self.strategy,
            graph,
            cluster,
            context,
            fidelity=self.fidelity,
            cost_model=cost_model,
            constraints=self.constraints,
        )

    def _search(self, training: Training, cluster: ClusterSpec, recompute: Recompute, spent_s: float) -> SearchResult:
        """`spent_s`: of the time that the search may take."""
        from autopar.search import Budget, search_result, searcher_named

        graph = training.graph(recompute)
        context, cost_model = self.setting(training, cluster, graph)
        return search_result(
            graph,
            cluster,
            context,
            fidelity=self.fidelity,
            constraints=self.constraints,
            budget=Budget(max(0.0, self.time_budget_s - spent_s), self.searching.evaluations, self.searching.stop),
            seed=self.seed,
            cost_model=cost_model,
            searcher=searcher_named(self.searching.searcher),
            journal=self.searching.journal,
            resume=self.searching.resume,
            progress=self.progress,
        )


def _check_batches(graph: TrainingGraph, cluster: ClusterSpec) -> None:
    """Raises `SpecError` where a device has another batch than the example, which trials run on every rank."""
    if any(place.device.batch not in (None, graph.batch_size) for place in cluster.ranks):
        raise SpecError(
            f"trials run the example's batch (samples: {graph.batch_size or 'unknown'}) on every rank, and devices of "
            f"the cluster have others ({cluster.batches}): leave `batch` out of the cluster description, make the "
            "example as large, or search without trials"
        )


def _say_batches(graph: TrainingGraph, cluster: ClusterSpec) -> None:
    """Warns where ranks with other batches than the example are priced with that."""
    from autopar.cost_models.batches import unscaled

    why = unscaled(graph, [place.device.batch for place in cluster.ranks])
    if why is not None:
        warnings.warn(
            f"the cluster's devices have batches of their own ({cluster.batches}), but the plan is priced with the "
            f"example's on each rank: {why}. It trains any batches all the same",
            AutoparWarning,
            stacklevel=4,
        )


def _say_memory(plan: Plan, use: MemoryUse) -> None:
    """Warns of a plan that keeps less memory free than was asked, or takes more than there is."""
    taken = f"is predicted to take {size(use.peak_bytes)} on {use.device_text}"
    parts = f"It is taken by {use.parts_text}."
    if use.over_bytes:
        said = (
            f"plan '{plan.name}' {taken}, {size(use.over_bytes)} more than there is. {parts} It may run out of memory, "
            "as it would without autopar; a search, without a strategy by name, finds what takes less"
        )
    else:
        left = use.device_bytes - use.peak_bytes
        part = math.floor(1000 * left / use.device_bytes) / 1000
        said = (
            f"plan '{plan.name}' {taken}, which leaves {size(left)} free, where {size(use.reserve_bytes)} were to be "
            f"kept free for what no prediction counts, as fragmentation. {parts} memory_reserve={part:g} "
            f"(--memory-reserve {100 * part:.3g}%) asks for no more"
        )
    warnings.warn(said, AutoparWarning, stacklevel=4)
