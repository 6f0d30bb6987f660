"""Sparsification on ranks, against the same algorithms written down for one process, in float64."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import VerificationError
from autopar.ops import sparsification
from autopar.runtime.program import Program
from autopar.spec.plan import Plan, SyncGroup
from tests.gloo.training import Batch, Net, batch

STEPS = 8
DENSITY, CHUNK, MOMENTUM = 0.1, 5, 0.8
METHODS = ("top_k", "random_k", "dgc")


class Idle(Net):
    """With a tied parameter, a frozen one, and one whose gradient is always zero."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(23))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = super().forward(ids)
        return logits + 0.0 * self.idle.sum()


def idle() -> Idle:
    torch.manual_seed(5)
    return Idle().double()


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained(model).values(), lr=lr)


def decayed(model: nn.Module) -> torch.optim.Optimizer:
    """In two groups, of which one decays weights."""
    matrices = [p for p in trained(model).values() if p.dim() > 1]
    rest = [p for p in trained(model).values() if p.dim() <= 1]
    return torch.optim.SGD([{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 0.05}], lr=0.1)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained(model).values(), lr=0.05, momentum=0.9, nesterov=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in trained(model).values() if p.dim() > 1]
    rest = [p for p in trained(model).values() if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": rest, "weight_decay": 0.0, "lr": 2e-3}]
    return torch.optim.AdamW(groups, lr=1e-3)


@dataclass(frozen=True)
class Case:
    """One training."""

    method: str
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    sizes: tuple[int, ...] = (3, 1, 2, 2)
    """Samples of each rank's batches."""
    micro: bool = False
    """Whether steps are of micro-batches, of another number on each rank."""
    max_norm: float | None = None
    schedules: bool = False
    timing: tuple[tuple[str, int], ...] = ()
    """Fields of the plan's groups."""

    def batches(self, step: int, rank: int) -> list[Batch]:
        count = 1 + (rank + step) % 2 if self.micro else 1
        return [batch(10 * step + k, rank, self.sizes[rank]) for k in range(count)]


def cases(method: str, n: int) -> list[Case]:
    plain = method == "dgc"
    clipped = Case(method, decayed if plain else momentum, max_norm=0.05)
    scheduled = Case(method, sgd if plain else adamw, sizes=(2, 2, 2, 2), schedules=True)
    warmed = Case(method, sgd if plain else momentum, micro=True, timing=(("from_step", 3),))
    late = Case(method, sgd, timing=(("delay", 1), ("from_step", 2)))
    return {1: [warmed], 2: [clipped, scheduled, warmed], 3: [clipped, late], 4: [scheduled]}[n]


def parts(names: Sequence[str]) -> list[list[str]]:
    """Two groups."""
    return [list(names[::2]), list(names[1::2])]


class Reference:
    """All ranks in one process, with one model, as replicas are alike."""

    def __init__(self, n: int, case: Case) -> None:
        self.n, self.case, self.model = n, case, idle()
        self.optimizer = case.optimizer(self.model)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.groups = parts(list(trained(self.model)))
        self.rest = [[self._zeros(g) for _ in range(n)] for g in self.groups]
        """Of each group and rank: the residual; of DGC, v."""
        self.grown = [[self._zeros(g) for _ in range(n)] for g in self.groups]
        """Of DGC, u."""
        self.held: list[list[list[torch.Tensor]]] = []
        self.drawn = 0

    def step(self, step: int) -> None:
        timing = dict(self.case.timing)
        delay, first = timing.get("delay", 0), timing.get("from_step", 0)
        given = self._gradients(step)
        if delay and step >= first:
            self.held.append(given)
            if len(self.held) <= delay:
                return
            given = self.held.pop(0)
        plain = step < first
        for g, of_ranks in enumerate(given):
            self._give(self.groups[g], self._sum(g, of_ranks, plain))
        self.drawn += not plain
        if self.case.max_norm is not None:
            nn.utils.clip_grad_norm_(trained(self.model).values(), self.case.max_norm)
        self.optimizer.step()
        if self.case.schedules:
            self.scheduler.step()

    def _sum(self, g: int, of_ranks: list[torch.Tensor], plain: bool) -> torch.Tensor:
        """What is updated with."""
        if self.case.method == "dgc":
            for rank, gradient in enumerate(of_ranks):
                self.grown[g][rank] = MOMENTUM * self.grown[g][rank] + gradient
            of_ranks = self.grown[g]
        if plain or self.n == 1:
            return torch.stack(of_ranks).sum(0)
        for rank, value in enumerate(of_ranks):
            self.rest[g][rank] = self.rest[g][rank] + value
        elements = len(of_ranks[0])
        spans = [range(a, min(a + CHUNK, elements)) for a in range(0, elements, CHUNK)]
        if self.case.method == "random_k":
            rated = [float(_hash(c ^ _hash(self.drawn))) for c in range(len(spans))]
        else:
            rated = [sum(float(x[i]) ** 2 for x in self.rest[g] for i in span) for span in spans]
        order = sorted(range(len(spans)), key=lambda c: (-rated[c], c))
        total = torch.zeros(elements, dtype=torch.float64)
        for c in order[: math.ceil(DENSITY * len(spans))]:
            for i in spans[c]:
                for rank in range(self.n):
                    total[i] += self.rest[g][rank][i]
                    self.rest[g][rank][i] = 0.0
                    self.grown[g][rank][i] = 0.0
        return total

    def _gradients(self, step: int) -> list[list[torch.Tensor]]:
        """Of each group and rank: its part of the gradient of the global mean, flat."""
        each = [self.case.batches(step, r) for r in range(self.n)]
        total = sum(len(b[0]) for of_rank in each for b in of_rank)
        found: list[list[torch.Tensor]] = [[] for _ in self.groups]
        for of_rank in each:
            loss = sum(F.cross_entropy(self.model(ids), to) * (len(ids) / total) for ids, to in of_rank)
            assert isinstance(loss, torch.Tensor)
            own = torch.autograd.grad(loss, list(trained(self.model).values()))
            gradients = dict(zip(trained(self.model), own, strict=True))
            for g, names in enumerate(self.groups):
                found[g].append(torch.cat([gradients[name].reshape(-1) for name in names]))
        return found

    def _give(self, names: Sequence[str], flat: torch.Tensor) -> None:
        start, parameters = 0, trained(self.model)
        for name in names:
            p = parameters[name]
            p.grad = flat[start : start + p.numel()].view(p.shape).clone()
            start += p.numel()

    def _zeros(self, names: Sequence[str]) -> torch.Tensor:
        return torch.zeros(sum(trained(self.model)[name].numel() for name in names), dtype=torch.float64)


def _hash(x: int) -> int:
    for _ in range(2):
        x = (((x >> 16) ^ x) * 0x45D9F3B) % 2**32
    return (x >> 16) ^ x


@cache
def plan_of(n: int) -> Plan:
    """In one group."""
    return autopar.plan(
        idle(),
        autopar.ClusterSpec.local(n),
        strategy="all_reduce_one_bucket",
        example_inputs=batch(0, 0),
        loss_fn=F.cross_entropy,
    )


def program_for(
    model: nn.Module,
    rank: int,
    n: int,
    method: str,
    optimizer: torch.optim.Optimizer,
    timing: Sequence[tuple[str, int]] = (),
    **settings: Any,
) -> Program:
    """Under two groups of a method."""
    options: dict[str, Any] = {} if method == "all_reduce" else {"density": DENSITY, "chunk": CHUNK}
    if method == "dgc":
        options["momentum"] = MOMENTUM
    groups = tuple(
        SyncGroup.model_validate(
            {"strategy": method, "options": options, "members": [{"name": name} for name in names], **dict(timing)}
        )
        for names in parts(list(trained(model)))
    )
    plan = plan_of(n).model_copy(update={"groups": groups, "fidelity": "local"})
    example = batch(0, rank)
    found: Program = autopar.optimize(
        model, plan=plan, optimizer=optimizer, example_inputs=example, loss_fn=F.cross_entropy, **settings
    )
    return found


def off(rank: int, n: int, case: Case, **settings: Any) -> tuple[float, str]:
    """How far a program is from the reference, at most over some steps; and a hash of all bits of its parameters,
    behind each."""
    reference, model = Reference(n, case), idle()
    optimizer = case.optimizer(model)
    program = program_for(
        model, rank, n, case.method, optimizer, clip_grad_norm=case.max_norm, timing=case.timing, **settings
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    worst, bits = 0.0, hashlib.sha256()
    for step in range(STEPS):
        own = case.batches(step, rank)
        program.step(micro_batches=own) if case.micro else program.step(own[0])
        if case.schedules:
            scheduler.step()
        reference.step(step)
        pairs = zip(model.parameters(), reference.model.parameters(), strict=True)
        worst = max(worst, *(float((a - b).detach().abs().max()) for a, b in pairs))
        for p in model.parameters():
            bits.update(p.detach().numpy().tobytes())
    return worst, bits.hexdigest()


def saved(rank: int, n: int, folder: str, method: str) -> dict[str, float]:
    """A run that is saved and loaded goes on to the last bit; returns the sums of its residuals."""
    model, other = idle(), idle()
    program = program_for(model, rank, n, method, sgd(model))
    for step in range(3):
        program.step(batch(step, rank))
    program.save(Path(folder) / method)
    again = program_for(other, rank, n, method, sgd(other))
    again.load(Path(folder) / method)
    state = program.state_dict()
    for step in range(3, 6):
        program.step(batch(step, rank))
        again.step(batch(step, rank))
    alike = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in alike), "not the run that was not interrupted"
    if rank == 0:
        torch.save(state, Path(folder) / f"{method}.pt")
    return _sums(state)


def loaded(rank: int, n: int, folder: str, method: str) -> dict[str, float]:
    """The same sums on another number of ranks, from a file and from a folder."""
    model = idle()
    program = program_for(model, rank, n, method, sgd(model))
    program.load_state_dict(torch.load(Path(folder) / f"{method}.pt", weights_only=True))
    found = _sums(program.state_dict())
    program.load(Path(folder) / method)
    assert _sums(program.state_dict()) == pytest.approx(found, rel=1e-12)
    program.step(batch(3, rank))
    return found


def _sums(state: dict[str, Any]) -> dict[str, float]:
    """Of each state and parameter, of all that it has, weighted so that no two places count alike."""
    found = {}
    for key, by_name in state["state"].items():
        for name, value in by_name.items():
            flat = value.double().reshape(-1)
            found[f"{key} {name}"] = float((flat * torch.arange(1, len(flat) + 1)).sum())
    return found


def losses(rank: int, n: int, method: str) -> list[float]:
    """The losses of 60 steps on the same batches."""
    model = idle()
    lr = 0.5 if method in ("all_reduce", "top_k", "random_k") else 0.5 * (1 - MOMENTUM)
    program = program_for(model, rank, n, method, sgd(model, lr))
    return [float(program.step(batch(step % 2, rank, 4))) for step in range(60)]


class Sometimes(nn.Module):
    """With a part that is used as long as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.always, self.once = nn.Linear(6, 6), nn.Linear(6, 6)
        self.uses = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.always(x)
        return found + self.once(x) if self.uses else found


def unused_later(rank: int, n: int, method: str) -> float:
    """How far what is kept of gradients that came once is from arriving, of a model that runs eagerly: what all ranks
    have moved by, and keep, is the first gradient."""
    model, eager = Sometimes().double(), Sometimes().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    draws = [torch.Generator().manual_seed(r) for r in range(n)]
    data = [torch.randn(4, 6, generator=draw, dtype=torch.float64) for draw in draws]
    plan = autopar.plan(
        model,
        autopar.ClusterSpec.local(n),
        strategy=method,
        fidelity="compressed",
        example_inputs=(data[rank], data[rank]),
        loss_fn=F.mse_loss,
        capture="never",
    )
    options = {"density": 0.2, "chunk": CHUNK}
    plan = plan.model_copy(update={"groups": tuple(g.model_copy(update={"options": options}) for g in plan.groups)})
    program = autopar.optimize(
        model,
        plan=plan,
        optimizer=optimizer,
        example_inputs=(data[rank], data[rank]),
        loss_fn=F.mse_loss,
        capture="never",
        check="always",
    )
    expected = torch.autograd.grad(F.mse_loss(eager(torch.cat(data)), torch.cat(data)), eager.once.weight)[0]
    for step in range(6):
        model.uses = step == 0
        program.step((data[rank], data[rank]))
    kept = program.state_dict()["state"]["residual"]["once.weight"]
    moved = eager.once.weight.detach() - model.once.weight.detach()
    assert bool((moved != 0).sum() > 36 * 0.4), "nothing has arrived later"
    return float((moved + kept - expected).abs().max())


def wrong(rank: int, n: int) -> dict[str, str]:
    """What the proof says where a tenth too much is sent, where what is sent is kept as well, and where momentum is
    another than is said."""

    def more(*given: Any) -> torch.Tensor:
        return 1.1 * take(*given)

    def twice(state: torch.Tensor, *given: Any) -> torch.Tensor:
        return take(state.clone(), *given)

    def another(state: torch.Tensor, value: torch.Tensor, decay: float) -> torch.Tensor:
        return accumulate(state, value, decay if decay == 1 else decay + 0.1)

    said, inside = {}, vars(sparsification)
    take: Callable[..., torch.Tensor] = inside["take_chunks"]
    accumulate: Callable[..., torch.Tensor] = inside["accumulate"]
    faults = {"more": ("take_chunks", more), "twice": ("take_chunks", twice), "another": ("accumulate", another)}
    for fault, (name, function) in faults.items():
        for method in ("dgc",) if name == "accumulate" else ("top_k", "dgc"):
            model, inside[name] = idle(), function
            program = program_for(model, rank, n, method, sgd(model), check="always")
            for step in range(2):
                try:
                    program.step(batch(step, rank))
                except VerificationError as e:
                    said[f"{method}, {fault}"] = f"step {step}: {e}"
                    break
            inside.update(take_chunks=take, accumulate=accumulate)
    return said


def everything(rank: int, n: int, folder: str) -> dict[str, Any]:
    """All of the above on this many ranks."""
    found: dict[str, Any] = {}
    for method in METHODS:
        for i, case in enumerate(cases(method, n)):
            found[f"{method} {i}"] = off(rank, n, case, check="always" if n == 2 else "first")
        if n == 2:
            found[f"saved {method}"] = saved(rank, n, folder, method)
        if n == 3:
            found[f"loaded {method}"] = loaded(rank, n, folder, method)
    if n == 2:
        found["wrong"] = wrong(rank, n)
        found["unused"] = [unused_later(rank, n, method) for method in ("top_k", "random_k")]
        found["losses"] = {method: losses(rank, n, method) for method in ("all_reduce", *METHODS)}
    return found
