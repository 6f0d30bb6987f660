"""Trains a case eagerly in this process, and with autopar on this rank."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

import autopar
from autopar.ir.batch import call_model, flatten, module_batch
from autopar.ir.build import named_parameters, training_graph
from autopar.ir.model_output import find_loss, output_tensors
from autopar.ir.training_graph import TrainingGraph
from autopar.ops.fragments import Fragment
from autopar.runtime.compiled import Settings
from autopar.runtime.drop_in.gradient_program import GradientProgram
from autopar.runtime.drop_in.module import SyncedModule
from autopar.runtime.job.process_group import Group, Rendezvous
from autopar.runtime.optimizers.optimizer import context_for, optimizer_scope
from autopar.runtime.program import Program
from autopar.runtime.uncaptured.gradient_program import EagerGradientProgram
from autopar.spec.plan import Plan
from autopar.strategies import Context
from autopar.training import Training
from benchmarks.fuzz.case import Case
from benchmarks.fuzz.plans import random_plan
from benchmarks.fuzz.source import Built, Tree, joined, map_batch, trainable

Weighting = Literal["joined", "equal", "samples"]
"""How ranks' batches make one loss: as one batch; or averaged as DDP would, equally, or by their samples."""


@dataclass
class Record:
    """What a training has led to, after each step."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[Tree] = field(default_factory=list)
    parameters: list[Tree] = field(default_factory=list)
    buffers: list[Tree] = field(default_factory=list)
    inputs: list[Tree] = field(default_factory=list)
    outputs: list[Tree] = field(default_factory=list)
    observed: list[list[tuple[Fragment, torch.Tensor]]] = field(default_factory=list)
    """Gradients as a program's optimizer was given them."""
    warned: list[str] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)
    """Digests of the random numbers that the model has drawn in each step, where it keeps them."""


def batches_of(built: Built, step: int, rank: int) -> list[Any]:
    """A rank's micro-batches of a step."""
    case = built.case
    sizes = case.samples[rank]
    return [built.batch(n, case.data_seed + 1000 * step + 100 * rank + 10 * i) for i, n in enumerate(sizes)]


def eager(
    built: Built, weighting: Weighting = "joined", noise: float = 0.0, like: nn.Module | None = None, rounding: int = 0,
    traced: bool = False,
) -> Record:  # fmt: skip
    """Training in one process. `noise`: changes parameters by so much of their values first; `like`: a model whose
    values to begin with, and to whose dtype its batches are rounded, in float64; `rounding`: unless 0, a seed by which
    each step's loss and gradients are those of parameters that are a rounding off, while it updates those that are
    not; `traced`: runs the model as PyTorch traces it, without autopar."""
    case, record = built.case, Record()
    model, loss_fn = built.model(), built.loss_fn()
    if like is not None:
        _copy(like, model)
    if noise:
        _disturb(model, noise)
    if traced:
        model.compile(backend="aot_eager", dynamic=False)
    parameters = trainable(model, loss_fn)
    optimizer = built.optimizer(parameters)
    if case.unfused:
        for group in optimizer.param_groups:
            group["fused"] = False
    scheduler = built.scheduler(optimizer)
    dtype = getattr(torch, case.dtype)
    torch.manual_seed(case.data_seed)
    for step in range(case.steps):
        built.event(step, model=model, optimizer=optimizer, loss=loss_fn, program=model)
        parts = [b for r in range(case.world_size) for b in batches_of(built, step, r)]
        if like is not None:
            parts = [map_batch(b, lambda t: t.to(dtype).double() if t.is_floating_point() else t) for b in parts]
        optimizer.zero_grad()
        record.inputs.append({})
        record.outputs.append({})
        put_back = _rounded(parameters, 1000 * rounding + step) if rounding else None
        if weighting == "joined":
            batch = joined(parts)
            loss = _loss(built, model, loss_fn, batch, record)
            if case.sums and case.entry == "module":  # which sees no loss, and takes the mean over ranks, as DDP does
                loss = loss / case.world_size
        else:
            loss = _by_rank(built, model, loss_fn, parts, weighting, record)
        loss.backward()  # type: ignore[no-untyped-call]
        if put_back is not None:
            put_back()
        _end_of_step(built, record, model, loss_fn, parameters, optimizer, scheduler, loss)
    return record


