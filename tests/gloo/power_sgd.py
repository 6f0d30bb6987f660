"""PowerSGD as its authors write it down, all ranks in one process; and what its tests run on each rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.runtime.program import Program
from autopar.spec.plan import ParameterSlice, SyncGroup
from tests.gloo.captures import traced_once
from tests.gloo.plans import ddp_plan
from tests.gloo.training import Batch, adamw, batch

STEPS = 7
FILE = "state.pt"
Optimizer = Callable[[nn.Module], torch.optim.Optimizer]
Member = tuple[str, int | None, int, int]
"""A parameter, and where its slice begins and ends in a dimension; `None` of all of it."""


class Net(nn.Module):
    """A tied table, a convolution; parameters without dimensions, frozen, without elements, without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.hidden = nn.Linear(8, 12)
        self.conv = nn.Conv1d(3, 2, 3, padding=1)
        self.back = nn.Linear(8, 8, bias=False)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.idle = nn.Parameter(torch.ones(6, 4))
        self.none = nn.Parameter(torch.ones(0, 4))
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.hidden(self.embed(ids)))
        mixed = self.back(self.conv(hidden.view(-1, 3, 4)).flatten(1)) * self.scale
        logits: torch.Tensor = self.out(mixed * self.frozen) + 0.0 * self.idle.sum() + self.none.sum()
        return logits


def net() -> Net:
    torch.manual_seed(5)
    return Net().double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def whole(*names: str) -> tuple[Member, ...]:
    return tuple((name, None, 0, 0) for name in names)


Groups = Sequence[tuple[int, tuple[Member, ...]]]
"""The rank of each group, and its members."""
GROUPS: Groups = (
    (2, whole("scale", "hidden.weight", "embed.weight", "idle", "none")),
    (1, whole("conv.weight", "conv.bias", "hidden.bias")),
    (1, whole("back.weight")),
)
SLICES: Groups = (
    (1, (("hidden.weight", 1, 0, 3), ("embed.weight", 0, 0, 4), *whole("scale", "idle", "none"))),
    (2, (("hidden.weight", 1, 3, 8), ("embed.weight", 0, 4, 11), ("back.weight", 1, 4, 8))),
    (1, whole("conv.weight", "conv.bias")),
    (1, (*whole("hidden.bias"), ("back.weight", 1, 0, 4))),
)
"""Of columns and of rows; one group has one member that is a matrix worth compressing, or none."""


class Reference:
    """All ranks in one process."""

    def __init__(self, n: int, groups: Groups, optimizer: Optimizer, max_norm: float | None = None) -> None:
        self.n, self.groups, self.max_norm = n, groups, max_norm
        self.model = net()
        self.optimizer = optimizer(self.model)
        self.count = 0
        self.residuals: dict[tuple[Member, int], torch.Tensor] = {}
        """Of each member, and each rank."""
        self.factors: dict[Member, torch.Tensor] = {}
        """Of each member that is compressed: what was summed last."""

    def step(self, batches: Sequence[Sequence[Batch]]) -> None:
        """`batches`: of each rank, its micro-batches."""
        total = sum(len(b[0]) for of_rank in batches for b in of_rank)
        own = [self._gradients(of_rank, total) for of_rank in batches]
        found = {name: torch.zeros_like(p) for name, p in self._trained().items()}
        for rank, members in self.groups:
            lefts = self._begin_with_left(rank, members)
            for member in members:
                cut = [_cut(g[member[0]], member) for g in own]
                if self.n == 1 or member not in lefts:
                    update = torch.stack(cut).sum(0)
                else:
                    update = self._compressed(member, rank, cut, (self.count % 2 == 1) != lefts[member])
                _cut(found[member[0]], member).copy_(update)
        self.count += 1
        norm = torch.stack([g.norm() for g in found.values()]).norm()
        factor = 1.0 if self.max_norm is None else min(1.0, self.max_norm / (float(norm) + 1e-6))
        for name, p in self._trained().items():
            p.grad = factor * found[name]
        self.optimizer.step()

    def _compressed(self, member: Member, rank: int, own: Sequence[torch.Tensor], left_given: bool) -> torch.Tensor:
        """Of the given factor, orthonormal, and M_r = gradient + residual of each rank: the sum of M_r Q, times Q^T."""
        shape = own[0].shape
        matrices = [g.reshape(shape[0], -1) + self.residuals.get((member, r), 0.0) for r, g in enumerate(own)]
        if left_given:
            matrices = [m.t() for m in matrices]
        given = self.factors.get(member)
        q = gram_schmidt(given, matrices[0].shape[1], rank)
        summed = torch.zeros(matrices[0].shape[0], rank, dtype=torch.float64)
        for r, m in enumerate(matrices):
            p = m @ q
            left = m - p @ q.t()
            self.residuals[member, r] = left.t() if left_given else left
            summed += p
        self.factors[member] = summed
        update = summed @ q.t()
        return (update.t() if left_given else update).reshape(shape)

    def _begin_with_left(self, rank: int, members: Sequence[Member]) -> dict[Member, bool]:
        """Of the members that are compressed, whether the left factor is given at first: the largest differences of two
        sides first, each where it makes what is summed in even and in odd steps more alike."""
        table, sides = self._trained(), dict[Member, tuple[int, int]]()
        for m in members:
            shape = _cut(table[m[0]], m).shape
            if len(shape) > 1 and table[m[0]].numel():
                a, b = shape[0], int(shape[1:].numel())
                if 2 * rank * max(a, b) <= a * b:
                    sides[m] = a, b
        right, left, chosen = 0, 0, {}
        for m, (a, b) in sorted(sides.items(), key=lambda item: -abs(item[1][0] - item[1][1])):
            chosen[m] = abs((right + a) - (left + b)) < abs((right + b) - (left + a))
            right, left = (right + a, left + b) if chosen[m] else (right + b, left + a)
        return chosen

    def _gradients(self, batches: Sequence[Batch], total: int) -> dict[str, torch.Tensor]:
        """A rank's part of the gradient of the global mean."""
        found = {name: torch.zeros_like(p) for name, p in self._trained().items()}
        for ids, target in batches:
            loss = F.cross_entropy(self.model(ids), target) * (len(ids) / total)
            for g, into in zip(torch.autograd.grad(loss, list(self._trained().values())), found.values(), strict=True):
                into += g
        return found

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}


