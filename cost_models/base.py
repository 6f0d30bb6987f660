"""What a cost model is, and what it says of one plan.

A cost model follows scikit-learn's estimator contract: `__init__` stores its settings and does no work, `fit` learns
from observed steps and returns `self`, what was learned ends in `_`, `predict` does not change what was learned. The
analytic model has nothing to learn; a learned correction wraps it behind this same interface.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from autopar.ir.training_graph import TrainingGraph
from autopar.spec.plan import Prediction
from autopar.spec.topology import Topology
from autopar.spec.units import Provenance
from autopar.strategies.lowering import StepProgram


class Span(NamedTuple):
    """One bar of the timeline."""

    lane: str
    """`rank 0` for a compute stream, or the name of a communication channel: `gloo`."""
    name: str
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class Estimate:
    """What a cost model says of one step of a program. Tuples are indexed by rank."""

    step_time_s: float
    """Seconds from the first node to the end of the last wait, update or store, on the slowest rank."""
    compute_s: float
    """Seconds of work on the slowest rank's device: the graph's nodes, packing, optimizer updates, stores."""
    exposed_communication_s: float
    """Seconds of waiting, and of compute slowed down by communication beside it: `step_time_s` less `compute_s`."""
    communication_s: float
    """Seconds for which the communication channels are busy, hidden behind compute or not."""
    sent_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    peak_memory_bytes: tuple[int, ...]
    relative_error: float
    """Half width of the interval in which the measured step is expected, as a fraction of `step_time_s`."""
    provenance: Provenance
    """The weakest provenance of the figures that the estimate rests on: measured, looked up or guessed."""
    spans: tuple[Span, ...] = ()
    """The timeline: compute streams of ranks that differ, and the channels. Empty where it was not asked for."""

    def prediction(self) -> Prediction:
        """The part of the estimate that a plan records."""
        return Prediction(
            step_time_s=self.step_time_s,
            compute_s=self.compute_s,
            exposed_communication_s=self.exposed_communication_s,
            wire_bytes=max(self.sent_bytes, default=0),
            peak_memory_bytes=max(self.peak_memory_bytes, default=0),
            relative_error=self.relative_error,
            provenance=self.provenance,
        )


@dataclass(frozen=True)
class Observation:
    """A step that was measured: what `CostModel.fit` learns from."""

    graph: TrainingGraph
    program: StepProgram
    topology: Topology
    step_time_s: float
    disturbed: bool = False
    """Whether something else took the machine's time while it was measured: it then counts for less."""


@dataclass(frozen=True)
class Lesson:
    """What a cost model keeps of a measured step: enough to learn from it later, without the model that was trained."""

    features: Mapping[str, float]
    """The plan's physical features by name, as `autopar.cost_models.features` computes them."""
    simulated_s: float
    """Step time in seconds that the simulation predicted, without a learned correction."""
    measured_s: float
    disturbed: bool = False


class CostModel(ABC):
    """Predicts what one step of a program costs. Knows operations, never strategies."""

    def fit(self, observations: Sequence[Observation]) -> Self:
        """Learns from measured steps; a model without anything to learn returns itself unchanged."""
        return self

    @abstractmethod
    def predict(
        self, graph: TrainingGraph, program: StepProgram, topology: Topology, *, timeline: bool = False
    ) -> Estimate:
        """The cost of one step; with `timeline`, the estimate also holds the spans. Equal input gives equal output."""
