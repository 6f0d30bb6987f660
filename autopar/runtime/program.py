"""The program: a model's training step, rewritten by a plan, and run on this rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.errors import PlanMismatchError, SignatureError
from autopar.ir.batch import Batch, flatten
from autopar.ir.build import Unused, named_parameters, training_graph
from autopar.ir.training_graph import TrainingGraph
from autopar.ir.weights import BatchWeight, batch_weight
from autopar.runtime import collectives
from autopar.runtime.drift import StepTimes
from autopar.runtime.fragments import Fragment
from autopar.runtime.late import LateParameters
from autopar.runtime.modules import Observer, Update
from autopar.runtime.optimizer import OptimizerPart, ParameterGroups
from autopar.runtime.parts import added
from autopar.runtime.process_group import Group, Rendezvous, average_buffers
from autopar.runtime.random import RandomStream
from autopar.runtime.resident import ResidentRows
from autopar.runtime.state import as_torch, from_torch, gather_state, scatter_state
from autopar.runtime.step_writer import LocalWriter, StepWriter, loss_share
from autopar.runtime.writer import NARROW, Target
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import Plan
from autopar.strategies.base import Context
from autopar.strategies.lowering import StepProgram, lower_plan

Weight = Callable[[Any], float] | None


@dataclass(frozen=True)
class Settings:
    """What a program computes, besides what the plan says."""

    loss_fn: Any = None
    clip_grad_norm: float | None = None
    weight: Weight = None
    """From a batch to how much it counts in the global mean; `None`: read off the loss."""
    unused_parameters: Unused = "error"


@dataclass(eq=False)
class _Compiled:
    """One batch signature's graphs."""

    graph: TrainingGraph
    program: StepProgram
    weight: BatchWeight
    step: torch.fx.GraphModule
    finish: torch.fx.GraphModule | None = None
    """The step's last micro-batch, written when first needed."""
    local: torch.fx.GraphModule | None = None
    """Another micro-batch, likewise."""