def _by_rank(
    built: Built, model: nn.Module, loss_fn: Any, parts: list[Any], weighting: Weighting, record: Record
) -> torch.Tensor:
    """The mean of each rank's losses on its own batches. All begin with the same buffers, of which rank 0's stay."""
    weights = [float(len(flatten(p).tensors[0])) if weighting == "samples" else 1.0 for p in parts]
    ranks = [r for r, sizes in enumerate(built.case.samples) for _ in sizes]
    first = {n: b.clone() for n, b in model._buffers.items() if b is not None}
    of_rank_0: dict[str, torch.Tensor | None] = {}
    loss = torch.zeros(())
    for i, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        if i and ranks[i] != ranks[i - 1]:
            of_rank_0 = of_rank_0 or dict(model._buffers)
            model._buffers.update({n: b.clone() for n, b in first.items()})
        loss = loss + _loss(built, model, loss_fn, part, record) * (weight / sum(weights))
    model._buffers.update(of_rank_0)
    return loss


def _loss(built: Built, model: nn.Module, loss_fn: Any, batch: Any, record: Record) -> torch.Tensor:
    asked = _ask_for_gradients(built, batch)
    output, target = call_model(model, batch, loss_fn is not None)
    record.outputs[-1] = {f"output {i}": t.detach().clone() for i, t in enumerate(output_tensors(_plain(output)))}
    loss: torch.Tensor = find_loss(output if loss_fn is None else loss_fn(output, target))
    for name, tensor in asked.items():
        tensor.register_hook(lambda g, name=name: record.inputs[-1].__setitem__(name, g.detach().clone()))  # type: ignore[no-untyped-call]
    return loss


def _plain(output: Any) -> Any:
    return vars(output) if hasattr(output, "logits") and not isinstance(output, dict) else output


def _ask_for_gradients(built: Built, batch: Any) -> Tree:
    if not built.case.input_gradients:
        return {}
    inputs = batch if isinstance(batch, dict) else batch[0]
    named = {n for n, _ in built.case.inputs}
    return {n: t.requires_grad_() for n, t in inputs.items() if n in named and t.is_floating_point()}


def _end_of_step(
    built: Built, record: Record, model: nn.Module, loss_fn: Any, parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer, scheduler: Any, loss: torch.Tensor,
) -> None:  # fmt: skip
    """The update of a training loop that a user writes, and what to remember of it."""
    if built.case.clip is not None:
        record.gradients.append({})
        torch.nn.utils.clip_grad_norm_(parameters, built.case.clip)
    else:
        named = named_parameters(model, loss_fn)
        record.gradients.append({n: p.grad.clone() for n, p in named.items() if p.grad is not None})
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    _remember(record, model, loss_fn, loss)


def _remember(record: Record, model: nn.Module, loss_fn: Any, loss: torch.Tensor) -> None:
    record.losses.append(loss.detach().clone())
    record.parameters.append({n: p.detach().clone() for n, p in named_parameters(model, loss_fn).items()})
    record.buffers.append({n: b.detach().clone() for n, b in model.named_buffers()})


def _copy(source: nn.Module, target: nn.Module) -> None:
    with torch.no_grad():
        for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
            mine.copy_(theirs)
        for held, given in zip(target.buffers(), source.buffers(), strict=True):
            held.copy_(given)


def _disturb(model: nn.Module, noise: float) -> None:
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + noise * torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p.dtype))


def _rounded(parameters: Sequence[nn.Parameter], seed: int) -> Callable[[], None]:
    """Moves each element by a rounding, up or down, or not at all; what is returned puts them back."""
    draw = torch.Generator().manual_seed(seed)
    before = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p in parameters:
            signs = torch.randint(-1, 2, p.shape, generator=draw).to(p.dtype)
            p.mul_(1 + torch.finfo(p.dtype).eps * signs)

    def put_back() -> None:
        with torch.no_grad():
            for p, value in zip(parameters, before, strict=True):
                p.copy_(value)

    return put_back


@dataclass(frozen=True)
class Prepared:
    """A case made ready on this rank: errors until here are those of a case that cannot be used, or refusals."""

    built: Built
    model: nn.Module
    loss_fn: Any
    optimizer: torch.optim.Optimizer
    parameters: list[nn.Parameter]
    program: Program | SyncedModule
    plan: Plan


