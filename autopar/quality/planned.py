"""A choice under a budget for a training job, whose plans are searched, built and priced as `autopar.plan` does."""

from __future__ import annotations

from torch.optim import Optimizer

from autopar.cost_models import CostModel
from autopar.errors import SpecError
from autopar.ops.context import Context
from autopar.planning import Planner
from autopar.quality.budget import QualityBudget
from autopar.quality.candidates import Plans
from autopar.quality.choice import choose
from autopar.quality.probe import Job
from autopar.runtime.job.process_group import Group
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import Fidelity, Plan
from autopar.training import Training


def check_budget(
    budget: QualityBudget | None,
    optimizer: Optimizer | None,
    strategy: str | None,
    fidelity: Fidelity,
    plan: Plan | None,
) -> None:
    """Raises `SpecError` where something else already decides what the budget is to decide."""
    if budget is None:
        return
    if optimizer is None:
        raise SpecError("budget= needs the optimizer: lossy methods keep what they have not sent from step to step")
    given = f"the strategy '{strategy}'" if strategy else f"fidelity='{fidelity}'" if fidelity != "exact" else None
    given = f"the plan '{plan.name}'" if plan is not None else given
    if given is not None:
        raise SpecError(f"budget= chooses the plan, and {given} is given as well: leave one of the two out")


def choose_for(
    training: Training,
    planner: Planner,
    cluster: ClusterSpec,
    group: Group,
    budget: QualityBudget,
    sizes: tuple[int, ...] = (),
) -> Plan:
    """By all ranks together; plans are made on rank 0. The planner's own fidelity has no effect. `sizes`: of all ranks'
    examples, where ranks gather samples.

    Raises `InfeasibleError` where no exact plan that keeps all activations fits the devices.
    """
    from autopar.search import Budget, search

    assert training.optimizer is not None
    graph = training.graph()
    context: Context = training.context(cluster.world_size, planner.late_parameters)
    of_all = sizes if graph.joint is not None and graph.joint.gathers else ()
    job = Job(training.model, training.optimizer, training.settings, graph, context, group, training.batch, of_all)
    priced: list[CostModel] = []

    def price() -> str:
        priced.append(planner.setting(training, cluster, graph)[1])
        return "priced"

    training.timing.lead(price)
    cost_model = priced[0] if priced else None
    limits = planner.constraints
    plans = Plans.of(
        graph,
        cluster,
        context,
        cost_model,
        limits,
        lambda fidelity: search(
            graph,
            cluster,
            context,
            fidelity=fidelity,
            constraints=limits,
            budget=Budget(time_s=planner.time_budget_s),
            seed=planner.seed,
            cost_model=cost_model,
            progress=planner.progress,
        ),
    )
    return choose(job, plans, budget)
