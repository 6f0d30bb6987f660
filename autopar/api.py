"""The two ways in: `plan`, which needs neither a cluster nor a process group, and `optimize`, which runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from autopar.errors import CaptureError, InfeasibleError, PlanMismatchError
from autopar.ir.batch import example_batch, flatten
from autopar.ir.build import Unused, model_fingerprint, named_parameters, training_graph
from autopar.ir.training_graph import TrainingGraph
from autopar.runtime.captures import signature_key
from autopar.runtime.compiled import Check, Settings
from autopar.runtime.compute import Compiler
from autopar.runtime.inductor import check_compiler
from autopar.runtime.module import SyncedModule, module_batch
from autopar.runtime.optimizer import Scope, check_optimizer, context_for, described, optimizer_scope
from autopar.runtime.process_group import Group, Rendezvous, join, take_from_rank_0
from autopar.runtime.profile import node_seconds
from autopar.runtime.program import Program
from autopar.spec.calibration import Calibration
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import Fidelity, Plan, Recompute
from autopar.spec.topology import Topology
from autopar.strategies.base import Context

if TYPE_CHECKING:
    from autopar.cost_models import CostModel

Progress = Callable[[str, int, float], None]
"""Is told what the search does, how many plans it has priced, and the best step time so far in seconds."""

PLAN_VARIABLE = "AUTOPAR_PLAN"
"""The environment variable in which `autopar run` hands a plan's path to the script."""


