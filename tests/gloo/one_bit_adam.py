"""1-bit Adam as it is written down, all ranks in one process with plain loops; and what its tests run on each rank."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import AutoparError, AutoparWarning
from autopar.runtime.program import Program
from autopar.spec.plan import ParameterSlice, SyncGroup
from tests.gloo.captures import traced_once
from tests.gloo.compressed import GROUPS, Numbers, StillNet, batches, net
from tests.gloo.plans import ddp_plan
from tests.gloo.training import adamw, batch, distance

STEPS, FIRST, BLOCK = 8, 3, 16


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Whose weight decay is a part of the gradient."""
    return torch.optim.Adam(_trained(model), lr=3e-3, betas=(0.8, 0.99), weight_decay=0.1)


def uphill(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(_trained(model), lr=1e-3, weight_decay=0.01, maximize=True)


def several(model: nn.Module) -> Any:
    """Two optimizers, of other coefficients."""
    matrices, rest = ([p for p in _trained(model) if (p.dim() > 1) is wide] for wide in (True, False))
    return [torch.optim.AdamW(matrices, lr=2e-3, betas=(0.85, 0.98)), torch.optim.Adam(rest, lr=1e-3)]


@dataclass(frozen=True)
class Case:
    """A way to train."""

    optimizer: Callable[[nn.Module], Any] = adamw
    exchange: str = "parts"
    clip: float | None = None
    micro_batches: int = 1
    schedules: bool = False
    eager: bool = False


CASES = {
    "adamw": Case(),
    "adam, clipped": Case(adam, "gather", clip=0.02),
    "accumulated": Case(adam, micro_batches=2),
    "scheduled": Case(uphill, "gather", schedules=True),
    "several, eager": Case(several, clip=0.05, eager=True),
}


class Reference:
    """All ranks in one process, with one model, as replicas are alike; in the paper's units."""

    def __init__(self, case: Case, n: int) -> None:
        self.case, self.n, self.model = case, n, net()
        made = case.optimizer(self.model)
        self.optimizers = made if isinstance(made, list) else [made]
        self.named = dict(self.model.named_parameters())
        self.frozen: dict[str, Numbers] = {}
        sizes = [sum(self.named[name].numel() for name in names) for names in GROUPS]
        self.residuals = [[np.zeros(size) for _ in range(n)] for size in sizes]
        self.of_sums = [np.zeros(size) for size in sizes]

    def step(self, step: int) -> None:
        each = [self._gradients(step, r) for r in range(self.n)]
        if step < FIRST:
            for name, p in self.named.items():
                if p.requires_grad:
                    p.grad = torch.from_numpy(sum(g[name] for g in each))
            if self.case.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.case.clip)
            for optimizer in self.optimizers:
                optimizer.step()
            return
        if not self.frozen:
            self.frozen = {n: self._state(n)["exp_avg_sq"].numpy().copy() for names in GROUPS for n in names}
            self.frozen = {n: v / (1 - self._of(n)["betas"][1] ** FIRST) for n, v in self.frozen.items()}
        momenta: dict[str, Numbers] = {}
        for index, names in enumerate(GROUPS):
            given = [np.concatenate([self._momentum(n, g[n]).reshape(-1) for n in names]) for g in each]
            empty = np.concatenate([self.frozen[n].reshape(-1) == 0 for n in names])
            mean, at = self._exchanged(index, given, empty), 0
            for name in names:
                p = self.named[name]
                momenta[name] = mean[at : at + p.numel()].reshape(p.shape)
                at += p.numel()
        if self.case.clip is not None:
            norm = math.sqrt(sum(float((m * m).sum()) for m in momenta.values()))
            momenta = {n: m * min(1.0, self.case.clip / (norm + 1e-6)) for n, m in momenta.items()}
        for name, m in momenta.items():
            self._update(name, m, step + 1)

    def _momentum(self, name: str, gradient: Numbers) -> Numbers:
        """Of one rank: beta1 m + (1 - beta1) g, from n times its part of the global mean's gradient."""
        of, own = self._of(name), self.n * gradient
        if of["maximize"]:
            own = -own
        if of["weight_decay"] and not _decoupled(of):
            own = own + of["weight_decay"] * self.named[name].detach().numpy()
        found: Numbers = of["betas"][0] * self._state(name)["exp_avg"].numpy() + (1 - of["betas"][0]) * own
        return found

    def _exchanged(self, index: int, given: list[Numbers], empty: Numbers) -> Numbers:
        """The mean over ranks, of which only signs and scales are sent."""
        if self.n == 1:
            return np.where(empty, 0.0, given[0])
        size = len(empty)
        blocks, unit, sent = _blocks(size), self._unit(index), []
        for rank, own in enumerate(given):
            full = own + self.residuals[index][rank]
            found = _signs(full / unit / self.n, blocks, empty) * unit * self.n
            self.residuals[index][rank] = full - found
            sent.append(found)
        mean: Numbers = np.mean(sent, 0)
        if self.case.exchange == "gather":
            return mean
        full = mean + self.of_sums[index]
        found = _signs(full / unit, blocks, empty) * unit
        self.of_sums[index] = np.where(empty, self.of_sums[index], full - found)
        return found

    def _unit(self, index: int) -> Numbers:
        """1 - beta1 of each element. In units of gradients, scales are means over parameters whose coefficients differ,
        and the same float32 numbers."""
        return np.concatenate([np.full(self.named[n].numel(), 1 - self._of(n)["betas"][0]) for n in GROUPS[index]])

    def _update(self, name: str, momentum: Numbers, t: int) -> None:
        of, state, p = self._of(name), self._state(name), self.named[name].detach()
        state["exp_avg"].copy_(torch.from_numpy(momentum))
        if _decoupled(of):
            p.mul_(1 - of["lr"] * of["weight_decay"])
        moved = of["lr"] * momentum / (1 - of["betas"][0] ** t) / (np.sqrt(self.frozen[name]) + of["eps"])
        p.sub_(torch.from_numpy(moved))

    def _of(self, name: str) -> dict[str, Any]:
        groups = [g | {"kind": o} for o in self.optimizers for g in o.param_groups]
        return next(g for g in groups if any(p is self.named[name] for p in g["params"]))

    def _state(self, name: str) -> dict[str, Any]:
        return next(o.state[self.named[name]] for o in self.optimizers if self.named[name] in o.state)

    def _gradients(self, step: int, rank: int) -> dict[str, Numbers]:
        """A rank's part of the gradient of the global mean."""
        k = self.case.micro_batches
        count = sum(len(ids) for r in range(self.n) for ids, _ in batches(step, r, k))
        trained = {n: p for n, p in self.named.items() if p.requires_grad}
        loss = torch.zeros((), dtype=torch.float64)
        for ids, target in batches(step, rank, k):
            loss = loss + F.cross_entropy(self.model(ids), target, reduction="sum") / count
        found = torch.autograd.grad(loss, list(trained.values()))
        return {n: g.numpy() for n, g in zip(trained, found, strict=True)}


