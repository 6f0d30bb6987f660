"""Simulates one step of a plan again, with its timeline: what a report draws, and a plan does not hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.cli.model_argument import ModelArgument
    from autopar.cost_models.base import Estimate
    from autopar.ir.capture import Mode
    from autopar.spec.calibration import Calibration
    from autopar.spec.plan import Plan


def estimate(
    plan: Plan, made: ModelArgument, optimizer: str | None, calibration: Calibration | None = None
) -> Estimate:
    """What the cost model says of a plan, for the model and the cluster that it was made for.

    Raises `PlanMismatchError` where the model is another one, `SpecError` where the calibration is of another cluster.
    """
    from autopar.cli.model_argument import chosen_optimizer
    from autopar.planning import Training
    from autopar.runtime.compiled import Settings
    from autopar.spec.topology import Topology
    from autopar.strategies.lowering import lower_plan

    chosen = chosen_optimizer(made, optimizer)
    mode: Mode = "step" if chosen is not None else "module"
    training = Training(made.model, made.example_inputs, Settings(made.loss_fn), chosen, mode)
    graph = training.graph(plan.recompute)
    plan.check_model(graph.model)
    cluster = plan.cluster.cluster
    context = training.context(plan.cluster.world_size, late_parameters=True)
    program = lower_plan(plan.groups, graph, context.on(cluster))
    return training.cost_model(cluster, calibration).predict(graph, program, Topology(cluster), timeline=True)
