"""DiLoCo as its authors write it down, all ranks in one process; and what its tests run on each rank."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.runtime.program import Program
from autopar.spec.plan import ParameterSlice, SyncGroup
from tests.gloo.captures import traced_once
from tests.gloo.compressed import GROUPS, HOWS, How, Quantizing, net
from tests.gloo.plans import ddp_plan
from tests.gloo.training import Batch, batch

STEPS = 9
FILE = "state.pt"


@dataclass(frozen=True)
class Case:
    """Two groups under DiLoCo, and a way to train."""

    every: tuple[int, int] = (3, 3)
    offset: tuple[int, int] = (0, 0)
    from_step: int = 0
    how: How = HOWS["adamw"]
    options: dict[str, Any] = field(default_factory=dict)
    size: int | None = None
    """Of all batches; `None` where ranks have as many samples as `SIZES` says."""
    settings: dict[str, Any] = field(default_factory=dict)
    strategy: str = "diloco"

    @property
    def lr(self) -> float:
        return float(self.options.get("outer_lr", 0.7))

    @property
    def momentum(self) -> float:
        return float(self.options.get("outer_momentum", 0.9))

    @property
    def wire(self) -> str:
        return str(self.options.get("wire", "same"))

    def batches(self, step: int, rank: int) -> list[Batch]:
        return [batch(10 * step + k, rank, self.size) for k in range(self.how.micro_batches)]


class Reference:
    """All ranks in one process."""

    def __init__(self, case: Case, n: int) -> None:
        self.case, self.n = case, n
        self.models = [net() for _ in range(n)]
        self.optimizers = [case.how.optimizer(m) for m in self.models]
        self.named = [dict(m.named_parameters()) for m in self.models]
        self.anchors: dict[str, torch.Tensor] = {}
        self.momenta: dict[str, torch.Tensor] = {}
        self.residuals: dict[tuple[int, str], torch.Tensor] = {}
        bits = {"int8": 8, "int4": 4}.get(case.wire, 8)
        block = int(case.options.get("block", 256))
        self.quantizers = [Quantizing(n, i, bits, block, in_parts=n > 2) for i in range(len(GROUPS))]

    def step(self, step: int) -> None:
        parts = [self._gradients(step, r) for r in range(self.n)]
        apart = step >= self.case.from_step
        for rank in range(self.n):
            if apart:
                own = {name: self.n * g for name, g in parts[rank].items()}
            else:
                own = {name: sum((p[name] for p in parts), torch.zeros(())) for name in parts[0]}
            self._update(rank, own, apart)
        for index, names in enumerate(GROUPS):
            if apart and (step + 1 - self.case.offset[index]) % self.case.every[index] == 0:
                self._synchronize(index, names)

    def _update(self, rank: int, gradients: dict[str, torch.Tensor], apart: bool) -> None:
        """The inner optimizer, from what ranks began with where that is not kept yet."""
        named, limit = self.named[rank], self.case.how.clip
        norm = float(torch.stack([g.norm() for g in gradients.values()]).norm())
        factor = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
        for name, g in gradients.items():
            if apart and rank == 0:
                self.anchors.setdefault(name, named[name].detach().clone())
            named[name].grad = factor * g
        self.optimizers[rank].step()

    def _synchronize(self, index: int, names: Sequence[str]) -> None:
        for name, outer in self._outer_gradients(index, names).items():
            lr, c = self.case.lr, self.case.momentum
            self.momenta[name] = c * self.momenta.get(name, torch.zeros_like(outer)) + outer
            self.anchors[name] = self.anchors[name] - lr * (outer + c * self.momenta[name])
            for named in self.named:
                named[name].data.copy_(self.anchors[name])

    def _outer_gradients(self, index: int, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """What ranks began with, less the mean of what they have come to."""
        moved = [{name: (self.anchors[name] - named[name].detach()) / self.n for name in names} for named in self.named]
        if self.n > 1 and self.case.wire == "bfloat16":
            moved = [self._rounded(rank, own) for rank, own in enumerate(moved)]
        elif self.n > 1 and self.case.wire != "same":
            flat = [torch.cat([v.reshape(-1) for v in own.values()]).numpy() for own in moved]
            total = torch.from_numpy(self.quantizers[index].sum(flat))
            parts = torch.split(total, [v.numel() for v in moved[0].values()])
            return {name: part.view(moved[0][name].shape) for name, part in zip(names, parts, strict=True)}
        found = {}
        for name in names:
            found[name] = moved[0][name].clone()
            for own in moved[1:]:
                found[name] = (found[name] + own[name]).to(moved[0][name].dtype)
        return {name: value.double() for name, value in found.items()}

    def _rounded(self, rank: int, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {}
        for name, value in own.items():
            full = value + self.residuals.get((rank, name), 0.0)
            found[name] = full.bfloat16()
            self.residuals[rank, name] = full - found[name].double()
        return found

    def _gradients(self, step: int, rank: int) -> dict[str, torch.Tensor]:
        """A rank's part of the gradient of the global mean."""
        count = sum(len(ids) for r in range(self.n) for ids, _ in self.case.batches(step, r))
        trained = {name: p for name, p in self.named[rank].items() if p.requires_grad}
        loss = torch.zeros((), dtype=torch.float64)
        for ids, target in self.case.batches(step, rank):
            loss = loss + F.cross_entropy(self.models[rank](ids), target, reduction="sum") / count
        return dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))

    def average_everything(self) -> None:
        """What a checkpoint does: one process's form has one model, and one state of the optimizer."""
        for name in self.named[0]:
            of_ranks = [named[name] for named in self.named]
            states = [o.state.get(p, {}) for o, p in zip(self.optimizers, of_ranks, strict=True)]
            keys = [k for k in ("exp_avg", "exp_avg_sq", "momentum_buffer") if k in states[0]]
            for values in ([p.data for p in of_ranks], *([s[k] for s in states] for k in keys)):
                mean = torch.stack(values).mean(0)
                for value in values:
                    value.copy_(mean)


