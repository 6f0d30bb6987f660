"""What every program does: it captures a model by the batch's signature, lowers the capture, and writes its graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.fx
from torch import nn
from torch.optim import Optimizer

from autopar.errors import (
    AutoparWarning,
    CaptureError,
    PlanError,
    SignatureError,
    TracingError,
    UnusedParameterError,
)
from autopar.ir.batch import Batch, flatten
from autopar.ir.batch_memory import refuse_shared
from autopar.ir.build import named_parameters, training_graph
from autopar.ir.capture import Mode
from autopar.ir.leftovers import forget, forgotten_but
from autopar.ir.outline import Outline
from autopar.ir.served import Varying
from autopar.ir.training_graph import TrainingGraph
from autopar.ops.context import Context
from autopar.runtime.captures import Captures, check_trained, signature_key
from autopar.runtime.compiled import Compiled, Settings
from autopar.runtime.heap import keep_freed_memory
from autopar.runtime.job.order import CollectiveOrder
from autopar.runtime.job.process_group import Group, Rendezvous, average_buffers, take_from_rank_0
from autopar.runtime.model.buffers import SharedBuffers
from autopar.runtime.model.eager import kept_attributes, owners_of
from autopar.runtime.model.hooks import ModuleHooks
from autopar.runtime.model.outputs import NO_OUTPUT
from autopar.runtime.model.unchanged import Unchanged
from autopar.runtime.optimizers.kinds import is_plain_adam, is_plain_sgd
from autopar.runtime.optimizers.optimizer import updated_by
from autopar.runtime.random import RandomStream
from autopar.runtime.running_statistics import RunningStatistics
from autopar.runtime.shapes import BatchShapes
from autopar.runtime.uncaptured.model import EagerModel
from autopar.runtime.uncaptured.stand_ins import StandIns, Wanted
from autopar.runtime.uncaptured.steps import EagerStep
from autopar.runtime.unused import move_frozen
from autopar.runtime.writer import Target
from autopar.spec.plan import FIDELITIES, Plan
from autopar.strategies.lowering import StepProgram, fidelity_of, lower_plan
from autopar.strategies.timing import Moments

Write = Callable[[TrainingGraph, StepProgram, Target], torch.fx.GraphModule]


class BaseProgram:
    """A model under a plan, on one rank.

    There are two kinds: `Program` ends in the optimizer, `GradientProgram` in synchronized gradients. A subclass says
    which graphs it has and when they run.
    """

    mode: ClassVar[Mode]
    writers: ClassVar[Mapping[str, Write]]
    """What writes each of its graphs, by the graph's name."""
    synchronizing: ClassVar[tuple[str, ...]]
    """Names of the graphs that end in synchronized gradients."""
    needed: ClassVar[tuple[str, ...]]
    """Names of the graphs that every batch needs; the others are written when they first run."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        group: Group,
        settings: Settings,
        context: Context,
        optimizer: Optimizer | None = None,
    ) -> None:
        self.model = model
        self.plan = plan
        self.settings = settings
        self._optimizer = optimizer
        self._group = group
        self._context = context.on(plan.cluster.cluster)
        self._check_fidelity()
        self._rendezvous = Rendezvous(group)
        owners = owners_of(model, settings.loss_fn)
        self._parameters = named_parameters(model, settings.loss_fn)
        self._buffers = {s + n: b for s, o in owners.items() for n, b in o.named_buffers(remove_duplicate=False)}
        self._device = next((p.device for p in self._parameters.values()), torch.device("cpu"))
        keep_freed_memory()
        self._compiled = Captures[Compiled](group.rank == 0, settings.max_captures, lambda c: forget(c.every_graph))
        self._shapes = BatchShapes(are_symbolic=settings.compiler is None)
        self._hooks = ModuleHooks(owners.values())
        self._unchanged = Unchanged(owners, self._buffers, optimizer, settings.capture == "never", move_frozen(plan))
        self.statistics = RunningStatistics(owners, group)
        self._random = RandomStream(group.rank, group.world_size)
        self._order = CollectiveOrder(self._rendezvous, plan)
        self._shared = alike = SharedBuffers(group, self.statistics.buffers)
        self._stand_ins = StandIns(model, settings, self._parameters, group, self._compiled, self._lowered_alike, alike)
        self._crosses_ranks = False
        """Whether ranks exchange values within the model."""
        self._outlined: Compiled | None = None
        """What was lowered and written of a model that runs eagerly."""

    @property
    def group(self) -> Group:
        """The ranks."""
        return self._group

    @property
    def context(self) -> Context:
        """What strategies may depend on."""
        return self._context

    @property
    def graph(self) -> TrainingGraph:
        """What was captured on the first batch. Raises `CaptureError` of a copy that has had none."""
        first = self._outlined or next(iter(self._compiled), None)
        if first is None:
            raise CaptureError("a copy has no graph yet: it captures the first batch that it is trained with")
        return first.graph

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def world_size(self) -> int:
        return self._group.world_size

    def compile_for(self, batch: Any, outputs: bool = False, sizes: tuple[int, ...] = ()) -> Compiled:
        """Captures, lowers and writes for a batch's signature, unless that was done before, and all that the model
        reads is still as it was then. `outputs`: of a step that returns the model's output, too. `sizes`: of all
        ranks' batches, where the step depends on them."""
        self._look_at_optimizer()
        batch = batch if isinstance(batch, Batch) else flatten(batch, needs_tensor=self._outlined is None)
        if self._outlined is not None:
            assert self._eager is not None
            self._eager.keeps_output = outputs
            return replace(self._outlined, batch=batch)
        outputs = outputs or self.settings.outputs
        key, kind = self._keys(batch, outputs, sizes)
        wanted = Wanted(key, kind, batch, outputs, bool(sizes))
        if self._stand_ins.runs_all(kind):
            return self._stand_ins.of(wanted)
        try:
            is_new = not self._stand_ins.runs(key)
            known = self._compiled.find(key, kind, batch.shapes, counts=is_new)
            if known is not None and self._serves(known, batch, kind):
                return known
            if not is_new:
                return self._stand_ins.of(wanted)
            if batch.unseen:
                raise CaptureError(batch.unseen)
            return self._captured_for(batch, outputs, sizes, kind)
        except (SignatureError, UnusedParameterError):
            raise
        except (CaptureError, TracingError) as e:
            return self._stand_ins.of(wanted, e)

    def _captured_for(self, batch: Batch, outputs: bool, sizes: tuple[int, ...], kind: Hashable) -> Compiled:
        """What is made of a capture on this batch, compared with the model run eagerly where a step was run before."""
        put_back = kept_attributes(owners_of(self.model, self.settings.loss_fn).values())
        try:
            made = self._made_for(batch, outputs, sizes, kind)
        except CaptureError:
            put_back()  # tracing writes to tensors that are plain attributes
            raise
        if self._has_run and self.settings.check == "first":
            try:
                self._prove(made, batch)
            except (CaptureError, TracingError):
                self._compiled.remove(made)
                raise
        return made

    def _made_for(self, batch: Batch, outputs: bool, sizes: tuple[int, ...], kind: Hashable) -> Compiled:
        # What hands outputs back, or exchanges values within the model, is captured for its sizes alone.
        varying = frozenset() if outputs or sizes or self._crosses_ranks else self._shapes.varying(kind, batch)
        if varying:
            try:
                found = self._made(batch, varying=varying)
                if self._serves(found, batch, kind):
                    return found
            except Exception as e:  # what is the user's to mend, the capture for these sizes alone says
                self._shapes.give_up(kind, f"{type(e).__name__}: {e}")
        try:
            return self._made(batch, outputs, sizes)
        except PlanError as e:
            raise PlanError(f"{NO_OUTPUT} ({e})") if outputs and not self.settings.outputs else e from None

    @property
    def _has_run(self) -> bool:
        """Whether a step was run, so that later captures are compared on this rank alone."""
        raise NotImplementedError

    def _look_at_optimizer(self) -> None:
        """Raises `PlanError` where a strategy cannot be used with what the optimizer was set to since."""
        sgd = self._context.plain_sgd and is_plain_sgd(self._optimizer)
        adam = self._context.plain_adam and is_plain_adam(self._optimizer)
        if (sgd, adam) != (self._context.plain_sgd, self._context.plain_adam):
            context = replace(self._context, plain_sgd=sgd, plain_adam=adam)
            for made in [*self._compiled, *([self._outlined] if self._outlined else ())]:
                lower_plan(self.plan.groups, made.graph, context)
            self._context = context

    def _keys(self, batch: Batch, outputs: bool, sizes: tuple[int, ...]) -> tuple[Hashable, Hashable]:
        return signature_key(self.model, batch, (self._hooks.key(), outputs, sizes))

    def _made(
        self, batch: Batch, outputs: bool = False, sizes: tuple[int, ...] = (), varying: Varying = frozenset()
    ) -> Compiled:
        made: list[torch.fx.GraphModule] = []
        reads_the_same = self._compiled.has_read_the_same(self._keys(batch, outputs, sizes)[1])
        with forgotten_but(made):
            compiled = self.adopt(self._captured(batch, outputs, varying), batch, outputs, sizes)
            made += compiled.every_graph
        compiled.looked = reads_the_same
        return compiled

    def _captured(self, batch: Batch, outputs: bool = False, varying: Varying = frozenset()) -> TrainingGraph:
        s = self.settings
        with self._traceable():
            return training_graph(
                self.model,
                batch.leaves(),
                s.loss_fn,
                self.mode,
                s.unused_parameters,
                self.plan.recompute,
                s.passes,
                outputs,
                updated_by(self._optimizer),
                varying,
            )

    def _flat(self, batch: Any) -> Batch:
        """A batch as captured graphs take it: flat, and padded where the user says how."""
        if self.settings.padding is None or self._outlined is not None:
            return flatten(batch, needs_tensor=self._outlined is None)
        return self.settings.padding.of(batch, self.model, self.settings.loss_fn, self._is_whole())

    def _serves(self, compiled: Compiled, batch: Batch, kind: Hashable) -> bool:
        """Whether a capture serves a batch: one with symbols is compared with the model run eagerly at the first two
        sizes that it meets, and let go of where it differs."""
        refuse_shared(compiled.joint.copied_inputs, batch.as_given)
        sizes = compiled.joint.sizes
        if sizes is None or self.settings.check == "never" or len(sizes.proved) > 1 or batch.shapes in sizes.proved:
            return True
        sizes.proved.add(batch.shapes)
        compiled.proved = False
        try:
            self._prove(compiled, batch)
        except Exception as e:  # what is the user's to mend, the proof of the capture for these sizes alone says
            self._compiled.remove(compiled)
            self._shapes.give_up(kind, str(e))
            return False
        return True

    def _prove(self, compiled: Compiled, batch: Batch) -> None:
        """Compares a capture with the model run eagerly, on this rank alone."""
        raise NotImplementedError

    def adopt(
        self, graph: TrainingGraph, batch: Any, outputs: bool | None = None, sizes: tuple[int, ...] = ()
    ) -> Compiled:
        """Lowers and writes a graph that was captured on `batch`. Raises `PlanMismatchError` where it is of another
        model, or where ranks would issue different collectives."""
        if next(iter(self._compiled), None) is not None:
            check_trained(self.plan, graph)
        self.plan.check_model(graph.model)
        if isinstance(graph.joint, Outline):
            if self.plan.recompute != "none" and self._group.rank == 0:
                warnings.warn(
                    f"the plan computes activations again (recompute='{self.plan.recompute}'), which needs a graph: "
                    "the model runs eagerly and keeps them. Where memory is short, use torch.utils.checkpoint",
                    AutoparWarning,
                    stacklevel=3,
                )
        else:
            assert self.mode == "module" or graph.recompute == self.plan.recompute, "captured for another plan"
        batch = batch if isinstance(batch, Batch) else flatten(batch)
        program = lower_plan(self.plan.groups, graph, self._context)
        self._order.check(program, graph, graph.joint is not None and graph.joint.has_outputs, (batch, self._captured))
        compiled = self._lowered(graph, program, batch)
        if isinstance(graph.joint, Outline):
            trained = {p.name: self._parameters[p.name] for p in graph.parameters}
            seen = graph.joint
            model = EagerModel(self.model, self.settings.loss_fn, trained, seen.in_pieces, seen.foreseen, self._group)
            self._outlined = compiled = replace(compiled, eager=model, batch=batch)
        for name in self.needed if self._outlined is None else self.synchronizing[:1]:
            self.written(compiled, name)
        if self._outlined is None:
            self._crosses_ranks = compiled.joint.sums_over_ranks
            key, kind = self._keys(batch, self.settings.outputs if outputs is None else outputs, sizes)
            symbols = compiled.joint.sizes
            if symbols is None:
                self._shapes.meet(kind, batch)
            self._compiled.add(key, kind, compiled.joint.guards, compiled, symbols)
        return compiled

    def written(self, compiled: Compiled, name: str) -> Any:
        """One of a capture's graphs, by its name, written when it is first asked for."""
        if name not in compiled.graphs:
            compiled.graphs[name] = self._write(compiled, name)
        return compiled.graphs[name]

    def at(self, compiled: Compiled, moments: Moments) -> Compiled:
        """A capture for a step in which the plan's groups do this; lowered when it is first asked for."""
        if moments == compiled.program.moments:
            return compiled
        if moments not in compiled.others:
            program = lower_plan(self.plan.groups, compiled.graph, self._context, moments)
            self._order.check(program, compiled.graph, compiled.joint.has_outputs)
            compiled.others[moments] = replace(compiled, program=program, graphs={}, others={})
        return replace(compiled.others[moments], batch=compiled.batch)

    @property
    def _eager(self) -> EagerModel | None:
        """The model, where it runs eagerly."""
        return None if self._outlined is None else self._outlined.eager

    def use_pytorch_generator(self) -> None:
        """Has random operators draw from PyTorch's own generator on every rank, as they do with one rank."""
        self._random.leave()

    def synchronize_buffers(self) -> None:
        """Averages floating-point buffers over the ranks; to be called by all ranks together.

        Batch normalization normalizes each rank's batch by itself, as with DDP, so running statistics differ between
        ranks until then. They are averaged rather than taken from rank 0, so that none of the data is left out.
        """
        average_buffers(self._buffers.values(), self._group)
        self.statistics.are_alike()

    def _lowered_alike(self, graph: TrainingGraph) -> StepProgram:
        """Lowers what stands in for a capture. Raises `PlanError` where the plan needs more of the graph than it has,
        and `PlanMismatchError` where collectives would have another order."""
        program = lower_plan(self.plan.groups, graph, self._context)
        self._order.check(program, graph)
        return program

    def _check_fidelity(self) -> None:
        """Raises `PlanError` where the plan promises more than its groups keep."""
        kept = fidelity_of(self.plan.groups, self._context)
        if FIDELITIES.index(kept) > FIDELITIES.index(self.plan.fidelity):
            raise PlanError(
                f"plan '{self.plan.name}' says that it is '{self.plan.fidelity}', but its groups are '{kept}': write "
                f'"fidelity": "{kept}" into it'
            )

    def _write(self, compiled: Compiled, name: str) -> Any:
        """Every graph that runs is made here."""
        graph = self.writers[name](compiled.graph, compiled.program, self._target())
        if compiled.eager is None:
            return graph
        calls = [p.call for p in compiled.program.placed]
        return EagerStep(graph, compiled.eager, calls, synchronizes=name in self.synchronizing)

    def _lowered(self, graph: TrainingGraph, program: StepProgram, batch: Batch) -> Compiled:
        """A capture that was lowered, before its graphs are written."""
        assert graph.joint is not None
        for name in (key for kind, key in graph.joint.inputs if kind == "buffer" and key not in self._buffers):
            self._unchanged.know_buffer(str(name))
        return Compiled(graph, program, self._shared.of(graph.joint), self._shared.read_by(graph.joint))

    def _target(self) -> Target:
        """What graphs are written for."""
        return Target(
            rank=self.rank,
            world_size=self.world_size,
            group=self._group,
            parameters=self._parameters,
            max_norm=self.settings.clip_grad_norm,
            compiled=self.settings.compiled,
        )

    def _is_whole(self) -> bool:
        """Whether all parameters are on this rank, with their values."""
        return not any(c.program.sharded_members for c in self._compiled)

    def _traceable(self) -> AbstractContextManager[None]:
        """While it is open, the model can be traced."""
        return nullcontext()

    def _arguments(self, compiled: Compiled, batch: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        return compiled.arguments(batch, self._parameters, self._buffers, self._device)

    def _share_buffers(self, when: str, names: Iterable[str] | None = None) -> None:
        """Has all ranks take rank 0's values of the buffers that are to be alike, or of those that are named."""
        if self._eager is not None:
            return self._eager.share_buffers(f"buffers of {when}")
        chosen = self._shared.settle() if names is None else sorted(names)
        take_from_rank_0([self._buffers[n] for n in chosen], self._group, f"buffers of {when}")
