"""How near a step comes to its floor, where communication takes about as long as compute.

A ResNet-50 on pictures of 224 x 224, as many of them a rank that eight T4 compute about as long as its gradients take
at 10 Gbit/s. No step is shorter than max(compute, bytes over bandwidth). Devices are virtual, the network is the lab's;
both run slower by one factor, and plans are priced with gloo's costs divided by it. `late_parameters=True`: parameters
may come back beside the next forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.lab import Lab
from autopar.lab.pool import Limits, Pool
from autopar.lab.trial import TrialSpec, VirtualCompute
from autopar.search import Budget, build_plan, search
from autopar.spec.plan import Plan
from autopar.spec.topology import Topology
from autopar.strategies import Context
from benchmarks.suite import workload_named
from benchmarks.suite.clusters import backend_in_lab, case_named
from benchmarks.zoo.captured import Captured
from benchmarks.zoo.pictures import digits

WORKLOAD, CLUSTER, PICTURES, SIDE = "resnet50", "8x10g-virtual", 22, 224
NAME = f"{WORKLOAD}/{CLUSTER}"
OURS, THEIRS = "autopar", "ddp"
STEPS, WARMUP = 8, 2
LIMITS = Limits(load_s=300.0, run_s=400.0)


@dataclass(frozen=True)
class Overlap:
    """What was measured, in seconds of the described cluster."""

    compute_s: float
    bytes_s: float
    """What the rank that sends most sends with autopar's plan, over the bandwidth of its link."""
    step_s: dict[str, float]
    """By plan."""
    predicted_s: dict[str, float]
    sent_bytes: dict[str, float | None]
    noise: str

    @property
    def floor_s(self) -> float:
        return max(self.compute_s, self.bytes_s)


class Step:
    """The step on that cluster, captured once."""

    def __init__(self, search_time_s: float) -> None:
        self.search_time_s = search_time_s
        self.case = case_named(CLUSTER)
        self.cluster = self.case.cluster
        pictures = replace(workload_named(WORKLOAD), batch=lambda step, rank: digits(step, rank, PICTURES, SIDE))
        self.captured = Captured.of(pictures)
        self.context = Context(self.cluster.world_size, late_parameters=True)

    @cached_property
    def plans(self) -> dict[str, Plan]:
        from autopar.cost_models import AnalyticCostModel

        backend = backend_in_lab(self.case.slowdown, virtual=True)
        graph, cost_model = self.captured.graph, AnalyticCostModel(self.captured.optimizer, backend=backend)
        found = search(
            graph, self.cluster, self.context, budget=Budget(time_s=self.search_time_s), cost_model=cost_model
        )
        return {OURS: found, THEIRS: build_plan(THEIRS, graph, self.cluster, self.context, cost_model=cost_model)}

    def measure(self, say: Callable[[str], None]) -> Overlap:
        """Runs both plans in the lab. Raises RuntimeError where one cannot be run."""
        compute = VirtualCompute(self.captured.graph, self.case.slowdown, self.captured.optimizer)
        results = {}
        with Lab.of(self.cluster) as lab, Pool(lab, LIMITS) as pool:
            lab.set_rates(self.cluster, scale=1 / self.case.slowdown)
            for name, plan in self.plans.items():
                say(f"{name}: {STEPS} steps of about {self.case.slowdown * _predicted_s(plan):.0f} s")
                result = results[name] = pool.trial(TrialSpec(plan, compute, steps=STEPS, warmup=WARMUP))
                if result.status != "ok":
                    raise RuntimeError(f"{NAME}, {name}: {result.status}: {result.error}")
        ours = self.plans[OURS].prediction
        assert ours is not None
        return Overlap(
            compute_s=ours.compute_s,
            bytes_s=ours.wire_bytes / Topology(self.cluster).bandwidth_bytes_per_s(0, 1),
            step_s={name: r.step_time_s / self.case.slowdown for name, r in results.items()},
            predicted_s={name: _predicted_s(plan) for name, plan in self.plans.items()},
            sent_bytes={name: max(r.sent_bytes, default=None) for name, r in results.items()},
            noise="; ".join(dict.fromkeys(r.noise for r in results.values() if r.noise)),
        )


def _predicted_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_time_s
