"""A trial: one plan, run for some steps on living ranks, and what was measured of it.

The step time is the median over steps after warm-up. Steps follow one another without a pause, and a step ends when
the last rank has ended it: all ranks of a lab read one clock. Bytes are counted by the hosts' interfaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Literal

from autopar.cost_models.analytic import NodeTimes
from autopar.cost_models.optimizers import ADAMW, OptimizerCost
from autopar.ir.training_graph import TrainingGraph
from autopar.lab.load import Load
from autopar.spec.plan import Plan

Status = Literal["ok", "refused", "crashed", "hung", "disagreed"]

OTHERS_CORES = 0.15
"""How much of a core other processes may take before a trial counts as noisy, and how much the hypervisor."""
SPREAD = 0.05
"""How far steps may lie apart before a trial counts as noisy: half of the middle half, as a fraction of the median.
[Empirical: on an idle machine it stays below 0.03 for steps of 100 ms and more]"""


@dataclass(frozen=True)
class RealCompute:
    """The model is trained, on this machine's cores."""

    workload: str
    """Where the ranks import the workload from: `package.module:name`. A callable is called with `arguments`. The
    result has `model()`, `batch(step, rank)`, `loss_fn` and `optimizer(model)`."""
    arguments: tuple[str | int | float | bool, ...] = ()


@dataclass(frozen=True)
class VirtualCompute:
    """Compute is slept through, as long as the plan's cluster takes for it by the analytic cost model, or by
    measurement."""

    graph: TrainingGraph
    dilation: float = 1.0
    """Compute takes so many times as long; the lab's rates are to be divided by the same factor."""
    optimizer: OptimizerCost = ADAMW
    sparse_update: bool = False
    """Whether the optimizer leaves rows alone that no rank has looked up; see `autopar.strategies.Context`."""
    measured_s: NodeTimes | None = None
    """Measured times of the graph's nodes, by kind of device; they take precedence over the model's."""


@dataclass(frozen=True)
class TrialSpec:
    """What is to be run, and for how long."""

    plan: Plan
    compute: RealCompute | VirtualCompute
    clip_grad_norm: float | None = None
    steps: int = 10
    """Timed ones."""
    warmup: int = 1
    budget_s: float = float("inf")
    """Fewer steps are timed where they would take longer than this, but no fewer than `least_steps`."""
    least_steps: int = 3


@dataclass(frozen=True)
class TrialResult:
    """What a trial found. Without steps where `status` is not `ok`; then `error` says why."""

    status: Status
    error: str = ""
    """refused: every rank says that the plan cannot be used. crashed: a rank raised an error or died. hung: a rank gave
    no answer in time. disagreed: ranks would have issued different collectives, or returned different losses."""
    order_hash: str = ""
    step_s: tuple[float, ...] = ()
    """Of each timed step, in order."""
    block_s: tuple[float, ...] = ()
    """The median step of each block, where it ran in turn with others."""
    losses: tuple[float, ...] = ()
    """Global means, those of the warm-up first."""
    sent_bytes: tuple[float, ...] = ()
    """By host that holds ranks, in the order of its first rank: per step, headers of packets included. Empty where the
    counters cannot be read, or where all ranks share one host."""
    received_bytes: tuple[float, ...] = ()
    peak_memory_bytes: tuple[int, ...] = ()
    """By rank: resident at most while the steps ran, less what the process held beside the model before them. Empty
    with virtual compute."""
    load: Load | None = None
    """Of the machine, while the steps ran."""
    wall_s: float = 0.0
    """For all of it."""
    note: str = ""
    """What is to be known of where it ran: loopback in place of shaped links, say."""

    @property
    def step_time_s(self) -> float:
        """The median of `step_s`; raises ValueError where nothing was timed."""
        if not self.step_s:
            raise ValueError(f"the trial has no step time: {self.status}: {self.error}")
        return median(self.step_s)

    @property
    def noise(self) -> str:
        """Why the step time may be off by more than 5 %; empty where nothing speaks for that."""
        reasons = []
        if self.load is not None:
            if self.load.others_cores > OTHERS_CORES:
                reasons.append(f"other processes took {self.load.others_cores:.2f} cores")
            if self.load.stolen_cores > OTHERS_CORES:
                reasons.append(f"the hypervisor took {self.load.stolen_cores:.2f} cores")
        if self.step_s and relative_spread(self.step_s) > SPREAD:
            reasons.append(f"steps differ by {relative_spread(self.step_s):.0%}")
        if len(self.step_s) >= 6 and abs(drift(self.step_s)) > SPREAD:
            reasons.append(f"later steps took {drift(self.step_s):+.0%}")
        return "; ".join(reasons)


@dataclass(frozen=True)
class Comparison:
    """Two trials, run in turn."""

    a: TrialResult
    b: TrialResult
    ratios: tuple[float, ...] = field(default=())
    """Of each round: the median step of `b` over that of `a`. Empty where one of them failed."""

    @property
    def ratio(self) -> float:
        """How long a step of `b` takes, in steps of `a`; raises ValueError where one of them failed."""
        if not self.ratios:
            raise ValueError(f"no ratio: a is {self.a.status}, b is {self.b.status}: {self.a.error or self.b.error}")
        return median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """The lower and upper quartile of the ratios."""
        low, high = quartiles(self.ratios)
        return low, high


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper one, by linear interpolation; of one value, that value twice."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def relative_spread(values: Sequence[float]) -> float:
    """Half of the distance between the quartiles, as a fraction of the median."""
    low, high = quartiles(values)
    return (high - low) / 2 / median(values)


def drift(values: Sequence[float]) -> float:
    """By what fraction the second half's median lies above that of the first half."""
    half = len(values) // 2
    return median(values[-half:]) / median(values[:half]) - 1
