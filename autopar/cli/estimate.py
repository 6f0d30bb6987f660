"""Simulates one step of a plan again, with its timeline: what a report draws, and a plan does not hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.cli.model_argument import ModelArgument
    from autopar.cost_models.base import Estimate
    from autopar.spec.calibration import Calibration
    from autopar.spec.plan import Plan


def estimate(
    plan: Plan, made: ModelArgument, optimizer: str | None, calibration: Calibration | None = None
) -> Estimate:
    """What the cost model says of a plan, for the model and the cluster that it was made for.

    Raises `PlanMismatchError` where the model is another one, `SpecError` where the calibration is of another cluster.
    """
    from autopar.cli.model_argument import chosen_optimizer
    from autopar.cost_models import cost_model_for, optimizer_cost
    from autopar.ir.batch import example_batch, flatten
    from autopar.ir.build import training_graph
    from autopar.ir.capture import Mode
    from autopar.runtime.module import module_batch
    from autopar.runtime.optimizer import context_for, optimizer_scope
    from autopar.spec.topology import Topology
    from autopar.strategies.lowering import lower_plan

    chosen = chosen_optimizer(made, optimizer)
    inputs = example_batch(made.model) if made.example_inputs is None else made.example_inputs
    without = chosen is None
    batch = module_batch(made.model, inputs) if without and made.loss_fn is None else flatten(inputs)
    mode: Mode = "module" if without else "step"
    graph = training_graph(made.model, batch, made.loss_fn, mode, recompute=plan.recompute)
    plan.check_model(graph.model)
    scope = optimizer_scope(chosen)
    context = context_for(plan.cluster.world_size, chosen, scope, None, not without, late_parameters=True)
    cluster = plan.cluster.cluster
    program = lower_plan(plan.groups, graph, context.on(cluster))
    cost = optimizer_cost(type(chosen).__name__, chosen.param_groups[0]) if chosen else optimizer_cost("AdamW")
    if calibration is not None:
        calibration.check_cluster(cluster.fingerprint)
    model = cost_model_for(cost, calibration=calibration)
    return model.predict(graph, program, Topology(cluster), timeline=True)
