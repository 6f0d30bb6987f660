"""One workload on one cluster, what is known of it before anything runs, and how much is to be measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import Fidelity, Plan
from benchmarks.zoo.workload import Workload

if TYPE_CHECKING:
    from autopar.cost_models import CostModel
    from autopar.ir.training_graph import TrainingGraph
    from autopar.ops.context import Context


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rounds: int
    slow_rounds: int
    """In so many of them all systems take part, then those that may be the best."""
    rounds_s: float
    """No round begins after this time, but the first two of each group are taken in any case."""
    block_s: float
    """About how long a block lasts; at least one step."""
    block_steps: int
    """The most steps of a block."""
    search_time_s: float
    tune: bool = True
    """Whether peers with several choices try them all; else each takes its first."""


@dataclass(frozen=True)
class Case:
    """A workload on a cluster. Its training step is captured once, for all plans."""

    workload: Workload
    cluster_name: str
    cluster: ClusterSpec
    folder: Path
    """Where plans are written, for the ranks to read."""
    search_time_s: float = 10.0
    given: Plan | None = None
    """A plan to be taken in place of a search."""
    late_parameters: bool = False
    """Whether plans may leave parameters on their way into the next step: `optimize(late_parameters=True)`."""

    @property
    def name(self) -> str:
        return f"{self.workload.name}/{self.cluster_name}"

    @property
    def gradient_bytes(self) -> int:
        return self._captured[0].parameter_bytes

    def look(self) -> None:
        """Captures the step, or looks at it, which is else done as a plan is first asked for."""
        _ = self._captured

    def searched(self, fidelity: Fidelity) -> Plan:
        """The plan that `autopar.plan` searches within `search_time_s`, or the given one."""
        if self.given is not None:
            return self.given
        from autopar.search import Budget, search

        graph, context, cost_model = self._captured
        budget = Budget(time_s=self.search_time_s)
        return search(graph, self.cluster, context, fidelity=fidelity, budget=budget, cost_model=cost_model)

    def built(self, builder: str) -> Plan:
        """The plan of one builder, as `autopar.plan(strategy=builder)` makes it."""
        from autopar.search import build_plan

        graph, context, cost_model = self._captured
        return build_plan(builder, graph, self.cluster, context, cost_model=cost_model)

    def save(self, plan: Plan) -> str:
        """Writes a plan under its digest; returns the file's path."""
        path = self.folder / f"{plan.digest}.json"
        plan.save(path)
        return str(path)

    @cached_property
    def _captured(self) -> tuple[TrainingGraph, Context, CostModel]:
        from autopar.cost_models import AnalyticCostModel, cost_model_for, optimizer_cost
        from autopar.ir.outline import Outline
        from autopar.runtime.job.process_group import Group
        from autopar.runtime.optimizers.optimizer import context_for, optimizer_scope
        from autopar.runtime.optimizers.update_rate import update_s_per_byte
        from autopar.spec.topology import Topology
        from benchmarks.peers.planned import graph_of

        graph = graph_of(self.workload, Group(0, 1))
        optimizer = self.workload.optimizer(self.workload.model())
        scope, late = optimizer_scope(optimizer), self.late_parameters
        context = context_for(self.cluster.world_size, optimizer, scope, None, True, late)
        updates = optimizer_cost(type(optimizer).__name__, optimizer.param_groups[0])
        if isinstance(graph.joint, Outline):  # its times are measured
            kind = Topology(self.cluster).ranks[0].device.kind
            updates = updates.measured(kind, update_s_per_byte(optimizer))
            return graph, context, cost_model_for(updates, {kind: graph.joint.seconds}, None)
        return graph, context, AnalyticCostModel(updates)
