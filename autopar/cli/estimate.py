"""Simulates one step of a plan again, with its timeline: what a report draws, and a plan does not hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.cli.model_argument import ModelArgument
    from autopar.cost_models.base import Estimate
    from autopar.ir.capture import Mode
    from autopar.ir.training_graph import TrainingGraph
    from autopar.ops.context import Context
    from autopar.planning import Training
    from autopar.spec.calibration import Calibration
    from autopar.spec.plan import Plan
    from autopar.strategies.lowering import StepProgram


def estimate(
    plan: Plan, made: ModelArgument, optimizer: str | None, calibration: Calibration | None = None
) -> Estimate:
    """What the cost model says of a plan, for the model and the cluster that it was made for.

    Raises `PlanMismatchError` where the model is another one, `SpecError` where the calibration is of another cluster.
    """
    from autopar.cost_models.steps import predict_steps
    from autopar.spec.topology import Topology

    training, cluster = _training(made, optimizer), plan.cluster.cluster
    graph, context = _fitting(plan, training)
    model = training.cost_model(cluster, calibration)
    return predict_steps(model, plan.groups, graph, context, Topology(cluster), timeline=True)


def lowered(plan: Plan, made: ModelArgument, optimizer: str | None) -> tuple[TrainingGraph, StepProgram]:
    """The model's graph, and the plan lowered for it. Raises `PlanMismatchError` where the model is another one."""
    from autopar.strategies.lowering import lower_plan

    graph, context = _fitting(plan, _training(made, optimizer))
    return graph, lower_plan(plan.groups, graph, context)


def _training(made: ModelArgument, optimizer: str | None) -> Training:
    from autopar.cli.model_argument import chosen_optimizer
    from autopar.planning import Training
    from autopar.runtime.compiled import Settings

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