def gram_schmidt(factor: torch.Tensor | None, length: int, rank: int) -> torch.Tensor:
    """Orthonormal columns of the factor, in its largest element's unit, plus 1e-4 of a matrix that is drawn."""
    drawn = torch.rand(length, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(2008_01425))
    q = 1e-4 * (2 * drawn - 1)
    if factor is not None and factor.any():
        q = factor / factor.abs().max() + q
    for j in range(rank):
        for _ in range(2):
            for i in range(j):
                q[:, j] -= (q[:, i] @ q[:, j]) * q[:, i]
        q[:, j] /= q[:, j].norm()
    return q


def _cut(whole: torch.Tensor, member: Member) -> torch.Tensor:
    _, dim, start, stop = member
    return whole if dim is None else whole.detach().narrow(dim, start, stop - start)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def distance(a: nn.Module, b: nn.Module) -> float:
    return float((flat(a) - flat(b)).abs().max())


def bits_of(model: nn.Module) -> str:
    """A hash of all bits of the parameters."""
    return hashlib.sha256(flat(model).numpy().tobytes()).hexdigest()[:16]


def program(rank: int, n: int, groups: Groups, optimizer: Optimizer, **settings: Any) -> tuple[nn.Module, Program]:
    model, example = net(), batch(0, rank)
    plan = ddp_plan(model, n, example)
    made = tuple(
        SyncGroup(
            strategy="power_sgd",
            options={"rank": columns},
            members=tuple(
                ParameterSlice(name=name) if dim is None else ParameterSlice(name=name, dim=dim, start=a, stop=b)
                for name, dim, a, b in members
            ),
        )
        for columns, members in groups
    )
    plan = plan.model_copy(update={"groups": made, "fidelity": "compressed"})
    found: Program = autopar.optimize(
        model, plan=plan, optimizer=optimizer(model), example_inputs=example, loss_fn=F.cross_entropy, **settings
    )
    return model, found


def followed(rank: int, n: int, case: str) -> tuple[float, list[str]]:
    """How far a program is from the reference over some steps; and what bits its parameters have behind each."""
    groups, optimizer = (SLICES if "slices" in case else GROUPS), (sgd if "sgd" in case else adamw)
    max_norm = 0.05 if "clipped" in case else None
    settings: dict[str, Any] = {"capture": "never"} if "eager" in case else {}
    reference = Reference(n, groups, optimizer, max_norm)
    model, mine = program(rank, n, groups, optimizer, clip_grad_norm=max_norm, **settings)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (mine.optimizer, reference.optimizer)]
    worst, bits = 0.0, list[str]()
    for step in range(STEPS):
        size = 3 if "equal" in case else None
        counts = [1 + (r + step) % 2 if "micro" in case else 1 for r in range(n)]
        batches = [[batch(10 * step + k, r, size) for k in range(count)] for r, count in enumerate(counts)]
        if "micro" in case:
            mine.step(micro_batches=batches[rank])
        else:
            mine.step(batches[rank][0])
        reference.step(batches)
        for scheduler in schedulers if "scheduled" in case else ():
            scheduler.step()
        worst = max(worst, distance(model, reference.model))
        bits.append(bits_of(model))
    return worst, bits


