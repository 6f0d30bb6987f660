"""Captured drop-in modules that ranks call unequally often, and one that is frozen and normalizes over all ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import autopar
from autopar.errors import PlanMismatchError


def _halves(x: torch.Tensor, rank: int, cut: int) -> torch.Tensor:
    return x[:cut] if rank == 0 else x[cut:]


def everything(rank: int, n: int) -> dict[str, Any]:
    return {"unequal": _unequal(rank), "frozen": _frozen(rank), "without a shift": _without_shift(rank)}


def _unequal(rank: int) -> dict[str, Any]:
    """What is said where rank 0 calls a module once more, and what is trained where it runs eagerly."""
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randn(8, 4, generator=draw, dtype=torch.float64) for _ in range(7)]
    found: dict[str, Any] = {}
    for capture in ("auto", "never"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
        module: Any = autopar.optimize(
            model, example_inputs=_halves(batches[0], rank, 4), capture=capture, timeout_s=60
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            for i, x in enumerate(batches):
                h = _halves(x, rank, 4)
                for _ in range(2 + (i == 4 and rank == 0) + (i == 5 and rank == 1)):
                    h = module(h)
                h.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            found[capture] = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()
        except PlanMismatchError as e:
            found[capture] = str(e)
    return found


def _frozen(rank: int) -> float:
    """How far a generator's gradient through a frozen critic is from that of one process, on uneven ranks."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(3, 4).double(), nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh()).double()
    alone, whole = copy.deepcopy(generator), copy.deepcopy(critic)
    x = torch.randn(8, 3, dtype=torch.float64)
    mine = _halves(x, rank, 3)
    first: Any = autopar.optimize(generator, example_inputs=mine)
    second: Any = autopar.optimize(critic, example_inputs=generator(mine).detach(), sync_batch_norm=True)
    second(first(mine).detach()).square().mean().backward()
    whole(alone(x).detach()).square().mean().backward()
    critic.requires_grad_(False)
    whole.requires_grad_(False)
    second(first(mine)).square().mean().backward()
    whole(alone(x)).square().mean().backward()
    assert generator.weight.grad is not None and alone.weight.grad is not None
    return float((generator.weight.grad - alone.weight.grad).abs().max())


def _without_shift(rank: int) -> float:
    """How far a normalization over all ranks that has a scale alone is from that of one process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    model[1].register_parameter("bias", None)
    alone = copy.deepcopy(model)
    x = torch.randn(8, 3, dtype=torch.float64)
    module: Any = autopar.optimize(model, example_inputs=_halves(x, rank, 3), sync_batch_norm=True)
    found = module(_halves(x, rank, 3))
    return float((found - _halves(alone(x), rank, 3)).abs().max())