@contextlib.contextmanager
def said(record: Record) -> Iterator[None]:
    """Remembers autopar's warnings; others are not asked for."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    record.warned += [str(w.message) for w in caught if issubclass(w.category, autopar.AutoparWarning)]


def prepare(built: Built, group: Group) -> Prepared:
    """Optimizes the case's model on this rank."""
    case = built.case
    torch.manual_seed(case.data_seed)
    model, loss_fn = built.model(), built.loss_fn()
    parameters = trainable(model, loss_fn)
    optimizer = built.optimizer(parameters)
    batch = batches_of(built, 0, group.rank)[0]
    is_module = case.entry == "module"
    example = batch[0] if is_module and isinstance(batch, tuple) else batch
    settings: dict[str, Any] = {"unused_parameters": case.unused, "example_inputs": example}
    settings |= {"capture": "never"} if case.eager else {}
    if not is_module:
        settings |= {"optimizer": optimizer, "loss_fn": loss_fn, "clip_grad_norm": case.clip}
        settings |= {"late_parameters": case.late}
    if group.world_size == 1:
        if case.plan_seed or case.groups:
            graph, context = _graph(built, model, loss_fn, optimizer, example, group)
            settings["plan"] = random_plan(case, graph, context)
        program = autopar.optimize(model, **settings)
        return Prepared(built, model, loss_fn, optimizer, parameters, program, program.plan)
    graph, context = _graph(built, model, loss_fn, optimizer, example, group)
    text = Rendezvous(group).from_rank_0("plan", lambda: random_plan(case, graph, context).model_dump_json())
    plan = Plan.loads(text, "rank 0's plan")
    if case.entry == "optimize":
        program = autopar.optimize(model, plan=plan, timeout_s=group.timeout_s, **settings)
        return Prepared(built, model, loss_fn, optimizer, parameters, program, plan)
    chosen = _settings(case, None if is_module else loss_fn)
    made: Program | SyncedModule
    if is_module:
        passes = (EagerGradientProgram if case.eager else GradientProgram)(model, plan, group, chosen, context)
        passes.adopt(graph, module_batch(model, example))
        made = SyncedModule(passes)
    else:
        made = Program(model, plan, group, optimizer, chosen, context)
        made.adopt(graph, example)
    return Prepared(built, model, loss_fn, optimizer, parameters, made, plan)


def _graph(
    built: Built, model: nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, example: Any, group: Group
) -> tuple[TrainingGraph, Context]:
    case = built.case
    is_module = case.entry == "module"
    batch = module_batch(model, example) if is_module else flatten(example)
    if case.eager:
        training = Training(
            model, example, _settings(case, None if is_module else loss_fn), None if is_module else optimizer,
            "module" if is_module else "step",
        )  # fmt: skip
        training.settle(group)
        graph = training.graph()
    elif is_module:
        graph = training_graph(model, batch, None, "module", case.unused)
    else:
        graph = training_graph(model, batch, loss_fn, "step", case.unused, case.recompute)
    if is_module:
        return graph, context_for(group.world_size, None, "element", None, False)
    scope = optimizer_scope(optimizer, None)
    return graph, context_for(group.world_size, optimizer, scope, case.clip, True, case.late)


def _settings(case: Case, loss_fn: Any) -> Settings:
    return Settings(loss_fn, case.clip, None, case.unused, capture="never" if case.eager else "auto")


def run(prepared: Prepared, group: Group) -> Record:
    """Trains with autopar."""
    built, record = prepared.built, Record()
    scheduler = built.scheduler(prepared.optimizer)
    if isinstance(prepared.program, Program) and built.case.clip is None:
        _observe(prepared.program, record)
    torch.manual_seed(built.case.data_seed)
    for step in range(built.case.steps):
        built.event(step, model=prepared.model, loss=prepared.loss_fn, optimizer=prepared.optimizer,
                    program=prepared.program)  # fmt: skip
        record.inputs.append({})
        record.outputs.append({})
        record.observed.append([])
        batches = batches_of(built, step, group.rank)
        if isinstance(prepared.program, Program):
            program = prepared.program
            loss = program.step(micro_batches=batches) if len(batches) > 1 else program.step(batches[0])
            if scheduler is not None:
                scheduler.step()
            if group.world_size == 1:
                _remember(record, prepared.model, prepared.loss_fn, loss)
            else:
                record.losses.append(loss.detach().clone())
        else:
            prepared.optimizer.zero_grad()
            loss = _module_loss(prepared, batches[0], record)
            loss.backward()  # type: ignore[no-untyped-call]
            _end_of_step(
                built, record, prepared.model, prepared.loss_fn, prepared.parameters, prepared.optimizer, scheduler,
                loss,
            )  # fmt: skip
        drawn = dict(prepared.model.named_buffers()).get("drawn")
        shared = getattr(prepared.program, "_eager", None) is not None  # as buffers are that such a model writes
        record.drawn += [] if drawn is None or shared else [str(drawn.sum().item())]
    if group.world_size > 1 and isinstance(prepared.program, Program):
        with prepared.program.gathered():
            record.parameters = [
                {n: p.detach().clone() for n, p in named_parameters(prepared.model, prepared.loss_fn).items()}
            ]
    return record


def _module_loss(prepared: Prepared, batch: Any, record: Record) -> torch.Tensor:
    assert isinstance(prepared.program, SyncedModule)
    return _loss(prepared.built, prepared.program, prepared.loss_fn, batch, record)


def _observe(program: Program, record: Record) -> None:
    program.observe(lambda fragment, gradient: record.observed[-1].append((copy.copy(fragment), gradient.clone())))
