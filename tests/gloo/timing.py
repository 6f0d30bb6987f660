"""Groups that synchronize from time to time, or late, against the same algorithm written down for one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import VerificationError
from autopar.ops import averages, state
from autopar.runtime.job.servers import serve_here
from autopar.runtime.program import Program
from autopar.spec.cluster import ClusterSpec
from autopar.spec.topology import Topology
from autopar.testing.cases import cluster_of
from tests.gloo.captures import traced_once
from tests.gloo.training import Net, adamw, batch, distance, net, program_for

STEPS = 7
FIDELITY = "local"


def gradients(model: nn.Module, step: int, rank: int, n: int) -> list[torch.Tensor]:
    """A rank's part of the gradient of the global mean."""
    total = sum(len(batch(step, r)[0]) for r in range(n))
    ids, target = batch(step, rank)
    loss = F.cross_entropy(model(ids), target) * (len(ids) / total)
    return list(torch.autograd.grad(loss, trained(model)))


def scaled() -> Net:
    """With a parameter that has no dimensions."""
    model = net()
    model.frozen = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def update(model: nn.Module, optimizer: torch.optim.Optimizer, given: Sequence[torch.Tensor]) -> None:
    for p, g in zip(trained(model), given, strict=True):
        p.grad = g
    optimizer.step()


def summed(models: Sequence[nn.Module], step: int) -> list[torch.Tensor]:
    each = [gradients(m, step, r, len(models)) for r, m in enumerate(models)]
    return [torch.stack(g).sum(0) for g in zip(*each, strict=True)]


class Reference:
    """All ranks in one process."""

    def __init__(
        self,
        n: int,
        every: int = 1,
        delay: int = 0,
        from_step: int = 0,
        offset: int = 0,
        max_norm: float | None = None,
        *,
        make: Callable[[], nn.Module] = net,
    ) -> None:
        self.models = [make() for _ in range(n)]
        self.optimizers = [adamw(m) for m in self.models]
        self.every, self.delay, self.from_step, self.max_norm = every, delay, from_step, max_norm
        self.offset = offset
        self.held: list[list[torch.Tensor]] = []

    def step(self, step: int) -> None:
        n = len(self.models)
        if step < self.from_step or (self.every == 1 and self.delay == 0):
            self._update([summed(self.models, step)] * n)
        elif self.every > 1:
            self._update([[n * g for g in gradients(m, step, r, n)] for r, m in enumerate(self.models)])
            if (step + 1 - self.offset) % self.every == 0:
                for of_ranks in zip(*map(trained, self.models), strict=True):
                    mean = torch.stack([p.detach() for p in of_ranks]).mean(0)
                    for p in of_ranks:
                        p.data.copy_(mean)
        else:
            self.held.append(summed(self.models, step))
            if len(self.held) > self.delay:
                self._update([self.held.pop(0)] * n)

    def average_everything(self) -> None:
        """What a checkpoint does: one process's form has one model, and one state of the optimizer."""
        for of_ranks in zip(*map(trained, self.models), strict=True):
            states = [o.state.get(p, {}) for o, p in zip(self.optimizers, of_ranks, strict=True)]
            alike = [[s[key] for s in states] for key in ("exp_avg", "exp_avg_sq") if key in states[0]]
            for values in ([p.data for p in of_ranks], *alike):
                mean = torch.stack(values).mean(0)
                for value in values:
                    value.copy_(mean)

    def _update(self, each: Sequence[Sequence[torch.Tensor]]) -> None:
        for model, optimizer, given in zip(self.models, self.optimizers, each, strict=True):
            norm = torch.stack([g.norm() for g in given]).norm()
            factor = 1.0 if self.max_norm is None else min(1.0, self.max_norm / (float(norm) + 1e-6))
            update(model, optimizer, [factor * g for g in given])


def said(strategy: str) -> dict[str, Any]:
    pairs = (part.split("=") for part in strategy.split("+")[1:] if "=" in part)
    return {key: int(value) for key, value in pairs}


def off(rank: int, n: int, strategy: str, max_norm: float | None = None, **settings: Any) -> float:
    """How far a program is from the reference, over some steps."""
    reference, model = Reference(n, **said(strategy), max_norm=max_norm), net()
    program = program_for(model, rank, strategy, fidelity=FIDELITY, clip_grad_norm=max_norm, **settings)
    worst = 0.0
    for step in range(STEPS):
        program.step(batch(step, rank))
        reference.step(step)
        worst = max(worst, distance(model, reference.models[rank]))
    return worst


def resumed(rank: int, n: int, strategy: str, at: int) -> float:
    """Saved in the middle, and gone on with in a new program; against the reference, which goes on from averages."""
    reference = Reference(n, make=scaled, **said(strategy))
    model, program = _program(rank, strategy)
    for step in range(at):
        program.step(batch(step, rank))
        reference.step(step)
    state = program.state_dict()
    model, program = _program(rank, strategy)
    program.load_state_dict(state)
    worst = 0.0
    reference.average_everything()
    for step in range(at, at + STEPS):
        program.step(batch(step, rank))
        reference.step(step)
        worst = max(worst, distance(model, reference.models[rank]))
    return worst


