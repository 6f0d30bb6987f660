"""What needs the model besides the plan: its timeline, its lowering, and its price under changed circumstances."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.cli.console import progress

if TYPE_CHECKING:
    from pathlib import Path

    from autopar.cli.model_argument import ModelArgument
    from autopar.cost_models import CostModel
    from autopar.cost_models.base import Estimate
    from autopar.ir.capture import Mode
    from autopar.ir.training_graph import TrainingGraph
    from autopar.ops.context import Context
    from autopar.search.sensitivity import Sensitivity
    from autopar.spec.calibration import Calibration
    from autopar.spec.plan import Plan
    from autopar.strategies.lowering import StepProgram
    from autopar.training import Training


@dataclass(frozen=True)
class Fitted:
    """A plan, with the model that it was made for, captured."""

    plan: Plan
    training: Training
    graph: TrainingGraph
    context: Context

    @classmethod
    def of(cls, plan: Plan, made: ModelArgument, optimizer: str | None) -> Fitted:
        """Raises `PlanMismatchError` where the model is another one."""
        training = _training(made, optimizer)
        return cls(plan, training, *_fitting(plan, training))

    def estimate(self, calibration: Calibration | None = None, trials: Path | None = None) -> Estimate:
        """What the cost model says of the plan, with its timeline. Raises `SpecError` where the calibration, or a
        trial, is of another cluster."""
        from autopar.cost_models.steps import predict_steps
        from autopar.spec.topology import topology_of

        model, topology = self._cost_model(calibration, trials), topology_of(self.plan.cluster.cluster)
        return predict_steps(model, self.plan.groups, self.graph, self.context, topology, timeline=True)

    def what_if(
        self,
        calibration: Calibration | None = None,
        trials: Path | None = None,
        told: Callable[[str], None] | None = None,
    ) -> Sensitivity:
        """The plan under changed circumstances. Raises `SpecError` where the calibration, or a trial, is of another
        cluster."""
        from autopar.search.sensitivity import sensitivity

        model = self._cost_model(calibration, trials)
        return sensitivity(self.plan, self.graph, self.context, cost_model=model, progress=told)

    def _cost_model(self, calibration: Calibration | None, trials: Path | None) -> CostModel:
        """`trials`: a file of trials to learn from."""
        from autopar.cost_models.corrected import shipped
        from autopar.cost_models.trial_log import lessons

        cluster = self.plan.cluster.cluster
        if trials is None:
            return self.training.cost_model(cluster, calibration, self.graph)
        of, features = cluster.fingerprint, shipped().features
        return self.training.cost_model(
            cluster, calibration, self.graph, trials=lambda basis: lessons(trials, of, basis, features)
        )


def priced(circumstance: str) -> None:
    """Says on stderr which circumstance is looked at."""
    progress(f"pricing and searching {circumstance}")


def lowered(plan: Plan, made: ModelArgument, optimizer: str | None) -> tuple[TrainingGraph, StepProgram]:
    """The model's graph, and the plan lowered for it. Raises `PlanMismatchError` where the model is another one."""
    from autopar.strategies.lowering import lower_plan

    graph, context = _fitting(plan, _training(made, optimizer))
    return graph, lower_plan(plan.groups, graph, context)


def _training(made: ModelArgument, optimizer: str | None) -> Training:
    from autopar.cli.model_argument import chosen_optimizer
    from autopar.runtime.compiled import Settings
    from autopar.training import Training

    chosen = chosen_optimizer(made, optimizer)
    mode: Mode = "step" if chosen is not None else "module"
    training = Training(made.model, made.example_inputs, Settings(made.loss_fn), chosen, mode)
    training.settle()
    return training


def _fitting(plan: Plan, training: Training) -> tuple[TrainingGraph, Context]:
    """The model's graph, and what strategies may depend on. Raises `PlanMismatchError` where the plan is of another
    model."""
    graph = training.graph(plan.recompute)
    plan.check_model(graph.model)
    context = training.context(plan.cluster.world_size, late_parameters=True)
    return graph, context.on(plan.cluster.cluster)