class Program:
    """A distributed training step: `loss = program.step(batch)`.

    Every rank holds the same plan and calls `step` equally often. The gradient is that of the mean over the global
    batch, however uneven the ranks' batches are; the returned loss is the global mean, on every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        group: Group,
        optimizer: Optimizer,
        settings: Settings,
        context: Context,
    ) -> None:
        self.model = model
        self.plan = plan
        self.optimizer = optimizer
        self.settings = settings
        self._group = group
        self._context = context.on(ClusterSpec.model_validate(plan.cluster.spec))
        self._rendezvous = Rendezvous(group)
        self._parameters = named_parameters(model, settings.loss_fn)
        self._device = next(iter(self._parameters.values())).device
        self._buffers = dict(model.named_buffers(remove_duplicate=False))
        if isinstance(settings.loss_fn, nn.Module):
            self._buffers |= {f"loss_fn.{n}": b for n, b in settings.loss_fn.named_buffers(remove_duplicate=False)}
        self._resident = ResidentRows(model, self._parameters, group)
        self._late = LateParameters(model)
        self._held = ParameterGroups(optimizer, self._parameters)
        self._parts: dict[int, OptimizerPart] = {}
        self._resumed = {n: dict(optimizer.state[p]) for p, n in self._names().items() if p in optimizer.state}
        self._compiled: dict[Any, _Compiled] = {}
        self._random = RandomStream(group.rank, group.world_size)
        self._order = CollectiveOrder(self._rendezvous, plan)
        self._observer: Observer | None = None
        self._steps = 0
        self._times = StepTimes(plan.prediction, group.rank == 0, self._device.type == "cuda")

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def world_size(self) -> int:
        return self._group.world_size

    @property
    def graph_module(self) -> torch.fx.GraphModule:
        """The rewritten step on this rank, for the first batch signature: `print(program.graph_module.code)`."""
        return next(iter(self._compiled.values())).step

    @property
    def step_time_s(self) -> float | None:
        """The median of the first steps that count, as measured on this rank; None before there are enough of them.
        What was predicted is `plan.prediction.step_time_s`."""
        return self._times.median_s

    def step(self, batch: Any = None, *, micro_batches: Sequence[Any] | None = None) -> torch.Tensor:
        """One optimizer step on this rank's batch, or on several micro-batches as on one batch; returns the global
        mean loss, detached.

        Raises `SignatureError` where the batch cannot be used, `CaptureError` where a batch of a new shape cannot be
        captured, and `CollectiveError`, naming the rank, where another rank is late or gone.
        """
        if (batch is None) == (micro_batches is None):
            raise SignatureError("step takes one batch, or micro_batches=[...], not both and not neither")
        batches = [flatten(batch)] if micro_batches is None else [flatten(b) for b in micro_batches]
        if not batches:
            raise SignatureError("micro_batches is empty: a step needs at least one")
        self._held.check()
        compiled = [self.compile_for(b) for b in batches]
        originals = [batch] if micro_batches is None else list(micro_batches)
        with self._times.one(), torch.no_grad(), self._random, self._group.guard(f"step {self._steps}"):
            if len(batches) == 1:
                loss = self._run_one(compiled[0], batches[0], originals[0])
            else:
                loss = self._run_many(compiled, batches, originals)
        self._steps += 1
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what learning-rate schedulers look at
        return loss

    def compile_for(self, batch: Batch | Any) -> _Compiled:
        """Captures, lowers and writes the step for a batch's signature, unless that was done before."""
        batch = batch if isinstance(batch, Batch) else flatten(batch)
        key = signature_key(self.model, batch)
        if key in self._compiled:
            return self._compiled[key]
        with self._resident.traceable(), self._late.traceable():
            unused, recompute = self.settings.unused_parameters, self.plan.recompute
            graph = training_graph(self.model, batch, self.settings.loss_fn, unused=unused, recompute=recompute)
        return self.adopt(key, graph)

    def adopt(self, key: Hashable, graph: TrainingGraph) -> _Compiled:
        """Lowers and writes a captured graph."""
        self.plan.check_model(graph.model)
        assert graph.recompute == self.plan.recompute, "the graph was captured for another plan"
        program = lower_plan(self.plan.groups, graph, self._context)
        self._order.check(program)
        self._resident.spread(m.slice.name for m in program.resident_members)
        assert graph.joint is not None
        weight = batch_weight(graph.joint, graph.batch_size)
        step = StepWriter(graph, program, self._target()).write()
        compiled = _Compiled(graph, program, weight, step)
        self._compiled[key] = compiled
        self._observe(step)
        return compiled

    def synchronize(self) -> None:
        """Receives parameters that are still on their way from the last step, as plans made with `late_parameters`
        leave them; to be called, on any rank, before parameters are read or changed otherwise than by the next step,
        by running the model, or by saving it."""
        with self._group.guard("parameters on their way"):
            self._late.arrive()

    def synchronize_buffers(self) -> None:
        """Averages floating-point buffers over the ranks; to be called by all ranks together.

        Batch normalization normalizes each rank's batch by itself, as with DDP, so running statistics differ between
        ranks until then. They are averaged rather than taken from rank 0, so that none of the data is left out.
        """
        average_buffers(self._buffers.values(), self._group)

    def gathered(self) -> AbstractContextManager[None]:
        """While it is open, the model is whole on every rank, to be evaluated, saved or changed; to be entered by all
        ranks together.

        Only plans that spread parameters over the ranks need it (`program.plan.explain()` says so); a model whose rows
        are elsewhere refuses to run outside of a step.
        """
        self.synchronize()
        return self._resident.gathered()

    def state_dict(self) -> dict[str, Any]:
        """Model and optimizer as one process would have them, whatever the plan; to be called by all ranks together.

        `model` and `optimizer` are in PyTorch's own form and load into a plain model and optimizer; `random` is this
        rank's stream. Write them with `torch.save` on one rank, read them with `torch.load(weights_only=True)`.
        """
        self.synchronize_buffers()
        state = gather_state(self._parts.values(), self._parameters, self._group)
        with self.gathered():
            whole = self.model.state_dict()
        return {
            "model": whole,
            "optimizer": as_torch(state, self.optimizer, self._names()),
            "random": self._random.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state that this or any other plan, or one process, has saved."""
        with self.gathered():
            self.model.load_state_dict(state["model"])
        scatter_state(
            self._parts.values(), from_torch(state["optimizer"], self.optimizer, self._names()), self._parameters
        )
        self._random.load_state(state.get("random", []))

    def _names(self) -> dict[nn.Parameter, str]:
        listed = {n for p in self.plan.model.parameters for n in (p.name,)}
        return {p: n for n, p in self._parameters.items() if n in listed}

    def observe(self, observer: Observer | None) -> None:
        """Has every synchronized gradient that this rank updates with shown to `observer`, fragment by fragment."""
        self._observer = observer
        for compiled in self._compiled.values():
            self._observe(compiled.step)
            if compiled.finish is not None:
                self._observe(compiled.finish)

    def _observe(self, module: torch.fx.GraphModule) -> None:
        for m in module.children():
            if isinstance(m, Update):
                m.observer = self._observer

    def _target(self) -> Target:
        return Target(
            rank=self._group.rank,
            world_size=self._group.world_size,
            group=self._group,
            parameters=self._parameters,
            shards=self._resident.shards,
            part=self._part,
            late=self._late.of,
            max_norm=self.settings.clip_grad_norm,
        )

    def _part(self, index: int, parts: tuple[Fragment, ...]) -> OptimizerPart:
        if index not in self._parts:
            self._parts[index] = OptimizerPart(self.optimizer, parts, self._parameters)
            if self._resumed:  # the optimizer came with state
                scatter_state([self._parts[index]], self._resumed, self._parameters)
        return self._parts[index]

    def _run_one(self, compiled: _Compiled, batch: Batch, original: Any) -> torch.Tensor:
        arguments = self._arguments(compiled, batch)
        if self.world_size == 1:
            return compiled.step(*arguments, self._tangent(compiled, 1.0)).detach()  # type: ignore[no-any-return]
        weight = self._weight(compiled, batch, original)
        loss = compiled.step(*arguments, weight, weight)
        return loss.to(_loss_dtype(compiled))  # type: ignore[no-any-return]

    def _run_many(self, compiled: list[_Compiled], batches: list[Batch], originals: list[Any]) -> torch.Tensor:
        """All but the last micro-batch add to local gradients; the last one's step synchronizes and updates."""
        if _loss_dtype(compiled[-1]) in NARROW:
            raise SignatureError(
                "micro-batches are weighted through the loss, which this model computes in 16 bits, too few for that: "
                "compute it from float32 values, as in cross_entropy(logits.float(), target)"
            )
        weights = [self._weight(c, b, o) for c, b, o in zip(compiled, batches, originals, strict=True)]
        total = torch.stack(weights).sum()
        if self._group.name is not None:
            total = collectives.wait(collectives.all_reduce(total, self._group.name))
        earlier: dict[str, Any] = {}
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        for c, b, w in zip(compiled[:-1], batches[:-1], weights[:-1], strict=True):
            loss += loss_share(self._accumulate(c, b, float(w / total), earlier), w / total)
        last = compiled[-1]
        if last.finish is None:
            last.finish = StepWriter(last.graph, last.program, self._target()).write(accumulated=True)
            self._observe(last.finish)
        seed = float(weights[-1] / total)
        ordered = [earlier[p.name] for p in last.graph.parameters]
        earlier.clear()
        share = weights[-1] / total
        found = last.finish(*self._arguments(last, batches[-1]), self._tangent(last, seed), *ordered, share, loss)
        if self._group.name is None:
            found = loss + loss_share(found, share)
        return found.to(_loss_dtype(last))  # type: ignore[no-any-return]

    def _accumulate(self, c: _Compiled, batch: Batch, seed: float, into: dict[str, Any]) -> torch.Tensor:
        """Adds a micro-batch's gradients, or the parts that they are made of, to `into`; returns its loss."""
        joint = c.graph.joint
        assert joint is not None
        if c.local is None:
            c.local = LocalWriter(c.graph, c.program, self._target()).write()
        loss, buffers, gradients = c.local(*self._arguments(c, batch), self._tangent(c, seed))
        for (name, _), value in zip(joint.mutations, buffers, strict=True):
            self._buffers[name].copy_(value)
        for name, gradient in gradients.items():
            if isinstance(gradient, tuple):
                into[name] = added(into[name], gradient) if name in into else gradient
            elif name in into:
                into[name].add_(gradient)
            else:  # a copy, for two parameters may have one and the same gradient tensor
                into[name] = gradient.clone(memory_format=torch.contiguous_format)
        return loss  # type: ignore[no-any-return]

    def _arguments(self, compiled: _Compiled, batch: Batch) -> list[torch.Tensor]:
        joint = compiled.graph.joint
        assert joint is not None
        arguments: list[torch.Tensor] = []
        for kind, key in joint.inputs:
            if kind == "parameter":
                arguments.append(self._parameters[str(key)])
            elif kind == "buffer":
                arguments.append(self._buffers[str(key)])
            elif kind == "batch":
                tensor = batch.tensors[int(key)]
                arguments.append(tensor.to(self._device, non_blocking=True))
        return arguments

    def _weight(self, compiled: _Compiled, batch: Batch, original: Any) -> torch.Tensor:
        if self.settings.weight is not None:
            return torch.tensor(float(self.settings.weight(original)), dtype=torch.float64, device=self._device)
        return compiled.weight.of(batch.tensors).to(self._device)

    def _tangent(self, compiled: _Compiled, seed: float) -> torch.Tensor:
        joint = compiled.graph.joint
        assert joint is not None
        like = joint.outputs[0].meta["val"]  # a fake tensor: its shape and dtype alone
        return torch.full(tuple(like.shape), seed, dtype=like.dtype, device=self._device)


def _loss_dtype(compiled: _Compiled) -> torch.dtype:
    joint = compiled.graph.joint
    assert joint is not None
    return joint.outputs[0].meta["val"].dtype  # type: ignore[no-any-return]


class CollectiveOrder:
    """Holds every program of a plan, on every rank, to one order of collectives, before the first is issued."""

    def __init__(self, rendezvous: Rendezvous, plan: Plan) -> None:
        self._rendezvous = rendezvous
        self._plan = plan
        self._hash: str | None = None

    def check(self, program: StepProgram) -> None:
        """Raises `PlanMismatchError` where ranks, or batches of different shapes, would issue different collectives."""
        if self._hash is None:
            self._rendezvous.agree("plan", self._plan.digest)
            self._rendezvous.agree("order of collectives", program.order_hash)
            self._hash = program.order_hash
        elif program.order_hash != self._hash:
            raise PlanMismatchError(
                "this batch leads to another order of collectives than the first one: ranks would exchange the wrong "
                "tensors. Does the model's structure depend on the batch?"
            )


def signature_key(model: nn.Module, batch: Batch) -> Hashable:
    """What a captured graph is valid for: the batch's signature, each module's mode, and autocast."""
    key = (batch.signature, tuple(m.training for m in model.modules()), _autocast_state())
    try:
        hash(key)
    except TypeError as e:
        raise SignatureError(
            f"the batch holds a value that is no tensor and cannot be compared: {e}. Pass tensors, numbers or strings"
        ) from e
    return key


def _autocast_state() -> tuple[Any, ...]:
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices)