@traced_once()
def other_delay(rank: int, n: int, folder: str) -> list[float]:
    """Loaded from what another plan has saved: there are no gradients to go on with, so the first steps hold back, and
    update nothing. Once more where not all that is held back is there yet; through a dict, and through a folder."""
    worst = []
    for through_folder in (False, True):
        reference, at = Reference(n, make=scaled), 3
        model, program = _program(rank, "ddp")
        for step in range(at):
            program.step(batch(step, rank))
            reference.step(step)
        off = 0.0
        for last in (at + 1, at + 1 + STEPS):
            if through_folder:
                program.save(f"{folder}/{last}")
            state = program.state_dict()
            model, program = _program(rank, "ddp+delay=2")
            program.load(f"{folder}/{last}") if through_folder else program.load_state_dict(state)
            reference.delay, reference.held = 2, []
            for step in range(at, last):
                program.step(batch(step, rank))
                reference.step(step)
                off = max(off, distance(model, reference.models[rank]))
            at = last
        worst.append(off)
    return worst


def saved_on_disk(rank: int, n: int, folder: str, strategy: str, at: int) -> bool:
    """Whether a run that was saved and loaded, between two averages, is the one that was not, to the last bit."""
    model, program = _program(rank, strategy)
    for step in range(at):
        program.step(batch(step, rank))
    program.save(f"{folder}/{strategy}")
    other, again = _program(rank, strategy)
    again.load(f"{folder}/{strategy}")
    for step in range(at, at + 3):
        program.step(batch(step, rank))
        again.step(batch(step, rank))
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@traced_once()
def on_disk(rank: int, n: int, folder: str) -> list[bool]:
    strategies = ("ddp+every=3", "zero1+delay=2", "PartitionedAR+every=3", "PartitionedAR+delay=1")
    return [saved_on_disk(rank, n, folder, s, 4) for s in strategies]


@traced_once()
def from_disk(rank: int, n: int, folder: str) -> list[float]:
    """Loaded on other ranks: what each has of the parameters is the mean, and what is held adds up to the sum."""
    model, program = _program(rank, "ddp+every=3")
    program.load(f"{folder}/ddp+every=3")
    _, late = _program(rank, "zero1+delay=2")
    late.load(f"{folder}/zero1+delay=2")
    held = late.state_dict()["state"]
    there = autopar.load_checkpoint(f"{folder}/zero1+delay=2")["state"]
    assert {k: v.keys() for k, v in held.items()} == {k: v.keys() for k, v in there.items()}
    off = max(float((held[k][p] - there[k][p]).abs().max()) for k in held for p in held[k])
    mean = autopar.load_checkpoint(f"{folder}/ddp+every=3")["model"]
    return [off, max(float((v - mean[k]).abs().max()) for k, v in model.state_dict().items())]


def _program(rank: int, strategy: str) -> tuple[Net, Program]:
    model = scaled()
    return model, program_for(model, rank, strategy, fidelity=FIDELITY)


@traced_once()
def wrong(rank: int, n: int) -> list[str]:
    """What the proof of the first step says where own gradients, or held ones, are a tenth too large."""
    said, own, held = list[str](), averages.multiplied, vars(state)["pack"]
    vars(averages)["multiplied"] = lambda tensors, *rest: [1.1 * t for t in own(tensors, *rest)]
    vars(state)["pack"] = lambda *given: 1.1 * held(*given)
    for strategy in ("ddp+every=3", "ddp+delay=1"):
        try:
            _program(rank, strategy)[1].step(batch(0, rank))
        except VerificationError as e:
            said.append(str(e))
    vars(averages)["multiplied"], vars(state)["pack"] = own, held
    return said


STRATEGIES = (
    "ddp+every=3",
    "all_reduce_one_bucket+every=4",
    "PartitionedAR+every=2",
    "ddp+every=2+from_step=3",
    "all_reduce_1MiB+every=3+offset=2",
    "ddp+delay=1",
    "zero1+delay=2",
    "PS+delay=1",
    "all_reduce_1MiB+delay=1+from_step=2",
)


def held_alone() -> float:
    """One process, whose updates are late as well."""
    reference, model = Reference(1, delay=2), net()
    plan = autopar.plan(
        model, ClusterSpec.local(1), example_inputs=batch(0, 0), loss_fn=F.cross_entropy, strategy="ddp"
    )
    groups = tuple(g.model_copy(update={"delay": 2}) for g in plan.groups)
    program = autopar.optimize(
        model,
        example_inputs=batch(0, 0),
        loss_fn=F.cross_entropy,
        optimizer=adamw(model),
        plan=plan.model_copy(update={"groups": groups, "fidelity": "stale"}),
    )
    for step in range(STEPS):
        program.step(batch(step, 0))
        reference.step(step)
    return distance(model, reference.models[0])


@traced_once()
def everything(rank: int, n: int) -> dict[str, float]:
    found = {s: off(rank, n, s) for s in STRATEGIES}
    found["clipped alone"] = off(rank, n, "ddp+every=3", 0.05)
    found["clipped late"] = off(rank, n, "zero1+delay=1", 0.05)
    if n == 2:
        found["resumed apart"] = resumed(rank, n, "ddp+every=3", 4)
        found["resumed late"] = resumed(rank, n, "zero1+delay=2", 4)
        found["resumed early"] = resumed(rank, n, "ddp+delay=2", 1)
    return found


def every_fourth(rank: int, n: int) -> dict[str, float]:
    """Three strategies, none of which knows of it; one has hosts that serve."""
    cluster = cluster_of(n)
    if rank == 0:
        serve_here(Topology(cluster).servers)
    found = {}
    for name, given in (("ddp", None), ("hierarchical", ClusterSpec.local(n)), ("servers", cluster)):
        found[name] = off(rank, n, f"{name}+every=4", cluster_spec=given)
    return found