def _decoupled(of: dict[str, Any]) -> bool:
    return isinstance(of["kind"], torch.optim.AdamW)


def _blocks(size: int) -> list[range]:
    return [range(a, min(a + BLOCK, size)) for a in range(0, size, BLOCK)]


def _signs(x: Numbers, blocks: list[range], empty: Numbers) -> Numbers:
    """Of each block, signs times the mean magnitude of the elements that count."""
    found = np.zeros(len(x))
    for block in blocks:
        there = [i for i in block if not empty[i]]
        scale = float(np.float32(sum(abs(x[i]) for i in there) / max(1, len(there))))
        for i in there:
            found[i] = scale if x[i] >= 0 else -scale
    return found


def program_of(rank: int, n: int, case: Case, model: StillNet, first: int = FIRST, **settings: Any) -> Program:
    example = batch(0, rank)
    plan = ddp_plan(model, n, example)
    groups = tuple(
        SyncGroup(
            strategy="one_bit_adam",
            options={"block": BLOCK, "exchange": case.exchange},
            members=tuple(ParameterSlice(name=name) for name in names),
            from_step=first,
        )
        for names in (GROUPS if model.out.weight is model.embed.weight else (*GROUPS, ("out.weight",)))
    )
    plan = plan.model_copy(update={"groups": groups, "fidelity": "compressed"})
    return autopar.optimize(
        model,
        plan=plan,
        optimizer=settings.pop("optimizer", None) or case.optimizer(model),
        example_inputs=example,
        loss_fn=F.cross_entropy,
        clip_grad_norm=case.clip,
        capture="never" if case.eager else "auto",
        **settings,
    )


def take_step(program: Program, case: Case, step: int, rank: int) -> float:
    mine = batches(step, rank, case.micro_batches)
    return float(program.step(micro_batches=mine) if len(mine) > 1 else program.step(mine[0]))


def off(rank: int, n: int, case: Case) -> tuple[float, str]:
    """How far a program is from the reference, over some steps; and a hash of all its bits behind each."""
    reference, model, worst, bits = Reference(case, n), net(), 0.0, hashlib.sha256()
    optimizers = case.optimizer(model)
    program = program_of(rank, n, case, model, check="always", optimizer=optimizers)
    each = [*(optimizers if isinstance(optimizers, list) else [optimizers]), *reference.optimizers]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in each] if case.schedules else []
    for step in range(STEPS):
        take_step(program, case, step, rank)
        reference.step(step)
        for scheduler in schedulers:
            scheduler.step()
        worst = max(worst, distance(model, reference.model))
        for p in model.parameters():
            bits.update(p.detach().numpy().tobytes())
    assert torch.equal(model.still.detach()[:1], model.still.detach()[1:2]), "zero gradients move nothing apart"
    return worst, bits.hexdigest()


