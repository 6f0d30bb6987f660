"""Models that go through a set of names, whose order is another in each process, on each rank, beside one process."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import autopar

NAMES = "abcd"


class Parts(nn.Module):
    """Layers of different widths read one tensor, in an order that is this process's own."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.first = nn.Linear(8, 8)
        self.parts = nn.ModuleDict({name: nn.Linear(8, 8 + i) for i, name in enumerate(NAMES)})
        self.last = nn.Linear(38, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        made = {name: self.parts[name](x).tanh() for name in self.order}
        found: torch.Tensor = self.last(torch.cat([made[name] for name in NAMES], -1))
        return found


class Powers(nn.Module):
    """What has no parameters is computed in an order that is this process's own, as rotary embeddings are by some."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in NAMES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = {name: (x * (2 + NAMES.index(name))).cos() for name in self.order}
        for name, layer in zip(NAMES, self.layers, strict=True):
            x = x + layer(x).tanh() * angles[name]
        return x[:, :3]


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 8, generator=draw), torch.randn(4, 3, generator=draw)


def trained(kind: type[nn.Module], rank: int, n: int, strategy: str | None) -> dict[str, Any]:
    """How far parameters are from one process's after three steps of a program, or of a drop-in for no strategy; and
    what was said of the order."""
    torch.manual_seed(0)
    model = kind(NAMES if rank == 0 else NAMES[::-1])
    torch.manual_seed(0)
    other = kind(NAMES)
    optimizer, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, other))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if strategy is None:
            run: Any = autopar.optimize(model, example_inputs=batch(rank, 0)[0], time_budget_s=0.2)
        else:
            run = autopar.optimize(
                model, example_inputs=batch(rank, 0), loss_fn=F.mse_loss, optimizer=optimizer, strategy=strategy
            )
    for step in range(3):
        if isinstance(run, autopar.Program):
            run.step(batch(rank, step))
        else:
            optimizer.zero_grad()
            x, target = batch(rank, step)
            F.mse_loss(run(x), target).backward()
            optimizer.step()
        theirs.zero_grad()
        for r in range(n):
            x, target = batch(r, step)
            (F.mse_loss(other(x), target) / n).backward()
        theirs.step()
    off = max(float((a - b).detach().abs().max()) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    return {"off": off, "said": [str(w.message) for w in caught if "in different orders" in str(w.message)]}


def everything(rank: int, n: int) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    found = {k.__name__: {s or "module": trained(k, rank, n, s) for s in (None, "zero1")} for k in (Parts, Powers)}
    return found
