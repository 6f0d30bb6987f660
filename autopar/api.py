"""The two ways in: `plan`, which needs neither a cluster nor a process group, and `optimize`, which runs."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

from torch import nn
from torch.optim import Optimizer

from autopar.errors import PlanMismatchError, SpecError
from autopar.ir.build import Unused, model_fingerprint, named_parameters
from autopar.ir.capture import Mode
from autopar.ir.gradient_modes import gradients_recorded
from autopar.ir.passes import EVERY, Passes
from autopar.planning import Planner, Progress, check_choices, check_objects
from autopar.quality.budget import QualityBudget
from autopar.quality.planned import check_budget, choose_for
from autopar.quality.program import BudgetedProgram
from autopar.runtime.captures import MOST_CAPTURES
from autopar.runtime.compiled import Capture, Check, LossFn, Settings, Weight
from autopar.runtime.compiling.compute import Compiler
from autopar.runtime.compiling.inductor import check_compiler
from autopar.runtime.drop_in.gradient_program import GradientProgram
from autopar.runtime.drop_in.module import SyncedModule
from autopar.runtime.gathering import gathering, sizes_of
from autopar.runtime.job.process_group import Group, join, take_from_rank_0
from autopar.runtime.job.same_call import check_same_call, job_cluster
from autopar.runtime.loss_scale import LossScaling, scaler_of
from autopar.runtime.model.eager import owners_of
from autopar.runtime.model.frequencies import say_frequencies
from autopar.runtime.model.padding import Pad, Padding
from autopar.runtime.model.wrapped import check_has_values, check_unwrapped
from autopar.runtime.optimizers.joint_optimizer import joined
from autopar.runtime.optimizers.optimizer import Scope, check_optimizer, described
from autopar.runtime.program import Program
from autopar.runtime.sync_batch_norm import check_captured, synchronize_batch_norm
from autopar.runtime.uncaptured.gradient_program import EagerGradientProgram
from autopar.search.constraints import Constraints, Pinned
from autopar.search.options import SearchOptions
from autopar.spec.calibration import Calibration
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import Fidelity, Plan
from autopar.spec.plan_variable import plan_from_environment
from autopar.training import Training


@gradients_recorded()
def plan(
    model: nn.Module,
    cluster: ClusterSpec,
    *,
    example_inputs: Any = None,
    loss_fn: LossFn | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    mode: Mode = "step",
    strategy: str | None = None,
    fidelity: Fidelity = "exact",
    late_parameters: bool = False,
    memory_reserve: float = 0.1,
    pin: Mapping[str, Pinned] | None = None,
    forbid: Collection[str] = (),
    clip_grad_norm: float | None = None,
    outputs: bool = False,
    weight: Weight | None = None,
    calibration: Calibration | None = None,
    measure_compute: bool = False,
    time_budget_s: float = 10.0,
    seed: int = 0,
    unused_parameters: Unused = "error",
    optimizer_acts_on: Scope | None = None,
    capture: Capture = "auto",
    passes: Passes = EVERY,
    progress: Progress | None = None,
    search: SearchOptions | None = None,
    plan: Plan | None = None,
    trials: str | os.PathLike[str] | None = None,
) -> Plan:
    """Plans the synchronization of `model` on `cluster`, without running anything on it.

    Args:
        model: may be on the `meta` device, or made of fake tensors.
        example_inputs: one rank's batch.
        mode: "step" plans for `optimize` with an optimizer, "module" for `optimize` without one.
        strategy: the name of a plan ("ddp", "PS", "Parallax", ...), which is made instead of searching for one.
        plan: an edited plan, which is priced as it is, and labelled as its groups are, whatever `fidelity` says.
        search: the searcher, its journal, and what else `autopar search` offers.
        trials: a file of trials on this cluster, of this model or others, as `autopar search --trials` writes it;
            predictions are corrected by what it says.

    All others are those of `optimize`.

    Raises `InfeasibleError` where no plan, or the one that `strategy` names, fits the devices' memory: by how much, and
    the nearest change with which it would.
    """
    searched = {name: value for name, value in (("strategy", strategy), ("pin", pin), ("forbid", forbid)) if value}
    if plan is not None and searched:
        name, value = next(iter(searched.items()))
        raise SpecError(f"{name} is {value!r}, and plan is given: a plan that is priced as it is takes no {name}")
    check_choices(
        mode=mode,
        fidelity=fidelity,
        unused_parameters=unused_parameters,
        optimizer_acts_on=optimizer_acts_on,
        capture=capture,
    )
    outputs = outputs and mode == "step"
    settings = Settings(
        loss_fn, clip_grad_norm, weight, unused_parameters, passes=passes, capture=capture, outputs=outputs
    )
    check_objects(cluster=cluster, plan=plan, calibration=calibration)
    kept = Constraints.of(memory_reserve, pin, forbid)
    planner = Planner(
        strategy, fidelity, late_parameters, calibration, measure_compute, time_budget_s, seed, progress, plan, kept,
        search or SearchOptions(), None if trials is None else Path(trials),
    )  # fmt: skip
    training = Training(model, example_inputs, settings, joined(optimizer), mode, optimizer_acts_on)
    training.settle()
    return planner.plan(training, cluster)


@overload
def optimize(
    model: nn.Module,
    cluster_spec: ClusterSpec | None = None,
    *,
    optimizer: Optimizer | Sequence[Optimizer],
    example_inputs: Any = None,
    loss_fn: LossFn | None = None,
    plan: Plan | None = None,
    strategy: str | None = None,
    fidelity: Fidelity = "exact",
    budget: QualityBudget | None = None,
    late_parameters: bool = False,
    memory_reserve: float = 0.1,
    pin: Mapping[str, Pinned] | None = None,
    forbid: Collection[str] = (),
    clip_grad_norm: float | None = None,
    loss_scale: LossScaling | None = None,
    sync_batch_norm: bool = False,
    outputs: bool = False,
    weight: Weight | None = None,
    unused_parameters: Unused = "error",
    optimizer_acts_on: Scope | None = None,
    calibration: Calibration | None = None,
    trials: str | os.PathLike[str] | None = None,
    measure_compute: bool = False,
    time_budget_s: float = 10.0,
    timeout_s: float = 300.0,
    seed: int = 0,
    check: Check = "first",
    capture: Capture = "auto",
    compile: bool = False,
    max_captures: int = MOST_CAPTURES,
    pad: Pad | None = None,
    passes: Passes = EVERY,
    progress: Progress | None = None,
) -> Program: ...
@overload
def optimize(
    model: nn.Module,
    cluster_spec: ClusterSpec | None = None,
    *,
    optimizer: None = None,
    example_inputs: Any = None,
    plan: Plan | None = None,
    strategy: str | None = None,
    fidelity: Fidelity = "exact",
    memory_reserve: float = 0.1,
    pin: Mapping[str, Pinned] | None = None,
    forbid: Collection[str] = (),
    clip_grad_norm: float | None = None,
    sync_batch_norm: bool = False,
    outputs: bool = False,
    weight: Weight | None = None,
    unused_parameters: Unused = "error",
    calibration: Calibration | None = None,
    trials: str | os.PathLike[str] | None = None,
    measure_compute: bool = False,
    time_budget_s: float = 10.0,
    timeout_s: float = 300.0,
    seed: int = 0,
    check: Check = "first",
    capture: Capture = "auto",
    compile: bool = False,
    max_captures: int = MOST_CAPTURES,
    passes: Passes = EVERY,
    progress: Progress | None = None,
) -> SyncedModule: ...
@gradients_recorded()
def optimize(
    model: nn.Module,
    cluster_spec: ClusterSpec | None = None,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    example_inputs: Any = None,
    loss_fn: LossFn | None = None,
    plan: Plan | None = None,
    strategy: str | None = None,
    fidelity: Fidelity = "exact",
    budget: QualityBudget | None = None,
    late_parameters: bool = False,
    memory_reserve: float = 0.1,
    pin: Mapping[str, Pinned] | None = None,
    forbid: Collection[str] = (),
    clip_grad_norm: float | None = None,
    loss_scale: LossScaling | None = None,
    sync_batch_norm: bool = False,
    outputs: bool = False,
    weight: Weight | None = None,
    unused_parameters: Unused = "error",
    optimizer_acts_on: Scope | None = None,
    calibration: Calibration | None = None,
    trials: str | os.PathLike[str] | None = None,
    measure_compute: bool = False,
    time_budget_s: float = 10.0,
    timeout_s: float = 300.0,
    seed: int = 0,
    check: Check = "first",
    capture: Capture = "auto",
    compile: bool = False,
    max_captures: int = MOST_CAPTURES,
    pad: Pad | None = None,
    passes: Passes = EVERY,
    progress: Progress | None = None,
) -> Program | SyncedModule:
    """Makes `model` a distributed training program on the ranks of this job (torchrun's, or this process alone).

    With `optimizer`, the whole training step is the program: `loss = program.step(batch)`. Without, the result is a
    drop-in `nn.Module` whose `backward()` leaves synchronized gradients, as `DistributedDataParallel` does.

    Args:
        model: its parameters and buffers are made equal to rank 0's.
        cluster_spec: what to plan for; by default the plan's cluster, or what `ClusterSpec.detect()` sees.
        example_inputs: one batch of this rank, as a dict of keyword inputs, a tuple of positional inputs, or a tensor;
            by default the model's own (`example_input_array`, Hugging Face's `dummy_inputs`).
        optimizer: an optimizer of this model's parameters, or a list of several, each with parameters of its own.
            Settings may change between steps, as learning-rate schedulers change them.
        loss_fn: `loss_fn(output, target)`, for batches `(inputs, target)`; by default the model's own loss. Without
            `optimizer`, the loss is computed outside, and neither `loss_fn` nor `late_parameters` has an effect.
        plan: the plan to run, as it is; by default that of `autopar run`, or one that is searched for on rank 0.
        strategy: the name of a plan ("ddp", "PS", "Parallax", ...), which is made instead of searching for one.
        fidelity: "exact" allows plans that change nothing but the order of additions, "rounded" also those that send
            gradients in 16 bits.
        budget: how much a metric of yours may lose. Plans by all methods, lossy ones too, are then tried on copies of
            the model, for a minute and more; `program.plan.explain()` says which. In place of `fidelity`.
        late_parameters: allows plans that leave updated parameters on their way while the next step's forward pass
            begins. What runs, saves or loads the model receives them first; to read `p.data` yourself, as a moving
            average of weights does, call `program.synchronize()` before.
        memory_reserve: part of each device's memory that the plan keeps free, for what no prediction counts. Where none
            that fits does so, the plan that keeps most free is taken, with a warning.
        pin: strategies of parameters, by patterns of their names, which the search leaves as they are: `{"embed.*":
            "sparse_rows", "head.weight": "parameter_server(owner=1)"}`. The last pattern that matches counts.
        forbid: strategies that no group may use, by name.
        clip_grad_norm: the largest global norm of the gradients, to which `clip_grad_norm_` of PyTorch would clip them.
        loss_scale: what multiplies the loss so that small gradients survive float16 autocast: "dynamic", or a
            `torch.amp.GradScaler`, which is kept up to date. A step whose gradients are not finite updates nothing, on
            all ranks, and lowers the scale.
        sync_batch_norm: has batch normalization normalize over the global batch, as one process would, where each rank
            otherwise normalizes its own. The model's modules stay so. `torch.nn.SyncBatchNorm` always does.
        outputs: has every step keep the model's output, and plans for it, for `program.step(batch, outputs=True)`;
            without it, a step that asks for outputs is captured besides, and some plans cannot give them.
        weight: a function from a batch to how much it counts in the global mean, a number; by default, how many things
            the loss is a mean over. A dict or tuple of numbers where the loss returns one of terms with other means.
        unused_parameters: "error", or "freeze" those that get no gradient, and those that the optimizer does not hold,
            as another program trains them.
        optimizer_acts_on: "element" or "parameter", for an optimizer that is not PyTorch's own: the smallest unit
            whose update depends on nothing else.
        calibration: what `calibrate` measured on the cluster; predictions rest on it in place of data sheets.
        trials: the file that `autopar search --trials` has written on this cluster, of this model or others; what it
            says corrects predictions. Read on rank 0.
        measure_compute: times a few forward and backward passes of the model here, and updates of PyTorch's own
            optimizers, and predicts compute on all devices of this kind from these times, in place of the devices'
            figures.
        check: which steps are compared with the model run eagerly: the "first", "always", or "never".
        passes: which rewrite the captured graph: `Passes(without=("memory reused",))` leaves an optional one out,
            `Passes(also=(mine,))` runs one of your own. All ranks pass the same.
        timeout_s: how many seconds a collective may wait for a late rank.
        capture: "auto" runs the model eagerly where it cannot be captured as a graph, says why, and synchronizes its
            gradients beside its backward pass; "always" raises `CaptureError` there; "never" does so for any model.
        compile: has inductor, PyTorch's compiler, compile the compute between communication, equal layers once. The
            plan is the same, unless `measure_compute` is set and times what is compiled. It takes minutes rather than
            seconds, and a C++ compiler (on GPUs, Triton).
        max_captures: how many graphs are kept, each of batches of one signature, or of several that differ in sizes
            alone; the one that was used longest ago is let go of, and captured again when such a batch comes back.
        pad: pads batches to few lengths (dimension 1), for models whose sizes cannot be symbols and for `compile`; what
            inputs are padded with, by name or position: `{"input_ids": 0, "labels": -100, "attention_mask": 0}`. The
            first padded batch is compared with itself unpadded.
        time_budget_s, seed: seconds that the search may take, and the seed of its random numbers.
        progress: is called with what the search does, how many plans were priced, and the best step time in seconds.

    Raises:
        CaptureError: no parameter is trained, or one gets no gradient; the model or the batch has no values; with
            `capture="always"`, also where the model cannot be captured as one graph; the message has the line.
        CompileError: `compile` is set, and the machine lacks a compiler, or the compiler fails.
        OptimizerError: the optimizer's parameters are not the model's.
        PlanMismatchError: the plan is for another model, cluster or number of ranks, or ranks disagree.
        PlanError: a pin matches no parameter or cannot be used, or a strategy is not known.
        SpecError: an option has a value that is not one of its choices.
    """
    check_choices(
        fidelity=fidelity,
        unused_parameters=unused_parameters,
        optimizer_acts_on=optimizer_acts_on,
        check=check,
        capture=capture,
    )
    check_objects(cluster=cluster_spec, plan=plan, calibration=calibration)
    kept = Constraints.of(memory_reserve, pin, forbid)
    planner = Planner(
        strategy, fidelity, late_parameters, calibration, measure_compute, time_budget_s, seed, progress, None, kept,
        trials=None if trials is None else Path(trials), may_not_fit=True,
    )  # fmt: skip
    if max_captures < 1:
        raise SpecError(f"max_captures is {max_captures}: a program keeps the graphs of at least one batch signature")
    check_unwrapped(model)
    check_has_values(model, loss_fn, example_inputs)
    optimizer, scaler = joined(optimizer), scaler_of(loss_scale)
    if scaler is not None and optimizer is None:
        raise SpecError(
            "loss_scale needs the optimizer: without one, use torch.amp.GradScaler in your own loop, as without autopar"
        )
    group = join(timeout_s)
    parameters = named_parameters(model, loss_fn)
    if compile:
        check_compiler(next(iter(parameters.values())).device)
    if optimizer is not None:
        check_optimizer(optimizer, parameters, may_leave=unused_parameters == "freeze")
    plan = plan or plan_from_environment()
    check_budget(budget, optimizer, strategy, fidelity, plan)
    if plan is not None:
        plan.check_world_size(group.world_size)
        if cluster_spec is not None and cluster_spec.fingerprint.digest != plan.cluster.digest:
            raise PlanMismatchError(
                "the plan was made for another cluster: "
                + "; ".join(plan.cluster.cluster.difference(cluster_spec)[:5])
                + ". Plan again, or leave cluster_spec out to run the plan as it is"
            )
    said = f"{described(optimizer, parameters)}, {clip_grad_norm=}, {unused_parameters=}, {late_parameters=}, {check=}"
    said += f", {capture=}, {compile=}, {outputs=}, {sync_batch_norm=}"
    said += f", loss scale {'none' if scaler is None else scaler.state_dict()}, passes {passes.said}"
    said = said if budget is None else f"a budget of {budget.said}; {said}"
    check_same_call(model_fingerprint(model, loss_fn), group, said, plan)
    mode: Mode = "step" if optimizer is not None else "module"
    own_loss, compiler = loss_fn if mode == "step" else None, Compiler(proves=check != "never") if compile else None
    settings = Settings(
        own_loss,
        clip_grad_norm,
        weight,
        unused_parameters,
        check,
        passes,
        capture=capture,
        max_captures=max_captures,
        compiler=compiler,
        scaler=scaler,
        outputs=outputs and mode == "step",
    )
    if pad is not None:
        if optimizer is None:
            raise SpecError("pad= without an optimizer: the loss is computed outside, on outputs that would be padded")
        padding = Padding(pad, checks=check != "never")
        settings = replace(settings, padding=padding)
        example_inputs = example_inputs if example_inputs is None else padding.padded(example_inputs)
    training = Training(model, example_inputs, settings, optimizer, mode, optimizer_acts_on)
    _make_equal(model, loss_fn, group)
    say_frequencies(model, loss_fn, group)
    is_joined = synchronize_batch_norm(model, group, sync_batch_norm)
    sizes = sizes_of(training.batch.size, group, next(iter(parameters.values())).device)
    with gathering(group, sizes):
        training.settle(group)
        settings = training.settings
        graph = training.graph("none" if plan is None else plan.recompute)
        if budget is not None:
            plan = choose_for(training, planner, job_cluster(cluster_spec, group), group, budget, sizes)
        if plan is None:
            plan = planner.plan_on_rank_0(training, lambda: job_cluster(cluster_spec, group))
            graph = training.graph(plan.recompute)
        context = training.context(group.world_size, late_parameters)
        of_all = sizes if graph.joint is not None and graph.joint.gathers else ()
        if optimizer is None:
            check_captured(is_joined, training.eager)
            of = EagerGradientProgram if training.eager else GradientProgram
            gradients = of(model, plan, group, settings, context)
            gradients.adopt(graph, training.batch, sizes=of_all)
            return SyncedModule(gradients)
        made = Program if plan.quality is None else BudgetedProgram
        program = made(model, plan, group, optimizer, settings, context)
        program.adopt(graph, training.batch, sizes=of_all)
        return program


def _make_equal(model: nn.Module, loss_fn: Any, group: Group) -> None:
    """Rank 0's parameters and buffers, on every rank."""
    tensors = [t for owner in owners_of(model, loss_fn).values() for t in (*owner.parameters(), *owner.buffers())]
    take_from_rank_0(tensors, group, "making the ranks' models equal")
