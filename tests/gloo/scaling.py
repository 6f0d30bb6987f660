"""What the tests of loss scaling run on each rank: steps under float16 autocast, against DDP with a `GradScaler`."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.errors import AutoparError
from autopar.runtime.program import Program

SETTINGS: dict[str, Any] = {"init_scale": 2.0**22, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2}
STEPS, BROKEN = 9, 4
"""Steps, and the one in which the last rank's batch makes its gradients infinite."""


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(step: int, rank: int, broken: bool = False, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(10 * step + rank)
    x, y = torch.randn(size, 6, generator=draw), torch.randint(0, 4, (size,), generator=draw)
    return (x * 1e6 if broken else x), y


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def program_for(model: nn.Module, strategy: str, **settings: Any) -> Program:
    with torch.autocast("cpu", torch.float16, enabled=settings.pop("half", True)):
        found: Program = autopar.optimize(
            model,
            example_inputs=batch(0, 0),
            loss_fn=F.cross_entropy,
            optimizer=optimizer_of(model),
            strategy=strategy,
            **{"loss_scale": GradScaler("cpu", **SETTINGS), **settings},
        )
    return found


def apart(a: nn.Module, b: nn.Module) -> float:
    return max(float((x - y).detach().abs().max()) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def values(program: Program) -> list[torch.Tensor]:
    with program.gathered():
        return [p.detach().clone() for p in program.model.parameters()]


def beside_ddp(rank: int, n: int, strategy: str, clip: float | None, parts: int) -> dict[str, Any]:
    """Parameters' distance from DDP's after all steps, and the scales of both behind each; the steps that were skipped,
    and the largest difference of the norms of those that were not."""
    model, theirs = net(), net()
    ddp = DistributedDataParallel(theirs) if n > 1 else theirs
    optimizer, scaler = optimizer_of(theirs), GradScaler("cpu", **SETTINGS)
    program = program_for(model, strategy, clip_grad_norm=clip)
    scales, skipped, norms = [], [], []
    for step in range(STEPS):
        broken = step == BROKEN and rank == n - 1
        own = [batch(100 * k + step, rank, broken) for k in range(parts)]
        before = values(program)
        with torch.autocast("cpu", torch.float16):
            given: dict[str, Any] = {"micro_batches": own} if parts > 1 else {"batch": own[0]}
            norm = program.step(**given, grad_norm=True).grad_norm
            optimizer.zero_grad()
            for x, y in own:
                scaler.scale(F.cross_entropy(ddp(x), y) / parts).backward()
        scaler.unscale_(optimizer)
        theirs_norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip or float("inf"))
        scaler.step(optimizer)
        scaler.update()
        assert program.loss_scaler is not None and norm is not None
        scales.append([program.loss_scaler.get_scale(), scaler.get_scale()])
        if all(torch.equal(a, b) for a, b in zip(before, values(program), strict=True)):
            skipped.append(step)
        else:
            norms.append(abs(norm.item() - theirs_norm.item()) / theirs_norm.item())
    with program.gathered():
        distance = apart(model, theirs)
    return {"apart": distance, "scales": scales, "skipped": skipped, "norms": max(norms)}


def uneven_in_float64(rank: int, n: int, strategy: str) -> float:
    """The distance from one process without a scale, of ranks with batches of different sizes."""
    model, eager = net().double(), net().double()
    sizes, optimizer = (4, 1, 3)[:n], optimizer_of(eager)
    program = autopar.optimize(
        model,
        example_inputs=(torch.zeros(4, 6).double(), torch.zeros(4).long()),
        loss_fn=F.cross_entropy,
        optimizer=optimizer_of(model),
        strategy=strategy,
        loss_scale="dynamic",
    )
    for step in range(3):
        every = [batch(step, r, size=s) for r, s in enumerate(sizes)]
        program.step((every[rank][0].double(), every[rank][1]))
        optimizer.zero_grad()
        F.cross_entropy(eager(torch.cat([x for x, _ in every]).double()), torch.cat([y for _, y in every])).backward()
        optimizer.step()
    return apart(model, eager)


def checkpoints(rank: int, folder: str) -> list[Any]:
    """A scale that has changed, as two ways to save it bring it back, and as plain PyTorch reads it; the distance of
    what goes on from either from what was not interrupted."""
    model = net()
    program = program_for(model, "zero1")
    with torch.autocast("cpu", torch.float16):
        for step in range(3):
            program.step(batch(step, rank))
    state = copy.deepcopy(program.state_dict())
    program.save(folder)
    plain = GradScaler("cpu")
    plain.load_state_dict(state["loss_scale"])
    found: list[Any] = [plain.get_scale() - program.loss_scaler.get_scale()]  # type: ignore[union-attr]
    others = [program_for(net(), "ddp", loss_scale="dynamic") for _ in range(2)]
    others[0].load_state_dict(state)
    others[1].load(folder)
    with torch.autocast("cpu", torch.float16):
        for one in (program, *others):
            for step in range(3, 7):
                one.step(batch(step, rank))
    for one in others:
        found += [apart(one.model, model), one.loss_scaler.state_dict() == program.loss_scaler.state_dict()]  # type: ignore[union-attr]
    return found


def drop_in(rank: int) -> float:
    """The drop-in module with the user's own scaler: its distance from DDP's."""
    models = [net(), net()]
    with torch.autocast("cpu", torch.float16):
        both = [autopar.optimize(models[0], example_inputs=batch(0, 0)[0]), DistributedDataParallel(models[1])]
    for model, module in zip(models, both, strict=True):
        optimizer, scaler = optimizer_of(model), GradScaler("cpu", **SETTINGS)
        for step in range(STEPS):
            x, y = batch(step, rank)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(module(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return apart(*models)


def refused() -> list[str]:
    said = []
    tries: list[tuple[nn.Module, dict[str, Any]]] = [
        (net(), {"loss_scale": 2.0}),
        (net().half(), {"half": False}),
        (net(), {"strategy": "ddp+every=2", "fidelity": "local"}),
    ]
    for model, settings in tries:
        try:
            program_for(model, settings.pop("strategy", "ddp"), **settings)
            said.append("")
        except AutoparError as e:
            said.append(str(e))
    return said


CASES: dict[int, tuple[tuple[str, float | None, int], ...]] = {
    1: (("ddp", None, 1), ("ddp", 0.5, 2)),
    2: (("ddp", None, 1), ("zero1", 0.5, 1), ("sharded", None, 1), ("zero1", None, 2)),
}


def everything(rank: int, n: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {str(case): beside_ddp(rank, n, *case) for case in CASES.get(n, ())}
    result: dict[str, Any] = {"beside": found, "uneven": uneven_in_float64(rank, n, "zero1" if n > 2 else "ddp")}
    if n == 2:
        result |= {"checkpoints": checkpoints(rank, folder), "drop-in": drop_in(rank), "refused": refused()}
    return result
