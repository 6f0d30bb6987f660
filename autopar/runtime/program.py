"""The program: a model's training step, rewritten by a plan, and run on this rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.errors import SignatureError
from autopar.ir.batch import Batch, flatten
from autopar.ir.build import named_parameters, training_graph
from autopar.ir.training_graph import TrainingGraph
from autopar.runtime import checkpoint, collectives
from autopar.runtime.buffers import shared_buffers
from autopar.runtime.captures import Captures, check_batches, signature_key
from autopar.runtime.compiled import CompiledStep, Settings
from autopar.runtime.drift import StepTimes
from autopar.runtime.eager import owners_of
from autopar.runtime.fragments import Fragment
from autopar.runtime.late import LateParameters
from autopar.runtime.local_proof import copies
from autopar.runtime.loss_meaning import LossMeaning
from autopar.runtime.modules import Observer, Update
from autopar.runtime.optimizer import OptimizerPart, ParameterGroups
from autopar.runtime.order import CollectiveOrder
from autopar.runtime.parts import added
from autopar.runtime.process_group import Group, Rendezvous, average_buffers, take_from_rank_0
from autopar.runtime.random import RandomStream
from autopar.runtime.resident import ResidentRows
from autopar.runtime.shared_memory import check_memory
from autopar.runtime.state import scatter_state
from autopar.runtime.step_proof import StepProofs
from autopar.runtime.step_writer import LocalWriter, StepWriter, batch_share, loss_share
from autopar.runtime.subject import Subject
from autopar.runtime.unchanged import Unchanged
from autopar.runtime.writer import NARROW, Target
from autopar.spec.plan import Plan
from autopar.strategies.base import Context
from autopar.strategies.lowering import lower_plan


class Program:
    """A distributed training step: `loss = program.step(batch)`.

    Every rank holds the same plan and calls `step` equally often. The gradient is that of one process's loss on the
    global batch, however uneven the ranks' batches are, and that loss is returned, on every rank; `docs/semantics.md`
    says how a batch counts, of every kind of loss.
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
        self._context = context.on(plan.cluster.cluster)
        self._rendezvous = Rendezvous(group)
        self._parameters = named_parameters(model, settings.loss_fn)
        self._device = next(iter(self._parameters.values())).device
        self._buffers = dict(model.named_buffers(remove_duplicate=False))
        if isinstance(settings.loss_fn, nn.Module):
            self._buffers |= {f"loss_fn.{n}": b for n, b in settings.loss_fn.named_buffers(remove_duplicate=False)}
        check_memory(self._parameters)
        self._resident = ResidentRows(model, self._parameters, group)
        self._late = LateParameters(model)
        self._held = ParameterGroups(optimizer, self._parameters)
        self._parts: dict[int, OptimizerPart] = {}
        self._resumed = {n: dict(optimizer.state[p]) for p, n in self._names().items() if p in optimizer.state}
        self._compiled: Captures[CompiledStep] = Captures(says=group.rank == 0)
        self._unchanged = Unchanged(owners_of(model, settings.loss_fn), self._buffers, optimizer)
        self._random = RandomStream(group.rank, group.world_size)
        self._order = CollectiveOrder(self._rendezvous, plan)
        self._meaning = LossMeaning(
            model, settings.loss_fn, settings.weight, self._rendezvous, self._buffers, self._device
        )
        self._loaded = False
        """Whether the optimizer's state came from a checkpoint, and parts of it lie with the parts of parameters."""
        subject = partial(
            Subject,
            model=model,
            loss_fn=settings.loss_fn,
            buffers=self._buffers,
            group=group,
            optimizer=optimizer,
            shows_updates=lambda: self._context.elementwise_update and not self._loaded,
            max_norm=settings.clip_grad_norm,
            observed=self._also_observed,
            gathered=self.gathered,
            random=lambda: self._random,
            snapshot=self._snapshot,
        )
        self._proofs = StepProofs(settings.check, subject, self._parameters, lambda: bool(self._resident.shards))
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
        return next(iter(self._compiled)).step

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
        self._unchanged.check()
        check_batches(batches, self._device, is_first=self._steps == 0)
        compiled = [self.compile_for(b) for b in batches]
        if self.world_size > 1 or len(batches) > 1:
            self._meaning.settle([c.weight for c in compiled], batches)
        originals = [batch] if micro_batches is None else list(micro_batches)
        run = partial(self._run, compiled, batches, originals)
        if self._proofs.is_due(self._steps):
            shares = self._shares_of(compiled, batches, originals)
            loss = self._proofs.step(compiled, batches, shares, run, is_first=self._steps == 0)
        else:
            for c, b in zip(compiled, batches, strict=True):
                self._proofs.capture(c, b)
            with self._times.one():
                loss = run()
        self._steps += 1
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what learning-rate schedulers look at
        return loss

    def compile_for(self, batch: Batch | Any) -> CompiledStep:
        """Captures, lowers and writes the step for a batch's signature, unless that was done before, and all that the
        model reads is still as it was then."""
        batch = batch if isinstance(batch, Batch) else flatten(batch)
        key = signature_key(self.model, batch)
        known = self._compiled.find(key)
        if known is not None:
            return known
        with self._resident.traceable(), self._late.traceable():
            unused, recompute = self.settings.unused_parameters, self.plan.recompute
            graph = training_graph(self.model, batch, self.settings.loss_fn, unused=unused, recompute=recompute)
        return self.adopt(key, graph)

    def adopt(self, key: Hashable, graph: TrainingGraph) -> CompiledStep:
        """Lowers and writes a captured graph."""
        self.plan.check_model(graph.model)
        assert graph.recompute == self.plan.recompute, "the graph was captured for another plan"
        program = lower_plan(self.plan.groups, graph, self._context)
        self._order.check(program, graph)
        self._resident.spread(m.slice.name for m in program.resident_members)
        assert graph.joint is not None and graph.joint.weight is not None
        step = StepWriter(graph, program, self._target()).write()
        compiled = CompiledStep(graph, program, graph.joint.weight, shared_buffers(graph.joint, self._group), step)
        self._compiled.add(key, graph.joint.guards, compiled)
        self._observe(step)
        return compiled

    def synchronize(self) -> None:
        """Receives parameters that are still on their way from the last step, as plans made with `late_parameters`
        leave them; to be called, on any rank, before parameters are read or changed otherwise than by the next step,
        by running the model, or by saving it."""
        try:
            self._late.arrive()
        except collectives.CommunicationFailure:
            # A guard counts what all ranks do together, which this need not be: it is entered to explain, no more.
            with self._group.guard("parameters on their way"):
                raise

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

        `model` and `optimizer` are in PyTorch's own form and load into a plain model and optimizer; `random` is every
        rank's stream. Write it with `torch.save` on one rank, read it with `torch.load(weights_only=True)` on all; or
        use `torch.distributed.checkpoint`.

        Raises `CollectiveError`, with the rank, where another one does not call it.
        """
        self.synchronize()
        return checkpoint.save(self._owner())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state that this or any other plan, or one process, has saved; to be called by all ranks
        together, with the same state. Raises `SpecError` where it does not fit, before anything is changed."""
        self.synchronize()
        checkpoint.load(self._owner(), state)
        self._resumed, self._loaded = {}, True

    def _owner(self) -> checkpoint.Owner:
        loss_fn = self.settings.loss_fn if isinstance(self.settings.loss_fn, nn.Module) else None
        return checkpoint.Owner(
            self.model,
            loss_fn,
            self.optimizer,
            self._names(),
            frozenset(m.name for g in self.plan.groups for m in g.members),
            self._context.elementwise_update,
            self._random,
            self._group,
            tuple(self._parts.values()),
            self._parameters,
            tuple(self._buffers.values()),
            self._resident,
        )

    def _names(self) -> dict[nn.Parameter, str]:
        return {self._parameters[p.name]: p.name for p in self.plan.model.parameters if p.name in self._parameters}

    def observe(self, observer: Observer | None) -> None:
        """Has every synchronized gradient that this rank updates with shown to `observer`, fragment by fragment."""
        self._observer = observer
        for compiled in self._compiled:
            self._observe(compiled.step)
            if compiled.finish is not None:
                self._observe(compiled.finish)

    @contextmanager
    def _also_observed(self, observer: Observer, alone: bool) -> Iterator[None]:
        users = self._observer

        def both(fragment: Fragment, gradient: torch.Tensor) -> None:
            observer(fragment, gradient)
            if users is not None and not alone:
                users(fragment, gradient)

        self.observe(both)
        try:
            yield
        finally:
            self.observe(users)

    def _observe(self, module: torch.fx.GraphModule) -> None:
        for m in (m for m in module.children() if isinstance(m, Update)):
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
            compiled=self.settings.compiled,
        )

    def _part(self, index: int, parts: tuple[Fragment, ...]) -> OptimizerPart:
        if index not in self._parts:
            self._parts[index] = OptimizerPart(self.optimizer, parts, self._parameters)
            if self._resumed:  # the optimizer came with state
                scatter_state([self._parts[index]], self._resumed, self._parameters)
        return self._parts[index]

    def _run(self, compiled: list[CompiledStep], batches: list[Batch], originals: list[Any]) -> torch.Tensor:
        with torch.no_grad(), self._random, self._group.guard(f"step {self._steps}"):
            if len(batches) == 1:
                loss = self._run_one(compiled[0], batches[0], originals[0])
            else:
                loss = self._run_many(compiled, batches, originals)
        shared = [self._buffers[n] for n in compiled[-1].shared_buffers]
        take_from_rank_0(shared, self._group, f"buffers of step {self._steps}")
        return loss

    def _shares_of(self, compiled: list[CompiledStep], batches: list[Batch], originals: list[Any]) -> list[float]:
        """How much of the global batch each micro-batch is. By all ranks together."""
        if self.world_size == 1 and len(batches) == 1:
            return [1.0]
        each = zip(compiled, batches, originals, strict=True)
        weights = [self._meaning.weigh(c.weight, b, o) for c, b, o in each]
        with self._group.guard("the proof of the first step"):
            return self._shares(torch.stack(weights)).tolist()

    def _snapshot(self) -> Callable[[], None]:
        """Copies what a step changes: parameters, the optimizer's state, buffers, random numbers; what is returned puts
        that back."""
        self.synchronize()
        whole = [p.detach() for n, p in self._parameters.items() if n not in self._resident.shards]
        put_back = [
            copies([*self._buffers.values(), *self._resident.shards.values(), *whole]),
            *(part.kept_state() for part in self._parts.values()),
            self._random.kept(),
        ]

        def back() -> None:
            self.synchronize()
            for one in put_back:
                one()

        return back

    def _run_one(self, compiled: CompiledStep, batch: Batch, original: Any) -> torch.Tensor:
        arguments = compiled.arguments(batch, self._parameters, self._buffers)
        if self.world_size == 1:
            return compiled.step(*arguments, compiled.tangent(1.0, self._device)).detach()  # type: ignore[no-any-return]
        weight = total = self._meaning.weigh(compiled.weight, batch, original)
        if self._meaning.is_sum:  # a share of 1
            weight, total = torch.full_like(weight, self.world_size), torch.ones_like(weight)
        loss = compiled.step(*arguments, weight, total)
        return loss.to(compiled.loss_dtype)  # type: ignore[no-any-return]

    def _run_many(self, compiled: list[CompiledStep], batches: list[Batch], originals: list[Any]) -> torch.Tensor:
        """All but the last micro-batch add to local gradients; the last one's step synchronizes and updates."""
        if compiled[-1].loss_dtype in NARROW:
            raise SignatureError(
                "micro-batches are weighted through the loss, which this model computes in 16 bits, too few for that: "
                "compute it from float32 values, as in cross_entropy(logits.float(), target)"
            )
        weights = [self._meaning.weigh(c.weight, b, o) for c, b, o in zip(compiled, batches, originals, strict=True)]
        shares = self._shares(torch.stack(weights))
        earlier: dict[str, Any] = {}
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        for c, b, share in zip(compiled[:-1], batches[:-1], shares[:-1], strict=True):
            loss += loss_share(self._accumulate(c, b, float(share), earlier), share)
        last = compiled[-1]
        if last.finish is None:
            last.finish = StepWriter(last.graph, last.program, self._target()).write(accumulated=True)
            self._observe(last.finish)
        ordered = [earlier[p.name] for p in last.graph.parameters]
        earlier.clear()
        share = shares[-1]
        arguments = last.arguments(batches[-1], self._parameters, self._buffers)
        found = last.finish(*arguments, last.tangent(float(share), self._device), *ordered, share, loss)
        if self._group.name is None:
            found = loss + loss_share(found, share)
        return found.to(last.loss_dtype)  # type: ignore[no-any-return]

    def _accumulate(self, c: CompiledStep, batch: Batch, seed: float, into: dict[str, Any]) -> torch.Tensor:
        """Adds a micro-batch's gradients, or the parts that they are made of, to `into`; returns its loss."""
        if c.local is None:
            c.local = LocalWriter(c.graph, c.program, self._target()).write()
        arguments = c.arguments(batch, self._parameters, self._buffers)
        loss, buffers, gradients = c.local(*arguments, c.tangent(seed, self._device))
        for (name, _), value in zip(c.joint.mutations, buffers, strict=True):
            self._buffers[name].copy_(value)
        for name, gradient in gradients.items():
            if isinstance(gradient, tuple):
                into[name] = added(into[name], gradient) if name in into else gradient
            elif name in into:
                into[name].add_(gradient)
            else:  # a copy, for two parameters may have one and the same gradient tensor
                into[name] = gradient.clone(memory_format=torch.contiguous_format)
        return loss  # type: ignore[no-any-return]

    def _shares(self, weights: torch.Tensor) -> torch.Tensor:
        """Of each of this rank's micro-batches in the global batch, from how much they count."""
        if self._meaning.is_sum:
            return torch.ones_like(weights)
        total = weights.sum()
        if self._group.name is not None:
            total = collectives.wait(collectives.all_reduce(total, self._group.name))
        return batch_share(weights, total, torch.float64, self.world_size * len(weights))
