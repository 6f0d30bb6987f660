"""What every program does: it captures a model by the batch's signature, lowers the capture, and writes its graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.fx
from torch import nn
from torch.optim import Optimizer

from autopar.errors import PlanError
from autopar.ir.batch import Batch, flatten
from autopar.ir.build import named_parameters, training_graph
from autopar.ir.capture import Mode
from autopar.ir.leftovers import forget, forgotten_but
from autopar.ir.sizes import Varying
from autopar.ir.training_graph import TrainingGraph
from autopar.ops.context import Context
from autopar.ops.fragments import Fragment
from autopar.runtime.buffers import shared_buffers
from autopar.runtime.captures import Captures, signature_key
from autopar.runtime.compiled import Compiled, Settings
from autopar.runtime.eager import owners_of
from autopar.runtime.module_hooks import ModuleHooks
from autopar.runtime.optimizer import OptimizerPart
from autopar.runtime.order import CollectiveOrder
from autopar.runtime.process_group import Group, Rendezvous, average_buffers, take_from_rank_0
from autopar.runtime.random import RandomStream
from autopar.runtime.shapes import BatchShapes
from autopar.runtime.unchanged import Unchanged
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
        self._group = group
        self._context = context.on(plan.cluster.cluster)
        self._check_fidelity()
        self._rendezvous = Rendezvous(group)
        owners = owners_of(model, settings.loss_fn)
        self._parameters = named_parameters(model, settings.loss_fn)
        self._buffers = {s + n: b for s, o in owners.items() for n, b in o.named_buffers(remove_duplicate=False)}
        self._device = next((p.device for p in self._parameters.values()), torch.device("cpu"))
        self._compiled = Captures[Compiled](group.rank == 0, settings.max_captures, lambda c: forget(c.every_graph))
        self._shapes = BatchShapes(are_symbolic=settings.compiler is None)
        self._hooks = ModuleHooks(owners.values())
        self._unchanged = Unchanged(owners, self._buffers, optimizer)
        self._random = RandomStream(group.rank, group.world_size)
        self._order = CollectiveOrder(self._rendezvous, plan)
        self._steps = 0

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def world_size(self) -> int:
        return self._group.world_size

    def compile_for(self, batch: Any) -> Compiled:
        """Captures, lowers and writes for a batch's signature, unless that was done before, and all that the model
        reads is still as it was then."""
        batch = batch if isinstance(batch, Batch) else flatten(batch)
        key, kind = signature_key(self.model, batch, self._hooks.key())
        known = self._compiled.find(key, kind, batch.shapes)
        if known is not None and self._serves(known, batch):
            return known
        varying = self._shapes.varying(kind, batch)
        if varying:
            try:
                found = self._captured(batch, varying)
                if self._serves(found, batch):
                    return found
            except Exception as e:  # what is the user's to mend, the capture for these sizes alone says
                self._shapes.give_up(kind, f"{type(e).__name__}: {e}")
        return self._captured(batch)

    def _captured(self, batch: Batch, varying: Varying = frozenset()) -> Compiled:
        s, made = self.settings, list[torch.fx.GraphModule]()
        with forgotten_but(made):
            with self._traceable():
                own, unused, recompute = leaves(batch), s.unused_parameters, self.plan.recompute
                graph = training_graph(self.model, own, s.loss_fn, self.mode, unused, recompute, s.passes, varying)
            compiled = self.adopt(graph, batch)
            made += compiled.every_graph
        return compiled

    def _flat(self, batch: Any) -> Batch:
        """A batch as captured graphs take it: flat, and padded where the user says how."""
        if self.settings.padding is None:
            return flatten(batch)
        return self.settings.padding.of(batch, self.model, self.settings.loss_fn, self._is_whole())

    def _serves(self, compiled: Compiled, batch: Batch) -> bool:
        """Whether a capture serves a batch: one with symbols is compared with the model run eagerly at the first two
        sizes that it meets, and let go of where it differs."""
        sizes = compiled.joint.sizes
        if sizes is None or self.settings.check == "never" or len(sizes.proved) > 1 or batch.shapes in sizes.proved:
            return True
        sizes.proved.add(batch.shapes)
        compiled.proved = False
        try:
            self._prove(compiled, batch)
        except Exception as e:  # what is the user's to mend, the proof of the capture for these sizes alone says
            self._compiled.remove(compiled)
            self._shapes.give_up(signature_key(self.model, batch, self._hooks.key())[1], str(e))
            return False
        return True

    def _prove(self, compiled: Compiled, batch: Batch) -> None:
        """Compares a capture with the model run eagerly, on this rank alone."""
        raise NotImplementedError

    def adopt(self, graph: TrainingGraph, batch: Any) -> Compiled:
        """Lowers and writes a graph that was captured on `batch`. Raises `PlanMismatchError` where it is of another
        model, or where ranks would issue different collectives."""
        self.plan.check_model(graph.model)
        assert self.mode == "module" or graph.recompute == self.plan.recompute, "captured for another plan"
        batch = batch if isinstance(batch, Batch) else flatten(batch)
        program = lower_plan(self.plan.groups, graph, self._context)
        self._order.check(program, graph)
        compiled = self._lowered(graph, program, batch)
        for name in self.needed:
            self.written(compiled, name)
        key, kind = signature_key(self.model, batch, self._hooks.key())
        sizes = compiled.joint.sizes
        if sizes is None:
            self._shapes.meet(kind, batch)
        self._compiled.add(key if sizes is None else kind, compiled.joint.guards, compiled, sizes)
        return compiled

    def written(self, compiled: Compiled, name: str) -> torch.fx.GraphModule:
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
            self._order.check(program, compiled.graph)
            compiled.others[moments] = replace(compiled, program=program, graphs={}, others={})
        return compiled.others[moments]

    def synchronize_buffers(self) -> None:
        """Averages floating-point buffers over the ranks; to be called by all ranks together.

        Batch normalization normalizes each rank's batch by itself, as with DDP, so running statistics differ between
        ranks until then. They are averaged rather than taken from rank 0, so that none of the data is left out.
        """
        average_buffers(self._buffers.values(), self._group)

    def _check_fidelity(self) -> None:
        """Raises `PlanError` where the plan promises more than its groups keep."""
        kept = fidelity_of(self.plan.groups, self._context)
        if FIDELITIES.index(kept) > FIDELITIES.index(self.plan.fidelity):
            raise PlanError(
                f"plan '{self.plan.name}' says that it is '{self.plan.fidelity}', but its groups are '{kept}': write "
                f'"fidelity": "{kept}" into it'
            )

    def _write(self, compiled: Compiled, name: str) -> torch.fx.GraphModule:
        """Every graph that runs is made here."""
        return self.writers[name](compiled.graph, compiled.program, self._target())

    def _lowered(self, graph: TrainingGraph, program: StepProgram, batch: Batch) -> Compiled:
        """A capture that was lowered, before its graphs are written."""
        assert graph.joint is not None
        return Compiled(graph, program, shared_buffers(graph.joint, self._group))

    def _target(self) -> Target:
        """What graphs are written for."""
        return Target(
            rank=self.rank,
            world_size=self.world_size,
            group=self._group,
            parameters=self._parameters,
            shards={},
            part=_no_optimizer,
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

    def _share_buffers(self, compiled: Compiled, when: str) -> None:
        """Has all ranks take rank 0's values of the buffers that are to be alike."""
        take_from_rank_0([self._buffers[n] for n in compiled.shared_buffers], self._group, f"buffers of {when}")


def leaves(batch: Batch) -> Batch:
    """The batch with tensors that have no history: what is captured begins with them."""
    return replace(batch, tensors=tuple(t.detach().requires_grad_(t.requires_grad) for t in batch.tensors))


def _no_optimizer(index: int, parts: tuple[Fragment, ...]) -> OptimizerPart:
    raise AssertionError("a program without an optimizer updates nothing")
