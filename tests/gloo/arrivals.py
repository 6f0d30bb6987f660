"""What the tests of a drop-in module whose outputs are not all used run on each rank, beside one process."""

from __future__ import annotations

import torch
from torch import nn

import autopar
from autopar.errors import CaptureError

USED = (("a", "b"), ("b", "b"), ("a", "ab"), ("w", "a"), ("x", "x"), ("b", "w"))
"""By step, the outputs that each rank's loss reads."""


class Heads(nn.Module):
    """Returns the scores of two heads, the weight of one of them, and part of its input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.trunk(x).tanh()
        return {"a": self.a(h), "b": self.b(h), "w": self.b.weight, "x": x[:, :2]}


def loss(outputs: dict[str, torch.Tensor], used: str) -> torch.Tensor:
    return torch.stack([outputs[name].square().mean() for name in used]).sum()


def batch(step: int, rank: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3 + (step + rank) % 3, 4, generator=draw, dtype=torch.float64).requires_grad_()


def apart(rank: int, n: int, accumulates: bool) -> float:
    """How far gradients and parameters are from those of one process, which has `None` where these have it."""
    mine, other = Heads(), Heads()
    module = autopar.optimize(mine, example_inputs=batch(0, rank), strategy="ddp", capture="always", check="always")
    optimizer, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.1) for m in (mine, other))
    worst = 0.0
    for step, used in enumerate(USED):
        optimizer.zero_grad()
        theirs.zero_grad()
        parts = {step: used}
        if accumulates:
            parts = {step + 1: USED[(step + 1) % len(USED)], step: used}
            with module.no_sync():
                loss(module(batch(step + 1, rank)), parts[step + 1][rank % 2]).backward()
        loss(module(batch(step, rank)), used[rank % 2]).backward()
        total = sum(len(batch(k, r)) for k in parts for r in range(n))
        for k, by_rank in parts.items():
            for r in range(n):
                one = loss(other(batch(k, r)), by_rank[r % 2])
                share = len(parts) * len(batch(k, r)) / total if n > 1 else 1.0  # one rank alone weights nothing
                (share * one).backward()
        for p, q in zip(mine.parameters(), other.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), (step, used)
            if p.grad is not None and q.grad is not None:
                worst = max(worst, float((p.grad - q.grad).abs().max()))
        optimizer.step()
        theirs.step()
        with torch.no_grad():
            worst = max(
                worst, *(float((p - q).abs().max()) for p, q in zip(mine.parameters(), other.parameters(), strict=True))
            )
    return worst


class Grows(Heads):
    """Has a second head's scores where it is asked for them."""

    def forward(self, x: torch.Tensor, both: bool = False) -> dict[str, torch.Tensor]:
        found = super().forward(x)
        total = found["a"].sum() + found["b"].sum()
        return {"total": total, "a": found["a"]} if both else {"total": total}


def unforeseen(rank: int) -> str:
    """What is said of outputs that come to some parameters alone, which the first batch did not have."""
    module = autopar.optimize(Grows(), example_inputs=batch(0, rank), strategy="ddp", capture="always")
    module(batch(0, rank), both=True)["total"].backward()
    try:
        module(batch(0, rank), both=True)["a"].sum().backward()
    except CaptureError as e:
        return str(e)
    return ""


def everything(rank: int, n: int) -> tuple[list[float], str]:
    return [apart(rank, n, accumulates) for accumulates in (False, True)], unforeseen(rank)