def program_of(rank: int, n: int, case: Case, model: nn.Module) -> Program:
    example = batch(0, rank)
    plan = ddp_plan(model, n, example)
    groups = tuple(
        SyncGroup(
            strategy=case.strategy,
            options=case.options,
            members=tuple(ParameterSlice(name=name) for name in names),
            every=every,
            offset=offset,
            from_step=case.from_step,
        )
        for names, every, offset in zip(GROUPS, case.every, case.offset, strict=True)
    )
    found: Program = autopar.optimize(
        model,
        plan=plan.model_copy(update={"groups": groups, "fidelity": "local"}),
        optimizer=case.how.optimizer(model),
        example_inputs=example,
        loss_fn=F.cross_entropy,
        clip_grad_norm=case.how.clip,
        **case.settings,
    )
    return found


def take_step(program: Program, case: Case, step: int, rank: int) -> float:
    mine = case.batches(step, rank)
    return float(program.step(micro_batches=mine) if len(mine) > 1 else program.step(mine[0]))


def distance(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((x - y).detach().abs().max()) for x, y in pairs if x.numel())


def bits_of(model: nn.Module, names: Sequence[str]) -> str:
    """A hash of all bits of some parameters."""
    named = dict(model.named_parameters())
    flat = torch.cat([named[name].detach().reshape(-1) for name in names])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def followed(rank: int, n: int, case: Case) -> tuple[float, list[str]]:
    """How far a program is from the reference over some steps; and what bits the parameters of groups have behind the
    steps in which they synchronize."""
    reference, model = Reference(case, n), net()
    program = program_of(rank, n, case, model)
    optimizers = (program.optimizer, *reference.optimizers) if case.how.schedules else ()
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers]
    worst, bits = 0.0, list[str]()
    for step in range(STEPS):
        take_step(program, case, step, rank)
        reference.step(step)
        for scheduler in schedulers:
            scheduler.step()
        worst = max(worst, distance(model, reference.models[rank]))
        for names, every, offset in zip(GROUPS, case.every, case.offset, strict=True):
            if step < case.from_step or (step + 1 - offset) % every == 0:
                bits.append(bits_of(model, names))
    return worst, bits


CASES = {
    "adamw": Case(),
    "momentum, equal batches, clipped": Case((2, 2), how=HOWS["clipped"], size=3),
    "later, accumulated": Case((4, 4), from_step=2, how=HOWS["accumulated"]),
    "scheduled, of two periods": Case((2, 3), how=HOWS["scheduled"]),
    "in fragments, clipped": Case((3, 3), (0, 2), how=HOWS["clipped"]),
    "in each step": Case((1, 1), how=HOWS["momentum"]),
    "eager": Case(settings={"capture": "never"}),
    "other settings": Case((3, 3), how=HOWS["momentum"], options={"outer_lr": 0.3, "outer_momentum": 0.5}),
}
NARROW = {
    "bfloat16": Case((2, 2), options={"wire": "bfloat16"}),
    "int8": Case((2, 2), how=HOWS["momentum"], options={"wire": "int8", "block": 16}),
    "int4": Case((3, 3), options={"wire": "int4", "block": 64}),
}
MEAN = Case(options={"outer_lr": 1.0, "outer_momentum": 0.0})
"""Whose outer step is the mean of the replicas."""


@traced_once()
def everything(rank: int, n: int) -> dict[str, Any]:
    """Of each case, how far it is from the definition; on four ranks, of one."""
    cases = CASES | {k: v for k, v in NARROW.items() if k != "bfloat16" or n <= 2}
    found: dict[str, Any] = {name: followed(rank, n, c) for name, c in cases.items() if n != 4 or name == "adamw"}
    if n == 2:
        found["losses"] = [*losses(rank, n, ""), *losses(rank, n, "diloco")]
        found["local SGD"] = local_sgd(rank, n)
        found["half"] = half(rank, n)
    return found


def local_sgd(rank: int, n: int) -> float:
    """How far DiLoCo whose outer step is the mean is from any strategy that averages."""
    one, other = net(), net()
    programs = program_of(rank, n, MEAN, one), program_of(rank, n, Case(strategy="all_reduce"), other)
    worst = 0.0
    for step in range(STEPS):
        for program in programs:
            take_step(program, MEAN, step, rank)
        worst = max(worst, distance(one, other))
    return worst


