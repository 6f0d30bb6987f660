"""What is tried: cells of one workload on one cluster, and the plans and the speed that the lab runs them at."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cached_property
from statistics import geometric_mean

from autopar.cost_models import AnalyticCostModel
from autopar.lab.trial import RealCompute, TrialSpec, VirtualCompute
from autopar.lab.wiring import of_cluster
from autopar.search.base import Problem
from autopar.search.moves import Groups
from autopar.spec.plan import Plan
from autopar.spec.topology import Topology
from autopar.strategies import Context
from autopar.strategies.lowering import StepProgram, lower_plan
from benchmarks.suite.clusters import ClusterCase
from benchmarks.trials.making.plans import PlanSource
from benchmarks.trials.records import ALWAYS, Compute
from benchmarks.zoo.captured import Captured

LAB_BPS, HOST_BPS = 6e9, 2e9
"""What all hosts of a lab may send together, and each of them, in bit/s. [Empirical: on two cores, an all-reduce of
four ranks keeps up with links of 2 Gbit/s; with faster ones, the cores and not the links decide]"""
LEAST_HOST_BPS = 20e6
SLOWDOWNS = (1.0, 1.0, 2.0, 4.0)
"""Of the lab beside the fastest that it may run, so that the same plans meet different parts of fixed costs."""
LIGHT_STEP_S = 0.3
"""A step of DDP that takes no longer than this may be run at a slowdown."""
MOST_STEP_S = 1.2
"""Plans whose step would take longer in the lab are drawn again, a few times."""
REDRAWS = 8
CLIPPED_SHARE = 0.1
STEPS, BUDGET_S = 10, 1.5
"""Of a trial: steps that are timed, and for how long."""

Choice = tuple[float, float | None]
"""What plans have in common that may be compared: how many times slower the lab runs, and what gradients are clipped
to."""


@dataclass(frozen=True)
class Draw:
    """A trial to be run."""

    origin: str
    """Where its plan comes from."""
    groups: Groups
    dilation: float
    clip: float | None

    @property
    def choice(self) -> Choice:
        return self.dilation, self.clip


def cell_name(workload: str, cluster: str, compute: Compute) -> str:
    """Of a cell, and of the trials that were taken in it."""
    return f"{workload} {cluster} {compute}"


class Cell:
    """One workload on one cluster, with real or virtual compute. `one_choice`: all plans without clipping and at the
    same speed, so that all may be compared; the slowest, where the machine's own noise weighs least, and no faster than
    the cluster is. `budget_s`: see `TrialSpec`."""

    def __init__(
        self,
        workload: Captured,
        case: ClusterCase,
        compute: Compute,
        *,
        one_choice: bool = False,
        budget_s: float = BUDGET_S,
    ) -> None:
        self.one_choice, self.budget_s = one_choice, budget_s
        self.workload = workload
        self.graph = workload.graph
        self.case = case
        self.compute: Compute = compute
        self.name = cell_name(workload.name, case.name, compute)

    @cached_property
    def problem(self) -> Problem:
        cluster = self.case.cluster
        return Problem(
            self.graph,
            cluster,
            Topology(cluster),
            Context(cluster.world_size, late_parameters=True, sparse_update=self.workload.sparse_update).on(cluster),
            AnalyticCostModel(self.workload.optimizer),
            "rounded",
        )

    @cached_property
    def plans(self) -> PlanSource:
        return PlanSource(self.problem)

    @cached_property
    def fastest(self) -> float:
        """The smallest dilation at which the lab keeps the links' rates."""
        if self.compute == "real":
            return 1.0
        wiring = of_cluster(self.case.cluster)
        holding = {place.host.name for place in self.case.cluster.ranks}
        sent = [wiring.sends_bps(host) or HOST_BPS for host in wiring.hosts if host in holding]
        # Where hosts differ, the slow ones keep the fast ones from sending all the time.
        together = len(sent) * geometric_mean(sent)
        return float(f"{max(together / LAB_BPS, max(sent) / HOST_BPS):.3g}")

    @cached_property
    def ddp_s(self) -> float:
        """The predicted step of DDP in the lab, at its fastest."""
        groups = self.plans.built(ALWAYS)
        return self._lab_s(lower_plan(groups, self.graph, self.problem.context), self.fastest)

    @property
    def weight(self) -> float:
        """How many trials it gets, beside other cells: those of quick ones cost less, and all are to be covered."""
        return 1 / math.sqrt(max(self.ddp_s, 0.1))

    def draw(self, seed: int, index: int) -> Draw:
        """The trial with this index, always the same."""
        draw = random.Random(f"{seed} {self.name} {index}")
        dilation = self.fastest
        if self.compute == "virtual" and self.ddp_s <= LIGHT_STEP_S:
            dilation *= max(SLOWDOWNS) if self.one_choice else draw.choice(SLOWDOWNS)
        if self.compute == "virtual" and self.one_choice:
            dilation = max(dilation, 1.0)
        slowest_bps = min(
            min(wire.forth_bps or 1e12, wire.back_bps or 1e12) for wire in of_cluster(self.case.cluster).wires
        )
        dilation = min(dilation, slowest_bps / LEAST_HOST_BPS)
        for _ in range(REDRAWS):
            origin, groups, program = self.plans.draw(draw)
            if self._lab_s(program, dilation) <= max(MOST_STEP_S, 1.5 * self.ddp_s):
                break
        clipped = draw.random() < CLIPPED_SHARE and not self.one_choice
        return Draw(origin, groups, dilation, 1.0 if clipped else None)

    def always(self, choice: Choice) -> Draw:
        """The trial that others of this choice are compared with."""
        return Draw(ALWAYS, self.plans.built(ALWAYS), *choice)

    def spec(self, drawn: Draw) -> TrialSpec:
        """What the pool is to run."""
        plan = Plan(
            name=drawn.origin,
            model=self.graph.model,
            cluster=self.case.cluster.fingerprint,
            fidelity="rounded",
            groups=drawn.groups,
        )
        if self.compute == "real":
            compute: RealCompute | VirtualCompute = RealCompute(
                "benchmarks.zoo.named:any_workload", (self.workload.name,)
            )
        else:
            known = self.workload
            compute = VirtualCompute(self.graph, drawn.dilation, known.optimizer, known.sparse_update)
        warmup = 2 if self.compute == "real" else 1
        return TrialSpec(plan, compute, drawn.clip, steps=STEPS, warmup=warmup, budget_s=self.budget_s)

    def _lab_s(self, program: StepProgram, dilation: float) -> float:
        estimate = self.problem.cost_model.predict(self.graph, program, self.problem.topology)
        return estimate.step_time_s * dilation
