"""What a program with an optimizer keeps from step to step, on this rank: all kinds of it, in one place.

Each kind is kept by a class of its own, as each is another thing between two steps (ADR 0015). What is done with all of
them at once is done here: they are received, made whole, traced beside, and put back behind a trial. Proofs, looks at
the loss and checkpoints are given this object, and nothing else of the program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from autopar.backends import collectives
from autopar.runtime.deferred import DeferredParameters
from autopar.runtime.job.process_group import Group, average
from autopar.runtime.model.copies import all_of, copies
from autopar.runtime.model.eager import owners_of
from autopar.runtime.optimizers.parts import Parts
from autopar.runtime.optimizers.state import gather_state, scatter_state
from autopar.runtime.random import RandomStream
from autopar.runtime.sharded_rows import ShardedRows
from autopar.runtime.states import States
from autopar.spec.plan import Plan
from autopar.strategies.timing import is_local, is_timed, lacks_held, moment_of, moments_of


class Watch(Protocol):
    """What watches a training, and goes on where a checkpoint was saved."""

    @property
    def reason(self) -> str: ...
    def saved(self) -> str: ...
    def load(self, text: str) -> None: ...
    def read(self, text: object) -> object: ...


class Lasting:
    """The model, the optimizer's state, the states of strategies, the random stream, and how many steps were taken."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        optimizer: Optimizer,
        plan: Plan,
        group: Group,
        parameters: dict[str, nn.Parameter],
        buffers: Mapping[str, torch.Tensor],
        random: RandomStream,
        scaler: GradScaler | None,
        elementwise: bool,
    ) -> None:
        """`parameters`, `buffers`: of the model and the loss function, by name. `elementwise`: whether the optimizer
        updates each element by itself."""
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.group = group
        self.parameters = parameters
        self.buffers = buffers
        self.random = random
        self.scaler = scaler
        """Keeps the scale of the loss, where it is scaled."""
        self.elementwise = elementwise
        self.device = next((p.device for p in parameters.values()), torch.device("cpu"))
        trained = [m for m in (model, loss_fn) if isinstance(m, nn.Module) and any(True for _ in m.parameters())]
        self.rows = ShardedRows(trained, parameters, group)
        self.deferred = DeferredParameters(trained)
        self.states = States(group, parameters, self.device)
        self.is_timed = any(map(is_timed, plan.groups))
        """Whether steps differ, so that a later one may ask for states that none before has asked for."""
        self.parts = Parts(optimizer, parameters, plan.groups, self.is_timed)
        self.names = {parameters[p.name]: p.name for p in plan.model.parameters if p.name in parameters}
        """Of the parameters that the plan knows."""
        self._local = frozenset(m.name for g in plan.groups if is_local(g) for m in g.members)
        self.steps = 0
        """Optimizer steps done, those before a checkpoint included."""
        self.since = [0] * len(plan.groups)
        """Of each group, from which step on it holds something of earlier steps, where a checkpoint did not have it."""
        self.has_loaded = False
        """Whether the optimizer's state came from a checkpoint, and parts of it lie with the parts of parameters."""
        self.guard: Watch | None = None
        self.watched_groups = frozenset[int]()
        """Those that synchronize exactly once the guard has stepped in."""
        self._guard_text = ""
        """What a checkpoint had of a guard that this program has not, for the next one."""
        self._groups = plan.groups

    @property
    def owners(self) -> dict[str, nn.Module]:
        """The modules that take part, by what the names of their parameters and buffers begin with."""
        return owners_of(self.model, self.loss_fn)

    @property
    def loss_module(self) -> nn.Module | None:
        """The loss function, where it may have parameters and buffers."""
        return self.loss_fn if isinstance(self.loss_fn, nn.Module) else None

    @property
    def local(self) -> frozenset[str]:
        """Parameters of which each rank updates a replica of its own, that is averaged from time to time; none since
        the guard has stepped in."""
        return frozenset() if self._is_stopped else self._local

    @property
    def _is_stopped(self) -> bool:
        """Whether the guard has stepped in."""
        return self.guard is not None and bool(self.guard.reason)

    @property
    def stopped(self) -> frozenset[int]:
        """Groups whose states nobody goes on with, as the guard has stepped in: checkpoints leave them out."""
        return self.watched_groups if self._is_stopped else frozenset()

    @property
    def are_apart(self) -> bool:
        """Whether the replicas of `local` parameters differ between ranks now."""
        return not self._is_stopped and any(m.doing == "alone" for m in moments_of(self._groups, self.steps - 1))

    @property
    def unsaved(self) -> frozenset[int]:
        """Groups that lack some of what they should hold of earlier steps, so that checkpoints leave that out."""
        groups = enumerate(zip(self._groups, self.since, strict=True))
        return frozenset(i for i, (group, since) in groups if lacks_held(group, self.steps, since))

    def apart_behind(self, steps: int, found: frozenset[tuple[str, str]]) -> frozenset[str]:
        """Parameters whose replicas go on apart behind a checkpoint of so many steps; others of `local` begin anew
        there, all alike. `found`: the states that the checkpoint has, by their names and those of places."""
        names = set[str]()
        for i, group in enumerate(self._groups):
            moment = moment_of(group, steps, 0 if self.states.has_held(i, found) else steps)
            if is_local(group) and moment.doing != "plain" and not moment.begins:
                names |= {member.name for member in group.members}
        return frozenset(names)

    def arrive(self) -> None:
        """Receives parameters that are on their way from the last step; for any rank by itself."""
        try:
            self.deferred.arrive()
        except collectives.CommunicationFailure:
            # A guard counts what all ranks do together, which this need not be: it is entered to explain, no more.
            with self.group.guard("parameters on their way"):
                raise

    def meet(self) -> None:
        """As the guard has stepped in: has ranks that train replicas apart go on from the average of these, and of what
        their optimizers keep. By all ranks together."""
        if not self._local:
            return
        self.arrive()
        with torch.no_grad():
            for name in sorted(self._local):
                parameter = self.parameters[name]
                parameter.copy_(average(parameter.detach(), self.group))
        parts = [p for p in self.parts.every() if any(f.name in self._local for f in p.fragments)]
        scatter_state(parts, gather_state(parts, self.parameters, self.group, self._local), self.parameters)
        self.parts.settle(loaded=True)

    def gathered(self) -> AbstractContextManager[None]:
        """While it is open, all parameters are whole on every rank. By all ranks together, where rows are spread."""
        self.arrive()
        return self.rows.gathered()

    @contextlib.contextmanager
    def traceable(self) -> Iterator[None]:
        """While it is open, the model can be traced: no hook looks for parameters that are elsewhere."""
        with self.rows.traceable(), self.deferred.traceable():
            yield

    def snapshot(self) -> Callable[[], None]:
        """Copies all that a step changes; what is returned puts that back. The scale of the loss is not part of it."""
        self.arrive()
        whole = [p.detach() for n, p in self.parameters.items() if n not in self.rows.shards]
        tensors = copies([*self.buffers.values(), *self.rows.shards.values(), *whole])
        return all_of([self.arrive, tensors, self.parts.kept(), self.random.kept(), self.states.kept()])

    def watched(self) -> dict[str, str]:
        """What a checkpoint has of the guard: its state, as `guard`, where there is one, or was one before."""
        text = self._guard_text if self.guard is None else self.guard.saved()
        return {"guard": text} if text else {}

    def check_guard(self, saved: object) -> str:
        """What a checkpoint has of it; raises `SpecError` where it has something else."""
        if self.guard is not None:
            self.guard.read(saved)
        return str(saved)

    def resume(self, steps: int, guard: str) -> None:
        """Goes on behind a checkpoint that was loaded, before which `steps` steps were taken. `guard`: what it had of
        the guard."""
        if self.guard is not None:
            self.guard.load(guard)
        self._guard_text = guard
        there = (self.states.has_held(i, self.states.found) for i in range(len(self._groups)))
        self.since, self.steps, self.has_loaded = [0 if complete else steps for complete in there], steps, True
        self.parts.settle(loaded=True)