def plan(
    model: nn.Module,
    cluster: ClusterSpec,
    *,
    example_inputs: Any = None,
    loss_fn: Any = None,
    optimizer: Optimizer | None = None,
    mode: Literal["step", "module"] = "step",
    strategy: str | None = None,
    fidelity: Fidelity = "exact",
    late_parameters: bool = False,
    clip_grad_norm: float | None = None,
    calibration: Calibration | None = None,
    measure_compute: bool = False,
    time_budget_s: float = 10.0,
    seed: int = 0,
    unused_parameters: Unused = "error",
    optimizer_acts_on: Scope | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Plans the synchronization of `model` on `cluster`, without running anything on it.

    `example_inputs`: one rank's batch. `mode`: "step" for `optimize` with an optimizer, "module" for without.
    `strategy`: a plan by name ("ddp", "PS", "Parallax", ...) instead of a search. The other arguments are those of
    `optimize`.
    """
    batch = example_batch(model) if example_inputs is None else example_inputs
    flat = module_batch(model, batch) if mode == "module" and loss_fn is None else flatten(batch)
    scope = optimizer_scope(optimizer, optimizer_acts_on)
    context = context_for(cluster.world_size, optimizer, scope, clip_grad_norm, mode == "step", late_parameters)

    def make(recompute: Recompute) -> Plan:
        graph = training_graph(model, flat, loss_fn, mode, unused_parameters, recompute)
        nodes = node_seconds(graph, model, flat, loss_fn) if measure_compute else None
        cost_model = _cost_model(cluster, optimizer, calibration, nodes)
        return _plan(graph, cluster, context, cost_model, strategy, fidelity, time_budget_s, seed, progress)

    return _that_fits(make, mode == "step")


@overload
def optimize(
    model: nn.Module, cluster_spec: ClusterSpec | None = None, *, optimizer: Optimizer, **settings: Any
) -> Program: ...
@overload
def optimize(
    model: nn.Module, cluster_spec: ClusterSpec | None = None, *, optimizer: None = None, **settings: Any
) -> SyncedModule: ...
def optimize(  # type: ignore[misc]  # the overloads say which result, this says which settings
    model: nn.Module,
    cluster_spec: ClusterSpec | None = None,
    *,
    example_inputs: Any = None,
    loss_fn: Any = None,
    optimizer: Optimizer | None = None,
    plan: Plan | None = None,
    strategy: str | None = None,
    fidelity: Fidelity = "exact",
    late_parameters: bool = False,
    clip_grad_norm: float | None = None,
    weight: Callable[[Any], float] | None = None,
    unused_parameters: Unused = "error",
    optimizer_acts_on: Scope | None = None,
    calibration: Calibration | None = None,
    measure_compute: bool = False,
    time_budget_s: float = 10.0,
    timeout_s: float = 300.0,
    seed: int = 0,
    check: Check = "first",
    compile: bool = False,
    progress: Progress | None = None,
) -> Program | SyncedModule:
    """Makes `model` a distributed training program on the ranks of this job (torchrun's, or this process alone).

    With `optimizer`, the whole training step is the program: `loss = program.step(batch)`. Without, the result is a
    drop-in `nn.Module` whose `backward()` leaves synchronized gradients, as `DistributedDataParallel` does.

    Args:
        model: its parameters and buffers are made equal to rank 0's.
        cluster_spec: what to plan for; by default the plan's cluster, or what `ClusterSpec.detect()` sees.
        example_inputs: one batch of this rank: a dict of keyword inputs, a tuple of positional inputs, or a tensor;
            by default the model's own (`example_input_array`, Hugging Face's `dummy_inputs`).
        loss_fn: `loss_fn(output, target)`, for batches `(inputs, target)`; by default the model's own loss.
        plan: applied as it is; by default the one of `autopar run`, or one that is searched for on rank 0.
        strategy: a plan by name instead of a search.
        fidelity: what the search may choose from; "rounded" allows 16-bit gradients on the wire.
        late_parameters: allows plans that leave updated parameters on their way while the next step's forward pass
            begins. What runs, saves or loads the model receives them first; to read `p.data` yourself, as a moving
            average of weights does, call `program.synchronize()` before.
        clip_grad_norm: clips by the global norm before the update, as `torch.nn.utils.clip_grad_norm_` does.
        weight: from a batch to how much it counts in the global mean; by default what the loss is a mean over.
        unused_parameters: "error", or "freeze" those that get no gradient.
        optimizer_acts_on: "element" or "parameter", for an optimizer that is not PyTorch's own: the smallest unit
            whose update depends on nothing else.
        calibration: what `calibrate` measured on the cluster; predictions rest on it in place of data sheets.
        measure_compute: times the model's forward and backward pass here, a few runs of them, and takes that for what
            devices of this kind do; else they are computed from what the devices reach.
        check: which steps are compared with the model run eagerly: the "first", "always", or "never".
        timeout_s: how long a collective may wait for a late rank.
        compile: has inductor, PyTorch's compiler, compile the compute between communication, equal layers once. The
            plan is the same. It takes minutes rather than seconds, and a C++ compiler (on GPUs, Triton).

    Raises:
        CaptureError: the model cannot be captured as one graph; the message has the line.
        CompileError: `compile` is set, and the machine lacks a compiler, or the compiler fails.
        OptimizerError: the optimizer's parameters are not the model's.
        PlanMismatchError: the plan is for another model, cluster or number of ranks, or ranks disagree.
    """
    _check_unwrapped(model)
    group = join(timeout_s)
    parameters = named_parameters(model, loss_fn)
    if compile:
        check_compiler(next(iter(parameters.values())).device)
    if optimizer is not None:
        check_optimizer(optimizer, parameters)
    plan = plan or _plan_from_environment()
    if plan is not None:
        plan.check_world_size(group.world_size)
        if cluster_spec is not None and cluster_spec.fingerprint.digest != plan.cluster.digest:
            raise PlanMismatchError(
                "the plan was made for another cluster: "
                + "; ".join(plan.cluster.cluster.difference(cluster_spec)[:5])
                + ". Plan again, or leave cluster_spec out to run the plan as it is"
            )
    said = f"{described(optimizer, parameters)}, {clip_grad_norm=}, {unused_parameters=}, {late_parameters=}, {check=}"
    said += f", {compile=}" if compile else ""
    _check_alike(model, loss_fn, group, said, plan)
    batch = example_batch(model) if example_inputs is None else example_inputs
    mode: Literal["step", "module"] = "step" if optimizer is not None else "module"
    flat = module_batch(model, batch) if mode == "module" else flatten(batch)
    _make_equal(model, loss_fn, group)

    def capture(recompute: Recompute) -> TrainingGraph:
        return training_graph(model, flat, loss_fn if mode == "step" else None, mode, unused_parameters, recompute)

    graph = capture("none" if plan is None else plan.recompute)
    scope = optimizer_scope(optimizer, optimizer_acts_on)
    context = context_for(group.world_size, optimizer, scope, clip_grad_norm, mode == "step", late_parameters)
    if plan is None:

        def make(recompute: Recompute) -> Plan:
            seen = graph if recompute == "none" else capture(recompute)
            cluster = job_cluster(cluster_spec, group)
            nodes = node_seconds(seen, model, flat, loss_fn) if measure_compute else None
            cost_model = _cost_model(cluster, optimizer, calibration, nodes)
            return _plan(seen, cluster, context, cost_model, strategy, fidelity, time_budget_s, seed, progress)

        plan = _plan_on_rank_0(group, lambda: _that_fits(make, mode == "step"))
        if plan.recompute != "none":
            graph = capture(plan.recompute)
    compiler = Compiler() if compile else None
    settings = Settings(loss_fn, clip_grad_norm, weight, unused_parameters, check, compiler)
    key = signature_key(model, flat)
    if optimizer is None:
        module = SyncedModule(model, plan, group, settings, context)
        module.adopt(key, graph, flat)
        return module
    program = Program(model, plan, group, optimizer, settings, context)
    program.adopt(key, graph)
    return program


def _check_unwrapped(model: nn.Module) -> None:
    """Raises `CaptureError` where the model is wrapped already, by something else that synchronizes gradients."""
    wrapper = type(model).__name__
    if isinstance(model, DistributedDataParallel) or wrapper in ("FullyShardedDataParallel", "SyncedModule"):
        raise CaptureError(
            f"the model is wrapped in {wrapper} already, which synchronizes gradients itself: pass the model that is "
            "wrapped, model.module"
        )


def job_cluster(given: ClusterSpec | None, group: Group) -> ClusterSpec:
    """The cluster of this job: as it is given, or what `ClusterSpec.detect()` sees. Raises `PlanMismatchError` where it
    has another number of ranks."""
    if given is None:  # one process is one rank, however many devices the machine has
        given = ClusterSpec.local(1) if group.pg is None else ClusterSpec.detect()
    cluster = given
    if cluster.world_size != group.world_size:
        raise PlanMismatchError(
            f"the cluster description has {cluster.world_size} devices ({cluster.summary}), this job has "
            f"{group.world_size} ranks: start one rank a device, with torchrun, or describe the cluster that is used"
        )
    return cluster


def _cost_model(
    cluster: ClusterSpec, optimizer: Optimizer | None, calibration: Calibration | None, nodes: dict[str, float] | None
) -> CostModel:
    """`nodes`: seconds of the graph's nodes, as measured here, on a device of rank 0's kind."""
    from autopar.cost_models import ADAMW, cost_model_for, optimizer_cost

    if calibration is not None:
        calibration.check_cluster(cluster.fingerprint)
    updates = ADAMW if optimizer is None else optimizer_cost(type(optimizer).__name__, optimizer.param_groups[0])
    measured_s = None if nodes is None else {Topology(cluster).ranks[0].device.kind: nodes}
    return cost_model_for(updates, measured_s, calibration)


def _that_fits(make: Callable[[Recompute], Plan], may_recompute: bool) -> Plan:
    """A plan that keeps all activations; where none fits, one that computes some of them again, or most."""
    try:
        return make("none")
    except InfeasibleError:
        if not may_recompute:
            raise
    try:
        return make("selective")
    except InfeasibleError:
        return make("full")


def _plan(
    graph: TrainingGraph,
    cluster: ClusterSpec,
    context: Context,
    cost_model: CostModel,
    strategy: str | None,
    fidelity: Fidelity,
    time_budget_s: float,
    seed: int,
    progress: Progress | None,
) -> Plan:
    from autopar.search import Budget, build_plan, search

    if strategy is not None:
        return build_plan(strategy, graph, cluster, context, fidelity=fidelity, cost_model=cost_model)
    return search(
        graph,
        cluster,
        context,
        fidelity=fidelity,
        budget=Budget(time_s=time_budget_s),
        seed=seed,
        cost_model=cost_model,
        progress=progress,
    )


def _plan_on_rank_0(group: Group, make: Callable[[], Plan]) -> Plan:
    """Searches on one rank alone: a search under a time budget need not end alike on two machines."""
    text = Rendezvous(group).from_rank_0("plan text", lambda: make().model_dump_json())
    return Plan.loads(text, "rank 0's plan")


def _plan_from_environment() -> Plan | None:
    path = os.environ.get(PLAN_VARIABLE)
    return Plan.load(path) if path else None


def _check_alike(model: nn.Module, loss_fn: Any, group: Group, settings: str, plan: Plan | None) -> None:
    """Raises `PlanMismatchError` unless all ranks call `optimize` alike, before anything of one is sent to another."""
    rendezvous = Rendezvous(group)
    rendezvous.agree_on_model(model_fingerprint(model, loss_fn))
    rendezvous.agree("settings", settings)
    rendezvous.agree("plan", "none, so one is searched for" if plan is None else f"'{plan.name}' ({plan.digest})")


def _make_equal(model: nn.Module, loss_fn: Any, group: Group) -> None:
    """Rank 0's parameters and buffers, on every rank."""
    owners = [model, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]
    tensors = [t for owner in owners for t in (*owner.parameters(), *owner.buffers())]
    take_from_rank_0(tensors, group, "making the ranks' models equal")
