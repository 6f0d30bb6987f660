"""Local Adam as it is written down, all ranks in one process; and what its tests run on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import autopar
from tests.gloo.captures import traced_once
from tests.gloo.compressed import HOWS, How, net
from tests.gloo.diloco import Case, distance, program_of, take_step
from tests.gloo.diloco import Reference as Apart

STEPS = 9
SKETCH = 3
"""Numbers of a sketch in the tests, whose parameters are small."""


class Reference(Apart):
    """Adam with a second moment of its own: v = b v + (1 - b) f g^2."""

    def __init__(self, case: Case, n: int) -> None:
        super().__init__(case, n)
        self.common: dict[str, float] = {}
        self.unclipped: list[dict[str, torch.Tensor]] = [{} for _ in range(n)]

    def _update(self, rank: int, gradients: dict[str, torch.Tensor], apart: bool) -> None:
        named, limit, optimizer = self.named[rank], self.case.how.clip, self.optimizers[rank]
        norm = float(torch.stack([g.norm() for g in gradients.values()]).norm())
        factor = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
        self.unclipped[rank] = gradients
        coupled = not isinstance(optimizer, torch.optim.AdamW)
        with torch.no_grad():
            for group in optimizer.param_groups:
                b1, b2 = group["betas"]
                for p in group["params"]:
                    name = next(n for n, q in named.items() if q is p)
                    if apart and rank == 0:
                        self.anchors.setdefault(name, p.detach().clone())
                    state = optimizer.state[p]
                    g = factor * gradients[name]
                    if coupled:
                        g = g + group["weight_decay"] * p
                    else:
                        p.mul_(1 - group["lr"] * group["weight_decay"])
                    if not state:
                        state |= {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                    state["step"] += 1
                    f = self.common.get(name, 1.0) if apart and self.n > 1 else 1.0
                    state["exp_avg"] = b1 * state["exp_avg"] + (1 - b1) * g
                    state["exp_avg_sq"] = b2 * state["exp_avg_sq"] + (1 - b2) * f * g * g
                    mean, square = (
                        state[key] / (1 - b ** state["step"]) for key, b in (("exp_avg", b1), ("exp_avg_sq", b2))
                    )
                    p.sub_(group["lr"] * mean / (square.sqrt() + group["eps"]))

    def _synchronize(self, index: int, names: Sequence[str]) -> None:
        if self.n == 1:
            return
        draws = torch.Generator().manual_seed(index)
        one, other = (2.0 * torch.randint(0, 2, (n,), generator=draws, dtype=torch.int8) - 1 for n in (65_537, 65_539))
        moved = self._outer_gradients(index, names)
        for name in names:
            values = [named[name].data for named in self.named]
            self.anchors[name] = mean = self.anchors[name] - moved[name]
            for value in values:
                value.copy_(mean)
            signs = (one[: mean.numel()] * other[: mean.numel()]).double()
            own = [signs * g[name].reshape(-1) for g in self.unclipped]
            sketches = torch.stack([torch.stack([g[i::SKETCH].sum() for i in range(SKETCH)]) for g in own])
            squares = float(sketches.square().sum(1).mean())
            if squares > 0:
                part = float(sketches.mean(0).square().sum()) / squares
                self.common[name] = min(1.0, max(0.25 / self.n, part))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Whose decay is a part of its gradients."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.Adam(parameters, lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1)


APART = Case((3, 3), strategy="local_adam")
CASES = {
    "adamw": APART,
    "adam, clipped, of a decay": replace(APART, every=(2, 2), how=How(adam, clip=0.05), size=3),
    "of two periods, accumulated": replace(APART, every=(2, 3), how=HOWS["accumulated"]),
    "later, in fragments": replace(APART, offset=(0, 2), from_step=2, how=How(adam)),
    "int8": replace(APART, every=(2, 2), how=How(adam), options={"wire": "int8", "block": 16}),
    "int4, later": replace(APART, from_step=1, options={"wire": "int4", "block": 64}),
    "scheduled, eager": replace(APART, every=(1, 1), how=How(adam, schedules=True), settings={"capture": "never"}),
}


@traced_once()
def everything(rank: int, n: int, folder: str) -> dict[str, Any]:
    """Of each case, how far it is from the definition; on two ranks, more."""
    from autopar.ops import mean_variance

    found: dict[str, Any] = {"off": {}}
    before = mean_variance.SKETCH, mean_variance.SKETCHED
    mean_variance.SKETCH, mean_variance.SKETCHED = SKETCH, 1 + SKETCH
    try:
        for name, case in CASES.items():
            found["off"][name] = followed(rank, n, case)
        if n == 2:
            found["goes on"] = max(goes_on(rank, n, folder, case) for case in ("later, in fragments", "int4, later"))
    finally:
        mean_variance.SKETCH, mean_variance.SKETCHED = before
    if n == 2:
        found["losses"] = [*losses(rank, n, "ddp"), *losses(rank, n, "local_adam+every=4")]
        found["unused"] = unused(rank, n)
        found["begun anew"] = begun_anew(rank, n)
    return found


def followed(rank: int, n: int, case: Case) -> float:
    """How far a program is from the reference over some steps."""
    reference, model = Reference(case, n), net()
    program = program_of(rank, n, case, model)
    worst = 0.0
    for step in range(STEPS):
        take_step(program, case, step, rank)
        reference.step(step)
        for optimizer in (program.optimizer, *reference.optimizers) if case.how.schedules else ():
            for group in optimizer.param_groups:
                group["lr"] *= 0.7
        worst = max(worst, distance(model, reference.models[rank]))
    return worst


def goes_on(rank: int, n: int, folder: str, name: str) -> float:
    """How far a run that is saved and loaded between averages is from the one that is not: not at all."""
    case, models = CASES[name], (net(), net())
    programs = [program_of(rank, n, case, m) for m in models]
    for step in range(7):
        take_step(programs[0], case, step, rank)
    programs[0].save(Path(folder) / name)
    programs[1].load(Path(folder) / name)
    for step in range(7, STEPS + 3):
        for program in programs:
            take_step(program, case, step, rank)
    return distance(*models)


def losses(rank: int, n: int, strategy: str) -> list[float]:
    """The first and the last loss of a tiny training."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8)).double()
    teacher = nn.Linear(16, 8).double().requires_grad_(False)
    inputs = torch.randn(120, 12, 16, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    program = autopar.optimize(
        model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        example_inputs=(inputs[0], teacher(inputs[0])),
        loss_fn=F.mse_loss,
        strategy=strategy,
        fidelity="local",
    )
    values = [float(program.step((x, teacher(x)))) for x in inputs]
    return [values[0], values[-1]]


class Sometimes(nn.Module):
    """Of two layers, it uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        y: torch.Tensor = self.one(x)
        return self.other(y) if both else y


def unused(rank: int, n: int) -> float:
    """How much the second moment of a layer changes in a step that does not use it, under a decay that is a part of
    Adam's gradients: not at all."""
    torch.manual_seed(4)
    model = Sometimes().double()
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    program = autopar.optimize(
        model,
        optimizer=adam(model),
        example_inputs=((x, True), x),
        loss_fn=F.mse_loss,
        strategy="local_adam+every=2",
        fidelity="local",
        capture="never",
    )
    for _ in range(3):
        program.step(((x, True), x))
    state = program.optimizer.state[model.other.weight]
    before = state["exp_avg_sq"].clone()
    program.step(((x, False), x))
    return float((state["exp_avg_sq"] - before).abs().max() / before.max())


def begun_anew(rank: int, n: int) -> float:
    """How far second moments that begin anew, as the user has cleared the optimizer's state, are from the common part
    of the first squares."""
    model = net()
    program = program_of(rank, n, APART, model)
    for step in range(4):
        take_step(program, APART, step, rank)
    program.optimizer.state.clear()
    take_step(program, APART, 4, rank)
    worst, named = 0.0, dict(model.named_parameters())
    for members, parts in program.state_dict()["state"]["common_part"].items():
        for name, part in zip(members.strip("[]").split(", "), parts.tolist(), strict=True):
            state = program.optimizer.state[named[name]]
            square = (state["exp_avg"] / 0.1) ** 2
            worst = max(worst, float((state["exp_avg_sq"] - 0.001 * (part or 1.0) * square).abs().max()))
    return worst
