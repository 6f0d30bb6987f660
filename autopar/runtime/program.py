"""The program: a model's training step, rewritten by a plan, and run on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.backends import collectives
from autopar.errors import SignatureError
from autopar.ir.batch import Batch
from autopar.ir.training_graph import TrainingGraph
from autopar.ops.context import Context
from autopar.ops.fragments import Fragment
from autopar.ops.parts import added
from autopar.ops.updates import Observer
from autopar.runtime import checkpoint, checkpoint_load, checkpoint_save
from autopar.runtime.base_program import BaseProgram, Write
from autopar.runtime.captures import check_batches
from autopar.runtime.compiled import Compiled, Settings
from autopar.runtime.deferred import DeferredParameters
from autopar.runtime.drift import StepTimes
from autopar.runtime.local_proof import copies
from autopar.runtime.looks import Observers
from autopar.runtime.loss_meaning import LossMeaning
from autopar.runtime.optimizer import OptimizerPart, ParameterGroups
from autopar.runtime.process_group import Group
from autopar.runtime.same_settings import SameSettings
from autopar.runtime.sharded_rows import ShardedRows
from autopar.runtime.shared_memory import Memory
from autopar.runtime.state import scatter_state
from autopar.runtime.states import States
from autopar.runtime.step_proof import StepProofs
from autopar.runtime.step_writer import LocalWriter, StepWriter, batch_share, loss_share
from autopar.runtime.subject import Subject
from autopar.runtime.writer import NARROW, Target
from autopar.spec.plan import Plan
from autopar.strategies.lowering import StepProgram
from autopar.strategies.timing import HELD, moments_of


class Program(BaseProgram):
    """A distributed training step: `loss = program.step(batch)`.

    Every rank holds the same plan and calls `step` equally often. The gradient is that of one process's loss on the
    global batch, however uneven the ranks' batches are, and that loss is returned, on every rank; `docs/semantics.md`
    says how a batch counts, of every kind of loss.
    """

    mode = "step"
    writers: ClassVar[Mapping[str, Write]] = {
        "step": lambda *of: StepWriter(*of).write(),
        "last micro-batch": lambda *of: StepWriter(*of).write(accumulated=True),
        "earlier micro-batch": lambda *of: LocalWriter(*of).write(),
    }
    needed = ("step",)

    def __init__(
        self, model: nn.Module, plan: Plan, group: Group, optimizer: Optimizer, settings: Settings, context: Context
    ) -> None:
        super().__init__(model, plan, group, settings, context, optimizer)
        self.optimizer = optimizer
        self._memory = Memory(self._parameters)
        self._sharded = ShardedRows(model, self._parameters, group)
        self._deferred = DeferredParameters(model)
        self._states = States(group, self._parameters, self._device)
        self._held = ParameterGroups(optimizer, self._parameters)
        self._same_settings = SameSettings(optimizer, group, self._device)
        self._parts: dict[int, OptimizerPart] = {}
        self._resumed = {n: dict(optimizer.state[p]) for p, n in self._names().items() if p in optimizer.state}
        self._meaning = LossMeaning(
            model, settings.loss_fn, settings.weight, self._rendezvous, self._buffers, self._device
        )
        self._has_stepped = False
        """Whether a step was run since the program was made; `_steps` goes on where a checkpoint was saved."""
        self._since = [0] * len(plan.groups)
        """Of each group, from which step on its gradients are held back, where a checkpoint did not have them."""
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
        self._proofs = StepProofs(settings.check, subject, self._parameters, lambda: bool(self._sharded.shards))
        self._observers = Observers()
        self._is_timed = any(g.timing for g in plan.groups)
        self._times = StepTimes(plan.prediction, group.rank == 0, self._device.type == "cuda")

    @property
    def graph_module(self) -> torch.fx.GraphModule:
        """The rewritten step on this rank, for the first batch signature: `print(program.graph_module.code)`."""
        return next(iter(self._compiled)).graphs["step"]

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
        batches = [self._flat(b) for b in ([batch] if micro_batches is None else micro_batches)]
        if not batches:
            raise SignatureError("micro_batches is empty: a step needs at least one")
        self._held.check()
        self._memory.check(self._sharded.shards)
        self._unchanged.check()
        check_batches(batches, self._device, is_first=not self._has_stepped)
        captures = [self.compile_for(b) for b in batches]
        compiled = captures
        if self._is_timed:
            moments = moments_of(self.plan.groups, self._steps, self._since)
            compiled = [self.at(c, moments) for c in captures]
        if self.world_size > 1 or len(batches) > 1:
            self._meaning.settle([c.weight for c in compiled], batches)
        originals = [batch] if micro_batches is None else list(micro_batches)
        run = partial(self._run, compiled, batches, originals)
        if self._proofs.is_due(self._has_stepped):
            shares = self._shares_of(compiled, batches, originals)
            loss = self._proofs.step(compiled, batches, shares, run, is_first=not self._has_stepped)
            for c in captures:
                c.proved = True
        else:
            for c, b in zip(captures, batches, strict=True):
                self._proofs.capture(c, b)
            with self._times.one():
                loss = run()
        self._steps += 1
        self._has_stepped = True
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what learning-rate schedulers look at
        return loss

    def synchronize(self) -> None:
        """Receives parameters that are still on their way from the last step, as plans made with `late_parameters`
        leave them; to be called, on any rank, before parameters are read or changed otherwise than by the next step,
        by running the model, or by saving it."""
        try:
            self._deferred.arrive()
        except collectives.CommunicationFailure:
            # A guard counts what all ranks do together, which this need not be: it is entered to explain, no more.
            with self._group.guard("parameters on their way"):
                raise

    def gathered(self) -> AbstractContextManager[None]:
        """While it is open, the model is whole on every rank, to be evaluated, saved or changed; to be entered by all
        ranks together.

        Only plans that spread parameters over the ranks need it (`program.plan.explain()` says so); a model whose rows
        are elsewhere refuses to run outside of a step.
        """
        self.synchronize()
        return self._sharded.gathered()

    def state_dict(self) -> dict[str, Any]:
        """Model and optimizer as one process would have them, whatever the plan; to be called by all ranks together.

        `model` and `optimizer` are in PyTorch's own form and load into a plain model and optimizer; `random` is every
        rank's stream. Write it with `torch.save` on one rank, read it with `torch.load(weights_only=True)` on all; or
        use `torch.distributed.checkpoint`.

        Raises `CollectiveError`, with the rank, where another one does not call it.
        """
        self.synchronize()
        self._same_settings.arrive()
        return checkpoint.save(self._owner())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state that this or any other plan, or one process, has saved; to be called by all ranks
        together, with the same state. Raises `SpecError` where it does not fit, before anything is changed."""
        self.synchronize()
        self._resume(checkpoint.load(self._owner(), state))

    def save(self, folder: str | Path) -> None:
        """Writes a checkpoint into a folder, in place of the one that it holds; to be called by all ranks together.

        Each rank writes what it has, and nothing is gathered: tensors as safetensors, all else as JSON. Any plan on any
        number of ranks loads it, and `autopar.load_checkpoint(folder)` reads it in one process. All ranks must see the
        folder, on a disk that their hosts share. Whatever happens meanwhile, the folder holds the old checkpoint or the
        new one.

        Raises `SpecError`, on all ranks, where one of them cannot write, and `CollectiveError`, with the rank, where
        another one does not call it.
        """
        self.synchronize()
        checkpoint_save.save(self._owner(), folder)

    def load(self, folder: str | Path) -> None:
        """Continues from a checkpoint that `save` wrote, under this or any other plan, on this or any other number of
        ranks; to be called by all ranks together. Raises `SpecError`, on all ranks, where it does not fit on one of
        them or is damaged, before anything is changed."""
        self.synchronize()
        self._resume(checkpoint_load.load(self._owner(), folder))

    def _resume(self, steps: int) -> None:
        """Goes on behind a checkpoint that was loaded."""
        found, names = self._states.found, self._states.names
        there = [all(n in found for n in names(i) if n[0].startswith(HELD)) for i in range(len(self.plan.groups))]
        self._steps, self._since = steps, [0 if complete else steps for complete in there]
        self._resumed, self._loaded = {}, True

    def _owner(self) -> checkpoint.Owner:
        groups = zip(self.plan.groups, self._since, strict=True)
        self._states.unsaved = frozenset(i for i, (g, s) in enumerate(groups) if s and self._steps < s + g.delay)
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
            self._sharded,
            self._states,
            self._states.pieces(),
            self._steps,
            local=frozenset(m.name for g in self.plan.groups if g.every > 1 for m in g.members),
            apart=any(m.doing == "alone" for m in moments_of(self.plan.groups, self._steps - 1)),
        )

    def _names(self) -> dict[nn.Parameter, str]:
        return {self._parameters[p.name]: p.name for p in self.plan.model.parameters if p.name in self._parameters}

    def observe(self, observer: Observer | None) -> None:
        """Has every gradient that this rank updates with shown to `observer`, fragment by fragment."""
        self._observers.users = observer
        self._watch()

    @contextmanager
    def _also_observed(self, updates: Observer, own: Observer, alone: bool) -> Iterator[None]:
        before = self._observers
        self._observers = Observers(None if alone else before.users, updates, own)
        self._watch()
        try:
            yield
        finally:
            self._observers = before
            self._watch()

    def _watch(self) -> None:
        for compiled in self._compiled:
            for one in (compiled, *compiled.others.values()):
                for graph in one.graphs.values():
                    self._observers.watch(graph)

    def _write(self, compiled: Compiled, name: str) -> torch.fx.GraphModule:
        graph = super()._write(compiled, name)
        self._observers.watch(graph)
        return graph

    def _lowered(self, graph: TrainingGraph, program: StepProgram, batch: Batch) -> Compiled:
        self._sharded.spread(m.slice.name for m in program.sharded_members)
        return super()._lowered(graph, program, batch)

    def _target(self) -> Target:
        return replace(
            super()._target(),
            shards=self._sharded.shards,
            part=self._part,
            deferred=self._deferred.of,
            state=self._states.of,
            same_settings=self._same_settings,
        )

    @contextmanager
    def _traceable(self) -> Iterator[None]:
        with self._sharded.traceable(), self._deferred.traceable():
            yield

    def _part(self, index: int, parts: tuple[Fragment, ...]) -> OptimizerPart:
        if index not in self._parts:
            self._parts[index] = OptimizerPart(self.optimizer, parts, self._parameters)
            if self._resumed:  # the optimizer came with state
                scatter_state([self._parts[index]], self._resumed, self._parameters)
        return self._parts[index]

    def _prove(self, compiled: Compiled, batch: Batch) -> None:
        self._proofs.capture(compiled, batch)

    def _run(self, compiled: list[Compiled], batches: list[Batch], originals: list[Any]) -> torch.Tensor:
        with torch.no_grad(), self._random, self._group.guard(f"step {self._steps}"):
            if len(batches) == 1:
                loss = self._run_one(compiled[0], batches[0], originals[0])
            else:
                loss = self._run_many(compiled, batches, originals)
        self._share_buffers(compiled[-1], f"step {self._steps}")
        return loss

    def _shares_of(self, compiled: list[Compiled], batches: list[Batch], originals: list[Any]) -> list[float]:
        """How much of the global batch each micro-batch is. By all ranks together."""
        if self.world_size == 1 and len(batches) == 1:
            return [1.0]
        with self._group.guard("the proof of the first step"):
            return self._shares(compiled, batches, originals).tolist()

    def _snapshot(self) -> Callable[[], None]:
        """Copies what a step changes: parameters, the optimizer's state, buffers, random numbers; what is returned puts
        that back."""
        self.synchronize()
        whole = [p.detach() for n, p in self._parameters.items() if n not in self._sharded.shards]
        put_back = [
            copies([*self._buffers.values(), *self._sharded.shards.values(), *whole]),
            *(part.kept_state() for part in self._parts.values()),
            self._random.kept(),
            self._states.kept(),
        ]

        def back() -> None:
            self.synchronize()
            for one in put_back:
                one()

        return back

    def _run_one(self, compiled: Compiled, batch: Batch, original: Any) -> torch.Tensor:
        arguments, step = self._arguments(compiled, batch.tensors), self.written(compiled, "step")
        if self.world_size == 1:
            return step(*arguments, compiled.tangent(1.0, self._device)).detach()  # type: ignore[no-any-return]
        weight = total = self._meaning.weigh(compiled.weight, batch, original)
        if self._meaning.is_sum:  # a share of 1
            weight, total = torch.full_like(weight, self.world_size), torch.ones_like(weight)
        return step(*arguments, weight, self._same_settings.with_number(total)).to(compiled.loss_dtype)  # type: ignore[no-any-return]

    def _run_many(self, compiled: list[Compiled], batches: list[Batch], originals: list[Any]) -> torch.Tensor:
        """All but the last micro-batch add to local gradients; the last one's step synchronizes and updates."""
        if compiled[-1].loss_dtype in NARROW:
            raise SignatureError(
                "micro-batches are weighted through the loss, which this model computes in 16 bits, too few for that: "
                "compute it from float32 values, as in cross_entropy(logits.float(), target)"
            )
        shares = self._shares(compiled, batches, originals)
        earlier: dict[str, Any] = {}
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        for c, b, share in zip(compiled[:-1], batches[:-1], shares[:-1], strict=True):
            loss += loss_share(self._accumulate(c, b, float(share), earlier), share)
        last = compiled[-1]
        ordered = [earlier[p.name] for p in last.graph.parameters]
        earlier.clear()
        share = shares[-1]
        arguments, step = self._arguments(last, batches[-1].tensors), self.written(last, "last micro-batch")
        found = step(*arguments, last.tangent(float(share), self._device), *ordered, share, loss)
        if self._group.name is None:
            found = loss + loss_share(found, share)
        return found.to(last.loss_dtype)  # type: ignore[no-any-return]

    def _accumulate(self, c: Compiled, batch: Batch, seed: float, into: dict[str, Any]) -> torch.Tensor:
        """Adds a micro-batch's gradients, or the parts that they are made of, to `into`; returns its loss."""
        passes = self.written(c, "earlier micro-batch")
        tangent = c.tangent(seed, self._device)
        loss, buffers, gradients = passes(*self._arguments(c, batch.tensors), tangent)
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

    def _shares(self, compiled: list[Compiled], batches: list[Batch], originals: list[Any]) -> torch.Tensor:
        """The share of each of this rank's micro-batches in the global batch, float64, by how much they count."""
        each = zip(compiled, batches, originals, strict=True)
        weights = torch.stack([self._meaning.weigh(c.weight, b, o) for c, b, o in each])
        total = torch.ones_like(weights[0]) if self._meaning.is_sum else weights.sum()
        if self._group.name is not None:  # of a loss that is a sum, too: other ranks may have one micro-batch
            total = self._same_settings.with_number(total)
            total = self._same_settings(collectives.wait(collectives.all_reduce(total, self._group.name)))
        if self._meaning.is_sum:
            return torch.ones_like(weights)
        return batch_share(weights, total, torch.float64, self.world_size * len(weights))
