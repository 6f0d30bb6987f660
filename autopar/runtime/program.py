"""The program: a model's training step, rewritten by a plan, and run on this rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, cast, overload

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from autopar.errors import SignatureError
from autopar.ir.batch import Batch
from autopar.ir.training_graph import TrainingGraph
from autopar.ops.context import Context
from autopar.ops.fragments import Fragment
from autopar.ops.moments import Moment
from autopar.ops.updates import Observer
from autopar.runtime.base_program import BaseProgram, Write
from autopar.runtime.captures import check_batches
from autopar.runtime.checkpoints import checkpoint
from autopar.runtime.checkpoints import load as checkpoint_load
from autopar.runtime.checkpoints import save as checkpoint_save
from autopar.runtime.checkpoints.checks import digest
from autopar.runtime.compiled import Compiled, Settings
from autopar.runtime.gathering import gathered_sizes, gathering
from autopar.runtime.gradient_norm import GradientNorms
from autopar.runtime.job.process_group import Group
from autopar.runtime.lasting import Lasting
from autopar.runtime.looks import Looking
from autopar.runtime.loss_scale import LossScale, check_scaled
from autopar.runtime.losses.looks import LossLooks
from autopar.runtime.losses.meaning import LossMeaning
from autopar.runtime.losses.shares import LossShares
from autopar.runtime.model.evaluated import evaluated
from autopar.runtime.model.outputs import output_template
from autopar.runtime.model.shared_memory import Memory
from autopar.runtime.optimizers.joint_optimizer import each_of
from autopar.runtime.optimizers.joint_part import Part
from autopar.runtime.optimizers.parameter_groups import ParameterGroups
from autopar.runtime.optimizers.same_settings import SameSettings, refuse_states
from autopar.runtime.proofs.drift import StepTimes
from autopar.runtime.proofs.step_proof import StepProofs
from autopar.runtime.proofs.subject import Subject
from autopar.runtime.step_result import Asked, StepResult
from autopar.runtime.step_runs import StepRuns
from autopar.runtime.step_writer import LocalWriter, StepWriter
from autopar.runtime.sync_batch_norm import check_loss_dtype
from autopar.runtime.uncaptured.steps import EagerStep
from autopar.runtime.unused import UnusedParameters
from autopar.runtime.writer import Target
from autopar.spec.plan import Plan
from autopar.strategies.lowering import StepProgram
from autopar.strategies.timing import Moments, is_timed, moment_of, moments_of


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
    synchronizing = ("step", "last micro-batch")
    needed = ("step",)

    def __init__(
        self, model: nn.Module, plan: Plan, group: Group, optimizer: Optimizer, settings: Settings, context: Context
    ) -> None:
        super().__init__(model, plan, group, settings, context, optimizer)
        self.optimizer = optimizer
        self._memory = Memory(self._parameters)
        self._lasting = Lasting(
            model,
            settings.loss_fn,
            optimizer,
            plan,
            group,
            self._parameters,
            self._buffers,
            self._random,
            settings.scaler,
            self._context.elementwise_update,
        )
        self._held = ParameterGroups(optimizer, self._parameters)
        self._same_settings = SameSettings(optimizer, group, self._device)
        self._given = ""
        """A digest of the optimizer's state as the user has put it in last."""
        self._is_timed = any(map(is_timed, plan.groups))
        self._unused = UnusedParameters(plan.groups, lambda: (self._eager, self._lasting.steps), self._moment)
        self._scale = None if settings.scaler is None else LossScale(settings.scaler, group.world_size)
        if self._scale is not None:
            check_scaled(self._parameters, plan, self._context)
        of = model, settings.loss_fn, settings.weight, self._rendezvous, self._buffers, self._device
        self._meaning = LossMeaning(*of)
        self._stand_ins.per_sample = self._meaning.per_sample
        self._looks = LossLooks(self._lasting, settings.check)
        self._shares = LossShares(settings.weight, group, self._device, self._meaning)
        how = self._same_settings, self._shared, self._arguments, self.written, self._scale
        self._runs = StepRuns(group, self._device, self._buffers, self._meaning, *how)
        self._gathers = False  # samples of all ranks, in the model or its loss
        self._has_stepped = False
        """Whether a step was run since the program was made; `_lasting.steps` goes on where a checkpoint was saved."""
        self._looking = Looking(self._graphs)
        self._norms = GradientNorms(self._context.clips, group, self._device, self._looking)
        subject = partial(
            Subject,
            lasting=self._lasting,
            max_norm=settings.clip_grad_norm,
            shared_buffers=self._shared,
            scale=self._scale,
            observed=self._looking.also,
        )
        self._proofs = StepProofs(settings.check, subject, self._lasting)
        self._times = StepTimes(plan.own_prediction, group.rank == 0, self._device.type == "cuda")

    @property
    def graph_module(self) -> torch.fx.GraphModule:
        """The step for the first batch signature, to print its `code`; of an eager model, what its passes leave."""
        step = (self._outlined or next(iter(self._compiled))).graphs["step"]
        return cast(torch.fx.GraphModule, step.written if isinstance(step, EagerStep) else step)

    @property
    def loss_scaler(self) -> GradScaler | None:
        """The scaler of the loss, whose `get_scale()` is its scale now; `None` where the loss is not scaled."""
        return self.settings.scaler

    @property
    def step_time_s(self) -> float | None:
        """The median of the first steps that count, as measured on this rank; None before there are enough of them.
        What was predicted is `plan.prediction.step_time_s`."""
        return self._times.median_s

    @overload
    def step(
        self,
        batch: Any = None,
        *,
        micro_batches: Sequence[Any] | None = None,
        outputs: Literal[False] = False,
        grad_norm: Literal[False] = False,
    ) -> torch.Tensor: ...
    @overload
    def step(
        self,
        batch: Any = None,
        *,
        micro_batches: Sequence[Any] | None = None,
        outputs: bool = False,
        grad_norm: bool = False,
    ) -> StepResult: ...
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def step(
        self,
        batch: Any = None,
        *,
        micro_batches: Sequence[Any] | None = None,
        outputs: bool = False,
        grad_norm: bool = False,
    ) -> torch.Tensor | StepResult:
        """One optimizer step on this rank's batch, or on several micro-batches as on one batch; returns the global
        mean loss, detached. With `outputs`, or `grad_norm`, returns it in a `StepResult`, with the model's output for
        this rank's batch, or with the norm over all gradients before they are clipped.

        Raises `SignatureError` where the batch cannot be used, `CaptureError` where a batch of a new shape cannot be
        captured, and `CollectiveError`, naming the rank, where another rank is late or gone.
        """
        given = [batch] if micro_batches is None else list(micro_batches)
        if (batch is None) == (micro_batches is None) or not given:
            raise SignatureError("step takes one batch, or micro_batches=[...] with at least one, and not both")
        self._held.check()
        self._lasting.rows.check("step")
        self._memory.check(self._lasting.rows.shards)
        self._lasting.deferred.check()
        self._unchanged.check()
        self.statistics.share()
        self._lasting.parts.take_over(is_first=not self._has_stepped)
        self._compare_states()
        batches = [self._flat(b) for b in self._shares.of(given)]
        check_batches(batches, self._device, not self._has_stepped, self._eager is not None, self._scale is not None)
        sizes = gathered_sizes(batches, self._group, self._device) if self._gathers else ()
        with gathering(self._group, sizes):
            return self._step(batches, given, sizes, Asked(outputs, grad_norm, micro_batches is not None))

    def _step(
        self, batches: list[Batch], given: list[Any], sizes: tuple[int, ...], asked: Asked
    ) -> torch.Tensor | StepResult:
        """`sizes`: of all ranks' batches, where ranks gather them."""
        captures = [self.compile_for(b, asked.outputs, sizes) for b in batches]
        compiled = [self.at(c, self._moments()) for c in captures] if self._is_timed else captures
        if self.world_size > 1 or len(batches) > 1:
            look = self._meaning.settle(captures, batches, self._looks)
            if look is not None:
                look() if compiled[-1].eager is None else compiled[-1].eager.do_meanwhile(look)
        run = partial(self._run, compiled, batches, given)
        norm = self._norms.of(compiled[-1], len(batches) > 1) if asked.grad_norm else None
        self._same_settings.ask(asked.together(self._order.is_its_own(compiled[-1].program), norm))
        with self._norms.taken(norm):
            shares, is_first = partial(self._shares_of, compiled, batches, given), not self._has_stepped
            timed = compiled[-1].program.groups if self._is_timed else ()
            loss = self._proofs.run(captures, compiled, batches, shares, run, self._times, is_first, timed)
        self._lasting.parts.settle()
        self._lasting.deferred.leave()
        torch.clear_autocast_cache()  # what it has cast before the update
        if self._scale is not None:
            self._scale.update()
        self._lasting.steps, self._has_stepped = self._lasting.steps + 1, True
        for one in each_of(self.optimizer):
            one._opt_called = True  # type: ignore[attr-defined]  # what learning-rate schedulers look at
        return asked.result(loss, self._runs.take_outputs(), norm)

    def synchronize(self) -> None:
        """Receives parameters that are on their way from the last step, as plans with `late_parameters` leave them; for
        any rank, before they are read or changed otherwise than by the next step, the model's run, or saving it."""
        self._lasting.arrive()

    def gathered(self) -> AbstractContextManager[None]:
        """While it is open, the model is whole on every rank, to be evaluated, saved or changed; the next step comes
        after it. All ranks enter it. Only plans that spread parameters over the ranks need it (`program.plan.explain()`
        says so); a model whose rows are elsewhere refuses to run outside of a step."""
        return self._lasting.gathered()

    def evaluation(self) -> AbstractContextManager[None]:
        """While it is open, the model is whole, in evaluation mode, with averaged buffers and without gradients: `with
        program.evaluation(): model(x)`. All ranks enter and leave together; each may run it as often as it likes."""
        self.synchronize_buffers()
        return evaluated(self.model, self.gathered())

    def state_dict(self) -> dict[str, Any]:
        """Model and optimizer as one process would have them, whatever the plan; to be called by all ranks together.

        `model` and `optimizer` are in PyTorch's own form and load into a plain model and optimizer; `random` is every
        rank's stream. Write it with `torch.save` on one rank, read it with `torch.load(weights_only=True)` on all; or
        use `torch.distributed.checkpoint`.

        Raises `CollectiveError`, with the rank, where another one does not call it.
        """
        self.synchronize()
        self._same_settings.arrive()
        self._lasting.parts.catch_up()
        return checkpoint.save(self._lasting)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state that this or any other plan, or one process, has saved; to be called by all ranks
        together, with the same state. Raises `SpecError` where the state does not fit, before anything is changed."""
        self.synchronize()
        checkpoint.load(self._lasting, state)

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
        self._lasting.parts.catch_up()
        checkpoint_save.save(self._lasting, folder)

    def load(self, folder: str | Path) -> None:
        """Continues from a checkpoint that `save` wrote, under this or any other plan, on this or any other number of
        ranks; to be called by all ranks together. Raises `SpecError`, on all ranks, where it does not fit on one of
        them or is damaged, before anything is changed."""
        self._lasting.rows.check("load")
        self.synchronize()
        checkpoint_load.load(self._lasting, folder)

    def observe(self, observer: Observer | None) -> None:
        """Has every gradient that this rank updates with shown to `observer`, fragment by fragment."""
        self._looking.observe(observer)

    def _write(self, compiled: Compiled, name: str) -> Any:
        graph = super()._write(compiled, name)
        self._looking.watch(graph)
        return graph

    @property
    def _has_run(self) -> bool:
        return self._lasting.steps > 0

    def _moments(self) -> Moments:
        return moments_of(self.plan.groups, self._lasting.steps, self._lasting.since)

    def _moment(self, index: int) -> Moment:
        """What one group does in the next step."""
        return moment_of(self.plan.groups[index], self._lasting.steps, self._lasting.since[index])

    def _graphs(self) -> Iterator[nn.Module]:
        for compiled in [*self._compiled, *self._stand_ins, *([self._outlined] if self._outlined else ())]:
            for one in (compiled, *compiled.others.values()):
                yield from one.graphs.values()

    def _lowered(self, graph: TrainingGraph, program: StepProgram, batch: Batch) -> Compiled:
        self._lasting.rows.spread(m.slice.name for m in program.sharded_members)
        compiled = super()._lowered(graph, program, batch)
        check_loss_dtype(compiled)
        if compiled.joint.gathers and not self._gathers:
            self._gathers = True
            self._meaning.take_as_samples()
        if not compiled.joint.has_outputs:
            return compiled
        with self._traceable():
            template = output_template(self.model, batch, self.settings.loss_fn is not None)
        return replace(compiled, output=template)

    def _target(self) -> Target:
        return replace(
            super()._target(),
            loss_scale=self._scale,
            shards=self._lasting.rows.shards,
            part=self._part,
            deferred=self._lasting.deferred.of,
            state=self._lasting.states.of,
            same_settings=self._same_settings,
        )

    def _traceable(self) -> AbstractContextManager[None]:
        return self._lasting.traceable()

    def _part(self, index: int, parts: tuple[Fragment, ...]) -> Part:
        return self._lasting.parts.of(index, parts, partial(self._unused.of, index))

    def _prove(self, compiled: Compiled, batch: Batch) -> None:
        self._proofs.capture(compiled, batch)

    def _compare_states(self) -> None:
        """Has ranks compare, with the next step's weights, the state that the user has put into the optimizer last."""
        given = self._lasting.parts.given
        alike = {name: state for name, state in given.items() if name not in self._lasting.local}
        given.clear()
        self._given = digest(alike) if alike else self._given
        self._same_settings.compare("state of the optimizer", self._given, self._given, refuse_states)

    def _run(self, compiled: list[Compiled], batches: list[Batch], originals: list[Any]) -> torch.Tensor:
        with torch.no_grad(), self._random, self._group.guard(f"step {self._lasting.steps}"):
            self._lasting.parts.begin()
            for model in {c.eager for c in compiled if c.eager is not None}:
                model.begin(loss_scale=1.0 if self._scale is None else float(self._scale.scaler.get_scale()))
            if len(batches) == 1:
                loss = self._runs.one(compiled[0], batches[0], originals[0])
            else:
                loss = self._runs.many(compiled, batches, originals)
        self._lasting.parts.end(self._scale is not None and self._scale.skipped)
        self._unused.note()
        if self._device.type == "cuda" and self._shared.mine != (before := self._shared.agreed):
            # Ranks compare in the next step there: those that know of others wait for it, and have shared before.
            self._share_buffers(f"step {self._lasting.steps}", before)
            self._same_settings.arrive()
            if self._shared.agreed is not before:  # others have not known of them in this step
                return loss
        self._share_buffers(f"step {self._lasting.steps}")
        return loss

    def _shares_of(self, compiled: list[Compiled], batches: list[Batch], originals: list[Any]) -> list[float]:
        """How much of the global batch each micro-batch is. By all ranks together."""
        if self.world_size == 1 and len(batches) == 1:
            return [1.0]
        with self._group.guard("the proof of the first step"):
            return self._runs.shares(compiled, batches, originals).tolist()
