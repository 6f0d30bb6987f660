"""Weight differences as they are written down, all ranks in one process; and what their tests run on each rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.runtime.program import Program
from autopar.spec.plan import ParameterSlice, SyncGroup
from tests.gloo.captures import traced_once
from tests.gloo.compressed import GROUPS, Numbers, Quantizing, StillNet, batches, net
from tests.gloo.plans import ddp_plan
from tests.gloo.training import adamw, batch, distance

STEPS = 7


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2, momentum=0.9, weight_decay=0.01)


@dataclass(frozen=True)
class Case:
    """A way to train."""

    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    bits: int = 8
    block: int = 16
    rotated: bool = False
    wire: str = "same"
    clip: float | None = None
    micro_batches: int = 1
    schedules: bool = False
    strided: bool = False
    """Whether a matrix lies in memory column by column."""
    timing: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "adamw": Case(),
    "sgd, 4 bits": Case(sgd, 4, micro_batches=2),
    "clipped, rotated, strided": Case(momentum, 4, rotated=True, clip=0.05, strided=True),
    "scheduled, later": Case(block=64, schedules=True, timing={"from_step": 3}),
    "late, eager": Case(momentum, 4, timing={"delay": 1}, settings={"capture": "never"}),
}
ROUNDED = Case(sgd, wire="bfloat16")


class Reference:
    """All ranks in one process: the model that they have, and the exact one."""

    def __init__(self, case: Case, n: int) -> None:
        self.case, self.n = case, n
        self.model, self.exact = model_of(case), model_of(case)
        self.optimizer = case.optimizer(self.exact)
        self.named, self.owned = dict(self.model.named_parameters()), dict(self.exact.named_parameters())
        self.held: list[dict[str, torch.Tensor]] = []

    def step(self, step: int) -> None:
        given = self._gradients(step)
        if "delay" in self.case.timing:
            self.held.append(given)
            if len(self.held) <= self.case.timing["delay"]:
                return
            given = self.held.pop(0)
        for name, gradient in given.items():
            self.owned[name].grad = gradient.clone(memory_format=torch.contiguous_format)
        if self.case.clip is not None:
            nn.utils.clip_grad_norm_(self.exact.parameters(), self.case.clip)
        self.optimizer.step()
        for index, names in enumerate(GROUPS):
            x, y = (np.concatenate([p[n].detach().numpy().ravel() for n in names]) for p in (self.owned, self.named))
            y = x if self.n == 1 or step < self.case.timing.get("from_step", 0) else y + self._received(index, x - y)
            sizes = [0, *np.cumsum([self.named[n].numel() for n in names])]
            for name, (a, b) in zip(names, pairwise(sizes), strict=True):
                self.named[name].data.copy_(torch.from_numpy(y[a:b].copy()).view(self.named[name].shape))

    def _received(self, index: int, difference: Numbers) -> Numbers:
        case = self.case
        coded = Quantizing(self.n, index, case.bits, case.block, rotated=case.rotated)
        return coded._received(difference, len(difference), 0, 0)[: len(difference)]

    def _gradients(self, step: int) -> dict[str, torch.Tensor]:
        """Of the global mean, at what all ranks have."""
        parts = [b for r in range(self.n) for b in batches(step, r, self.case.micro_batches)]
        trained = {n: p for n, p in self.named.items() if p.requires_grad}
        losses = [F.cross_entropy(self.model(ids), target, reduction="sum") for ids, target in parts]
        loss = torch.stack(losses).sum() / sum(len(ids) for ids, _ in parts)
        return dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))


def model_of(case: Case) -> StillNet:
    model = net()
    if case.strided:
        for layer in (model.hidden, model.embed):
            layer.weight.data = layer.weight.data.t().contiguous().t()
    return model


def program_of(rank: int, n: int, case: Case, model: nn.Module, **settings: Any) -> Program:
    example = batch(0, rank)
    plan = ddp_plan(model, n, example)
    groups = tuple(
        SyncGroup(
            strategy="weight_differences",
            options={"block": case.block, "bits": case.bits, "rotated": case.rotated, "wire": case.wire},
            members=tuple(ParameterSlice(name=name) for name in names),
            **case.timing,
        )
        for names in GROUPS
    )
    plan = plan.model_copy(update={"groups": groups, "fidelity": "local"})
    return autopar.optimize(
        model,
        plan=plan,
        optimizer=case.optimizer(model),
        example_inputs=example,
        loss_fn=F.cross_entropy,
        clip_grad_norm=case.clip,
        **{"check": "always", **case.settings, **settings},
    )


def take_step(program: Program, case: Case, step: int, rank: int) -> float:
    mine = batches(step, rank, case.micro_batches)
    return float(program.step(micro_batches=mine) if len(mine) > 1 else program.step(mine[0]))


def off(rank: int, n: int, case: Case) -> tuple[float, str]:
    """How far a program is from the reference, over some steps; and a hash of all its bits behind each."""
    reference, model, worst, bits = Reference(case, n), model_of(case), 0.0, hashlib.sha256()
    program = program_of(rank, n, case, model)
    optimizers = (program.optimizer, reference.optimizer) if case.schedules else ()
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers]
    for step in range(STEPS):
        take_step(program, case, step, rank)
        reference.step(step)
        for scheduler in schedulers:
            scheduler.step()
        worst = max(worst, distance(model, reference.model))
        for p in model.parameters():
            bits.update(p.detach().contiguous().numpy().tobytes())
    return worst, bits.hexdigest()


def saved(rank: int, n: int, folder: str) -> dict[str, float]:
    """How far a run that was saved and loaded is from the one that was not interrupted; the sums of what is kept."""
    case, models = CASES["sgd, 4 bits"], (net(), net())
    programs = [program_of(rank, n, case, m) for m in models]
    for step in range(4):
        take_step(programs[0], case, step, rank)
    programs[0].save(Path(folder) / "saved")
    programs[1].load(Path(folder) / "saved")
    state = programs[0].state_dict()
    for step in range(4, STEPS):
        for program in programs:
            take_step(program, case, step, rank)
    return {"off": distance(*models), **sums(state)}


def loaded(rank: int, n: int, folder: str) -> dict[str, float]:
    """The same sums on another number of ranks; and a step there."""
    case = CASES["sgd, 4 bits"]
    program = program_of(rank, n, case, net())
    program.load(Path(folder) / "saved")
    found = sums(program.state_dict())
    take_step(program, case, 4, rank)
    return found


def sums(state: dict[str, Any]) -> dict[str, float]:
    """Of what parameters lack, weighted so that no two places count alike."""
    of = state["state"]["lacking"]
    return {n: float((v.double().reshape(-1) * torch.arange(1, v.numel() + 1)).sum()) for n, v in of.items()}


def learned(rank: int, n: int) -> list[float]:
    """The losses of a tiny training, on the same batch again and again."""
    case, model = Case(sgd, 4), net()
    program = program_of(rank, n, case, model, check="first")
    return [take_step(program, case, 0, rank) for _ in range(40)]


def narrow(rank: int, n: int) -> dict[str, float]:
    """In bfloat16, with gradients in 16 bits: how far apart replicas are, and whether steps that are smaller than what
    a parameter can hold add up."""
    torch.manual_seed(5)
    model = StillNet().to(torch.bfloat16)
    before = model.hidden.weight.detach().clone()
    case = Case(lambda m: torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.05))
    program = program_of(rank, n, case, model, check="first")
    losses = [take_step(program, case, step % 2, rank) for step in range(20)]
    everyone = [torch.zeros_like(before) for _ in range(n)]
    torch.distributed.all_gather(everyone, model.hidden.weight.detach())
    apart = max(float((e - everyone[0]).abs().max()) for e in everyone)
    moved = float((model.hidden.weight.detach() - before).abs().max())
    return {"apart": apart, "moved": moved, "fell": losses[0] - losses[-2]}


@traced_once()
def everything(rank: int, n: int, folder: str) -> dict[str, Any]:
    """All of the above on this many ranks."""
    found: dict[str, Any] = {"off": {name: off(rank, n, case) for name, case in CASES.items()}}
    if n == 2:
        found |= {
            "saved": saved(rank, n, folder),
            "losses": learned(rank, n),
            "narrow": narrow(rank, n),
            "rounded": off(rank, n, ROUNDED),
        }
    if n == 3:
        found["loaded"] = loaded(rank, n, folder)
    return found
