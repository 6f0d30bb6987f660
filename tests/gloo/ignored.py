"""A model that runs eagerly, whose loss ignores some targets: from the second step on, on some ranks all of them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import autopar


class Words(nn.Module):
    """Says the next word of each. Beside a loss, it takes a mask that some batches have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.last = nn.Embedding(9, 6), nn.Linear(6, 9)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None, keep: Any = None) -> torch.Tensor:
        scores: torch.Tensor = self.last(self.table(ids if keep is None else ids * keep).cumsum(1))
        if labels is None:
            return scores
        labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        return 0.5 * F.cross_entropy(scores.view(-1, 9), labels.view(-1))


def loss_of(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=0, label_smoothing=0.1)


def batches(step: int, n: int, named: bool) -> list[Any]:
    """Of every rank; the last one has nothing that counts in step 1, and no rank ignores anything in step 0."""
    draw, found = torch.Generator().manual_seed(step), []
    for r in range(n):
        shape = (1 + r, 3 + (r + step) % 2)
        ids, target = (torch.randint(1, 9, shape, generator=draw) for _ in range(2))
        if step:
            target[:, 2 + r % 2 :] = -100 if named else 0
            target[:] = (-100 if named else 0) if step == 1 and r == n - 1 else target
        mask = {"keep": torch.ones_like(ids)} if step == 2 and r == 0 else {}
        found.append({**mask, "ids": ids, "labels": target} if named else (ids, target))
    return found


def apart(rank: int, n: int, named: bool, each: int) -> float:
    """How far losses and parameters are from one process's, over three steps of so many micro-batches."""
    model = Words()
    other = copy.deepcopy(model)
    program = autopar.optimize(
        model,
        example_inputs=batches(0, n, named)[rank],
        loss_fn=None if named else loss_of,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        strategy="ddp",
        capture="never",
    )
    theirs, worst = torch.optim.SGD(other.parameters(), lr=0.1), 0.0
    for step in range(3):
        own = batches(step, n * each, named)
        mine = own[rank * each : (rank + 1) * each]
        loss = program.step(mine[0]) if each == 1 else program.step(micro_batches=mine)
        theirs.zero_grad()
        sums, count = [], 0
        for b in own:
            target = b["labels"][:, 1:] if named else b[1]
            counts = int((target != (-100 if named else 0)).sum())
            if counts:
                sums.append((other(**b) if named else loss_of(other(b[0]), b[1])) * counts)
            count += counts
        expected = torch.stack(sums).sum() / count
        expected.backward()
        theirs.step()
        worst = max(worst, abs(loss.item() - expected.item()))
        for a, c in zip(model.parameters(), other.parameters(), strict=True):
            worst = max(worst, (a - c).abs().max().item())
    return worst


def everything(rank: int, n: int) -> list[float]:
    torch.set_default_dtype(torch.float64)
    return [apart(rank, n, *case) for case in ((False, 1), (True, 1), (False, 2))]