def saved(rank: int, n: int, folder: str) -> dict[str, float]:
    """How far a run that was saved and loaded is from the one that was not interrupted; the sums of what is kept."""
    case, models = CASES["adamw"], (net(), net())
    programs = [program_of(rank, n, case, m) for m in models]
    for step in range(FIRST + 2):
        take_step(programs[0], case, step, rank)
    programs[0].save(Path(folder) / "saved")
    programs[1].load(Path(folder) / "saved")
    state = programs[0].state_dict()
    for step in range(FIRST + 2, STEPS):
        for program in programs:
            take_step(program, case, step, rank)
    return {"off": distance(*models), **_sums(state)}


def loaded(rank: int, n: int, folder: str) -> dict[str, float]:
    """The same sums on another number of ranks; and a step there."""
    case = CASES["adamw"]
    program = program_of(rank, n, case, net())
    program.load(Path(folder) / "saved")
    found = _sums(program.state_dict())
    take_step(program, case, FIRST + 2, rank)
    return found


def _sums(state: dict[str, Any]) -> dict[str, float]:
    return {
        f"{key} {name}": float((v.double().reshape(-1) * torch.arange(1, v.numel() + 1)).sum())
        for key, of in state["state"].items()
        for name, v in of.items()
    }


def learned(rank: int, n: int) -> dict[str, list[float]]:
    """The losses of a tiny training, exact and with frozen variance from step 10 on."""
    found = {}
    for name, first in (("exact", 1000), ("one_bit_adam", 10)):
        model = net()
        optimizer = torch.optim.Adam(_trained(model), lr=2e-2)
        program = program_of(rank, n, Case(), model, first, optimizer=optimizer)
        found[name] = [float(program.step(batch(step % 2, rank, 4))) for step in range(60)]
    return found


class Late(StillNet):
    """With a row that is first looked up behind the exact steps."""

    def __init__(self) -> None:
        super().__init__()
        self.out.weight = nn.Parameter(self.out.weight.detach().clone())


def refused(rank: int, n: int) -> dict[str, str]:
    """What is said where it cannot be used, or where elements stay as they are."""
    found = {}
    tries: dict[str, Callable[[], object]] = {
        "sgd": lambda: program_of(rank, n, Case(lambda m: torch.optim.SGD(_trained(m), lr=0.1)), net()),
        "amsgrad": lambda: program_of(rank, n, Case(lambda m: torch.optim.Adam(_trained(m), amsgrad=True)), net()),
        "at once": lambda: program_of(rank, n, Case(), net(), 0),
        "later amsgrad": lambda: _switched(rank, n),
        "cleared": lambda: _cleared(rank, n),
    }
    for name, attempt in tries.items():
        try:
            attempt()
        except AutoparError as e:
            found[name] = str(e)
    torch.manual_seed(5)
    model = Late().double()
    program = program_of(rank, n, Case(), model)
    ids = torch.tensor([1, 2])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(STEPS):
            program.step((ids if step < FIRST else ids + 1, ids))
    rows = model.embed.weight.detach()
    found["late"] = "; ".join(str(w.message) for w in said if w.category is AutoparWarning)
    torch.manual_seed(5)
    decay = (1 - 1e-3 * 0.01) ** STEPS
    found["row"] = str(float((rows[3] - decay * Late().double().embed.weight.detach()[3]).abs().max()))
    return found


def _switched(rank: int, n: int) -> None:
    model = net()
    optimizer = adam(model)
    program = program_of(rank, n, Case(), model, optimizer=optimizer)
    take_step(program, Case(), 0, rank)
    optimizer.param_groups[0]["amsgrad"] = True
    take_step(program, Case(), 1, rank)


def _cleared(rank: int, n: int) -> None:
    model = net()
    optimizer = adam(model)
    program = program_of(rank, n, Case(), model, optimizer=optimizer)
    for step in range(FIRST + 1):
        take_step(program, Case(), step, rank)
    optimizer.state.clear()
    take_step(program, Case(), FIRST + 1, rank)


@traced_once()
def everything(rank: int, n: int, folder: str) -> dict[str, Any]:
    """All of the above on this many ranks."""
    found: dict[str, Any] = {"off": {name: off(rank, n, case) for name, case in CASES.items()}}
    if n == 2:
        found |= {"saved": saved(rank, n, folder), "losses": learned(rank, n), "refused": refused(rank, n)}
    if n == 3:
        found["loaded"] = loaded(rank, n, folder)
    return found
