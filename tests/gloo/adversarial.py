"""What the tests of drop-in modules that are frozen for a while run on each rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import autopar
from autopar.errors import PlanMismatchError

SIZES = (3, 1)
"""Of the ranks' batches."""


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
    return generator.double(), nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def data(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(7 * step + 1000 * rank)
    return tuple(torch.randn(SIZES[rank], k, generator=draw, dtype=torch.float64) for k in (4, 3))  # type: ignore[return-value]


def loss(output: torch.Tensor, target: float) -> torch.Tensor:
    return binary_cross_entropy_with_logits(output, torch.full_like(output, target))


def trained(generator: nn.Module, discriminator: nn.Module, batches: Any) -> None:
    """Three steps of both networks, in each of which the discriminator is frozen and thawed."""
    parts = [torch.optim.Adam(m.parameters(), 0.02) for m in (generator, discriminator)]
    for real, noise in batches:
        with torch.no_grad():
            fake = generator(noise)
        both = discriminator(torch.cat([real, fake]))
        (loss(both[: len(real)], 1.0) + loss(both[len(real) :], 0.0)).backward()
        parts[1].step()
        discriminator.requires_grad_(False)
        loss(discriminator(generator(noise)), 1.0).backward()
        parts[0].step()
        discriminator.requires_grad_(True)
        for part in parts:
            part.zero_grad()


def against_one_process(rank: int, n: int) -> tuple[float, int, str]:
    """How far parameters are from those of one process on the global batch, how often the discriminator was captured,
    and what is said of one that is frozen in part."""
    mine, theirs = networks(), networks()
    own = [data(k, rank) for k in range(3)]
    generator = autopar.optimize(mine[0], example_inputs=own[0][1], strategy="ddp", capture="always")
    discriminator = autopar.optimize(mine[1], example_inputs=torch.cat([own[0][0]] * 2), strategy="ddp")
    trained(generator, discriminator, own)
    whole = [[torch.cat(parts) for parts in zip(*(data(k, r) for r in range(n)), strict=True)] for k in range(3)]
    trained(*theirs, whole)
    pairs = zip(nn.ModuleList(mine).parameters(), nn.ModuleList(theirs).parameters(), strict=True)
    worst = max(float((a - b).detach().abs().max()) for a, b in pairs)
    mine[1].get_parameter("0.weight").requires_grad_(False)
    try:
        discriminator(own[0][0])
    except PlanMismatchError as e:
        return worst, len(list(discriminator.program._compiled)), str(e)
    return worst, 0, ""
