"""What the tests of losses run on each rank: one step of a small model on uneven batches, against one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import autopar

CLASSES = 5
Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Words(nn.Module):
    """Scores of the classes for every word; rows of a table are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(torch.tanh(self.table(words)))
        return scores


def model() -> Words:
    torch.manual_seed(5)
    return Words().double()


def batch(rank: int, size: int) -> Batch:
    g = torch.Generator().manual_seed(rank)
    return torch.randint(0, 11, (size, 3), generator=g), torch.randint(0, CLASSES, (size, 3), generator=g)


def entropy(s: torch.Tensor, t: torch.Tensor, **settings: Any) -> torch.Tensor:
    return F.cross_entropy(s.reshape(-1, CLASSES), t.reshape(-1), **settings)


def masked(s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return (entropy(s, t, reduction="none") * (t.reshape(-1) > 1)).sum() / (t > 1).sum()


def contrastive(s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    h = F.normalize(s.mean(1), dim=-1)
    return F.cross_entropy(10 * h @ h.T, torch.arange(len(h)))


def squares(s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(s[..., 0], t.double())


CASES: dict[str, tuple[Loss, tuple[int, int]]] = {
    "its mean": (lambda s, t: entropy(s, t).mean(), (2, 6)),
    "masked": (masked, (2, 6)),
    "sum": (lambda s, t: entropy(s, t, reduction="sum"), (2, 6)),
    "divided by what one rank's size is": (lambda s, t: entropy(s, t, reduction="sum") / 6, (2, 6)),
    "divided by the size": (lambda s, t: entropy(s, t, reduction="sum") / len(s), (1, 6)),
    "nothing counts on one rank": (masked, (2, 6)),
    "empty, cross-entropy": (entropy, (4, 0)),
    "empty, mse": (squares, (0, 3)),
    "contrastive": (contrastive, (2, 6)),
    "two counts": (lambda s, t: entropy(s, t) + entropy(s, t, ignore_index=3), (2, 6)),
}


def one_step(rank: int, name: str) -> tuple[float, float, list[str]]:
    """How far parameters and loss are from those of one process after a step; what was warned of."""
    loss, sizes = CASES[name]
    batches = [batch(r, size) for r, size in enumerate(sizes)]
    if name.startswith("nothing"):
        batches[0][1].zero_()
    mine, eager = model(), model()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", autopar.AutoparWarning)
        program = autopar.optimize(
            mine,
            example_inputs=batches[rank],
            loss_fn=loss,
            strategy="ddp",
            optimizer=torch.optim.SGD(mine.parameters(), lr=0.1),
        )
        found = float(program.step(batches[rank]))
    words, targets = (torch.cat([b[i] for b in batches]) for i in range(2))
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    expected = loss(eager(words), targets)
    expected.backward()
    optimizer.step()
    distance = max(
        float((a - b).detach().abs().max()) for a, b in zip(mine.parameters(), eager.parameters(), strict=True)
    )
    texts = [str(w.message) for w in said if issubclass(w.category, autopar.AutoparWarning)]
    return distance, abs(found - expected.item()), texts


def everything(rank: int, n: int) -> dict[str, tuple[float, float, list[str]]]:
    """All cases, on this rank."""
    return {name: one_step(rank, name) for name in CASES}
