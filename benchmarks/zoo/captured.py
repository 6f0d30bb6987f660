"""What is known of a workload without its model: its graph, and what its optimizer does."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.cost_models import OptimizerCost, optimizer_cost
from autopar.ir.batch import flatten
from autopar.ir.build import training_graph
from autopar.ir.training_graph import TrainingGraph
from autopar.runtime.optimizers.kinds import leaves_zeros_alone
from benchmarks.zoo.workload import Workload


@dataclass(frozen=True)
class Captured:
    """What is known of a workload without its model."""

    name: str
    graph: TrainingGraph
    optimizer: OptimizerCost
    sparse_update: bool
    """Whether its optimizer leaves rows alone that no rank has looked up."""

    @classmethod
    def of(cls, workload: Workload) -> Captured:
        """Builds and captures the model, and lets it go."""
        model = workload.model()
        graph = training_graph(model, flatten(workload.batch(0, 0)), workload.loss_fn)
        optimizer = workload.optimizer(model)
        cost = optimizer_cost(type(optimizer).__name__, optimizer.param_groups[0])
        return cls(workload.name, replace(graph, joint=None), cost, leaves_zeros_alone(optimizer))