def half(rank: int, n: int) -> float:
    """How far a model in 16 bits is, over a synchronization, from what its replicas and its anchor say."""
    model, case = net().bfloat16(), Case((2, 2), how=HOWS["momentum"])
    program = program_of(rank, n, case, model)
    begun = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(2):
        take_step(program, case, step, rank)
    anchor = program.state_dict()["state"]["held_anchor"]
    momentum = program.state_dict()["state"]["outer_momentum"]
    off = 0.0
    for name, value in anchor.items():
        assert value.dtype == torch.float32
        off = max(
            off, float((begun[name].float() - case.lr * (1 + case.momentum) * momentum[name] - value).abs().max())
        )
        assert torch.equal(value.bfloat16(), dict(model.named_parameters())[name])
    return off


def losses(rank: int, n: int, strategy: str) -> list[float]:
    """The first and the last loss of a tiny training: exact, or under DiLoCo."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8)).double()
    teacher = nn.Linear(16, 8).double().requires_grad_(False)
    inputs = torch.randn(120, 12, 16, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    program = autopar.optimize(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        example_inputs=(inputs[0], teacher(inputs[0])),
        loss_fn=F.mse_loss,
        strategy="diloco+every=4" if strategy else "ddp",
        fidelity="local",
    )
    values = [float(program.step((x, teacher(x)))) for x in inputs]
    return [values[0], values[-1]]


SAVED = {
    "whole": Case((4, 4), (3, 1)),
    "narrow": Case((3, 3), how=HOWS["momentum"], options={"wire": "int8", "block": 16}),
}
AT = 4


@traced_once()
def saved(rank: int, n: int, folder: str) -> dict[str, Any]:
    """Some steps, and two checkpoints between synchronizations. Loaded from the folder, a run is the one that was not
    interrupted, to the last bit; from the dict, it goes on from the mean of the replicas, as the reference does."""
    found: dict[str, Any] = {}
    for name, case in SAVED.items():
        reference, model = Reference(case, n), net()
        program = program_of(rank, n, case, model)
        for step in range(AT):
            take_step(program, case, step, rank)
            reference.step(step)
        program.save(Path(folder) / name)
        state = program.state_dict()
        if rank == 0:
            torch.save(state, Path(folder) / f"{name}-{FILE}")
        from_disk, from_dict = net(), net()
        disk, other = program_of(rank, n, case, from_disk), program_of(rank, n, case, from_dict)
        disk.load(Path(folder) / name)
        other.load_state_dict(state)
        sums = sums_of(state)
        assert all(abs(value - sums_of(other.state_dict())[key]) < 1e-12 for key, value in sums.items())
        reference.average_everything()
        worst = 0.0
        for step in range(AT, AT + STEPS):
            for each in (program, disk, other):
                take_step(each, case, step, rank)
            reference.step(step)
            same = all(torch.equal(a, b) for a, b in zip(model.parameters(), from_disk.parameters(), strict=True))
            assert same, "not the run that was not interrupted"
            if name == "whole":
                worst = max(worst, distance(from_dict, reference.models[rank]))
        found[name] = {"off": worst, "sums": sums}
    found["begun"] = begun_behind(rank, n, folder)
    return found


def begun_behind(rank: int, n: int, folder: str) -> float:
    """Loaded from what another plan has saved, and saved again before the first step: ranks begin with what is loaded;
    in the middle of a period, too."""
    case, reference, model = Case(), Reference(Case(from_step=AT), n), net()
    program = program_of(rank, n, Case((1, 1), strategy="all_reduce"), model)
    for step in range(AT):
        take_step(program, case, step, rank)
        reference.step(step)
    for turn in range(2):
        program.save(f"{folder}/begun-{turn}")
        model = net()
        program = program_of(rank, n, case, model)
        program.load(f"{folder}/begun-{turn}")
    worst = 0.0
    for step in range(AT, AT + STEPS):
        take_step(program, case, step, rank)
        reference.step(step)
        worst = max(worst, distance(model, reference.models[rank]))
    return worst


@traced_once()
def loaded(rank: int, n: int, folder: str) -> dict[str, Any]:
    """On another number of ranks: the same anchors, momenta, and sums of residuals, from both checkpoints."""
    found: dict[str, Any] = {}
    for name, case in SAVED.items():
        for from_disk in (False, True):
            program = program_of(rank, n, case, net())
            path = Path(folder) / f"{name}-{FILE}"
            program.load(Path(folder) / name) if from_disk else program.load_state_dict(torch.load(path))
            found[f"{name}, {from_disk}"] = sums_of(program.state_dict())
            take_step(program, case, AT, rank)
    return found


def sums_of(state: dict[str, Any]) -> dict[str, float]:
    """Of what is kept, by its name and by parameter; residuals of both kinds together."""
    found: dict[str, float] = {}
    for key, by_name in state["state"].items():
        for name, value in by_name.items():
            of = "residual" if "residual" in key else key
            found[f"{of} of {name}"] = found.get(f"{of} of {name}", 0.0) + float(value.double().sum())
    return found