CASES = (
    "sgd, equal",
    "sgd, slices, uneven, micro-batches",
    "adamw, uneven, clipped, scheduled, micro-batches",
    "sgd, uneven, eager",
)


@traced_once()
def everything(rank: int, n: int) -> dict[str, Any]:
    found: dict[str, Any] = {case: followed(rank, n, case) for case in (CASES if n != 4 else CASES[2:3])}
    return found | ({"losses": losses(rank, n)} if n == 2 else {})


def losses(rank: int, n: int) -> list[float]:
    """The first and the last loss of a tiny training: exact, and with two columns a factor."""
    found = []
    for exact in (True, False):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8)).double()
        teacher = nn.Linear(16, 8).double().requires_grad_(False)
        inputs = torch.randn(60, 12, 16, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        how: dict[str, Any] = {"example_inputs": (inputs[0], teacher(inputs[0])), "loss_fn": F.mse_loss}
        plan = autopar.plan(model, autopar.ClusterSpec.local(n), strategy="ddp", **how)
        if not exact:
            changed = {"strategy": "power_sgd", "options": {"rank": 2}}
            groups = tuple(g.model_copy(update=changed) for g in plan.groups)
            plan = plan.model_copy(update={"groups": groups, "fidelity": "compressed"})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        mine = autopar.optimize(model, plan=plan, optimizer=optimizer, **how)
        values = [float(mine.step((x, teacher(x)))) for x in inputs]
        found += [values[0], values[-1]]
    return found


@traced_once()
def saved(rank: int, n: int, folder: str) -> dict[str, Any]:
    """Some steps, and two checkpoints. Loaded from the folder, a run is the one that was not interrupted, to the last
    bit; from the dict, of which each rank has an equal part of the residuals, but for rounding."""
    model, mine = program(rank, n, GROUPS, adamw)
    for step in range(3):
        mine.step(batch(step, rank))
    mine.save(Path(folder) / "disk")
    state = mine.state_dict()
    if rank == 0:
        torch.save(state, Path(folder) / FILE)
    (from_disk, disk), (from_dict, other) = program(rank, n, GROUPS, adamw), program(rank, n, GROUPS, adamw)
    disk.load(Path(folder) / "disk")
    other.load_state_dict(state)
    worst = 0.0
    for step in range(3, 6):
        for each in (mine, disk, other):
            each.step(batch(step, rank))
        assert bits_of(model) == bits_of(from_disk), "not the run that was not interrupted"
        worst = max(worst, distance(model, from_dict))
    return {"off": worst, "sums": sums(state)}


@traced_once()
def loaded(rank: int, n: int, folder: str, before: int) -> dict[str, Any]:
    """The same sums on another number of ranks, from both checkpoints. They go on as the definition does where one rank
    has all of the residuals, for updates depend on the sum alone. Options that ask for other factors begin with new
    ones."""
    state = torch.load(Path(folder) / FILE, weights_only=True)
    found, worst = [], 0.0
    for from_disk in (False, True):
        model, mine = program(rank, n, GROUPS, adamw)
        mine.load(Path(folder) / "disk") if from_disk else mine.load_state_dict(state)
        found.append(sums(mine.state_dict()))
        reference = Reference(before, GROUPS, adamw)
        for step in range(3):
            reference.step([[batch(step, r)] for r in range(before)])
        for member in reference.factors:
            reference.residuals[member, 0] += sum(reference.residuals.pop((member, r)) for r in range(1, before))
        reference.n = n
        for step in range(3, 6):
            mine.step(batch(step, rank))
            reference.step([[batch(step, r)] for r in range(n)])
            worst = max(worst, distance(model, reference.model))
    other = tuple((3 - columns, members) for columns, members in GROUPS)
    _, mine = program(rank, n, other, adamw)
    mine.load_state_dict(state)
    mine.step(batch(3, rank))
    return {"sums": found, "off": worst}


def sums(state: dict[str, Any]) -> dict[str, float]:
    return {name: float(value.sum()) for name, value in state["state"]["residual"].items()}
