"""What the tests of losses of several terms run on each rank: against one process, on uneven batches and counts."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import AutoparError

SIZES = (3, 1, 2)
Batch = dict[str, torch.Tensor]


class Tasks(nn.Module):
    """Tokens' classes, of which some do not count, and one number for each sample; returns both losses by name."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.classes = nn.Linear(6, 5)
        self.number = nn.Linear(6, 1)

    def forward(self, words: torch.Tensor, target: torch.Tensor, score: torch.Tensor) -> dict[str, Any]:
        h = torch.tanh(self.table(words))
        tokens = F.cross_entropy(self.classes(h).flatten(0, 1), target.flatten())
        samples = F.mse_loss(self.number(h.mean(1)).squeeze(-1), score)
        return {"loss": {"tokens": tokens, "samples": 0.3 * samples}, "hidden": h}


class Pairs(nn.Module):
    """The same losses as a tuple that comes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks = Tasks()

    def forward(self, words: torch.Tensor, target: torch.Tensor, score: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.tasks(words, target, score)["loss"].values())


def counts(batch: Batch) -> dict[str, float]:
    return {"tokens": float((batch["target"] != -100).sum()), "samples": float(len(batch["words"]))}


def in_order(batch: Batch) -> tuple[float, ...]:
    return tuple(counts(batch).values())


def batch(step: int, rank: int) -> Batch:
    draw = torch.Generator().manual_seed(10 * step + rank)
    size = SIZES[rank]
    target = torch.randint(0, 5, (size, 4), generator=draw)
    target[0, : 1 + (step + rank) % 3] = -100
    if rank == 1:  # none of its tokens counts
        target.fill_(-100)
    words = torch.randint(0, 11, (size, 4), generator=draw)
    return {"words": words, "target": target, "score": torch.randn(size, generator=draw).double()}


def joined(batches: list[Batch]) -> Batch:
    return {k: torch.cat([b[k] for b in batches]) for k in batches[0]}


def apart(a: nn.Module, b: nn.Module) -> float:
    return max(float((x - y).detach().abs().max()) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def model(kind: type[nn.Module] = Tasks) -> nn.Module:
    torch.manual_seed(2)
    return kind().double()


def several_means(rank: int, n: int, strategy: str, parts: int, kind: type[nn.Module] = Tasks) -> float:
    """The distance of parameters and losses from one process's; warnings are errors."""
    mine, eager = model(kind), model(kind)
    optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", autopar.AutoparWarning)
        program = autopar.optimize(
            mine,
            example_inputs=batch(0, 0),
            optimizer=torch.optim.AdamW(mine.parameters(), lr=1e-2),
            strategy=strategy,
            weight=counts if kind is Tasks else in_order,
        )
        worst = 0.0
        for step in range(3):
            own = [batch(10 * step + k, rank) for k in range(parts)]
            loss = program.step(micro_batches=own) if parts > 1 else program.step(own[0])
            optimizer.zero_grad()
            terms = eager(**joined([batch(10 * step + k, r) for r in range(n) for k in range(parts)]))
            expected = sum(terms["loss"].values() if isinstance(terms, dict) else terms)
            expected.backward()
            optimizer.step()
            worst = max(worst, abs(float(loss) - float(expected)))
    with program.gathered():
        return max(worst, apart(mine, eager))


def refused(rank: int) -> list[str]:
    said = []
    tries: list[Any] = [
        lambda b: {"tokens": 1.0, "sample": 1.0},
        lambda b: (1.0, 2.0, 3.0),
        lambda b: "many",
        lambda b: {"tokens": -1.0, "samples": 1.0},
        lambda b: 1.0,
    ]
    for weight in tries:
        mine = model()
        with contextlib.suppress(StopIteration):
            try:
                optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
                autopar.optimize(
                    mine, example_inputs=batch(0, rank), optimizer=optimizer, strategy="ddp", weight=weight
                )
                said.append("")
            except AutoparError as e:
                said.append(str(e))
    return said


def everything(rank: int, n: int) -> dict[str, Any]:
    cases: dict[int, tuple[Any, ...]] = {
        1: (("zero1", 2),),
        2: (("ddp", 1), ("zero1", 2), ("ddp", 1, Pairs)),
        3: (("zero1", 1), ("sharded", 1)),
    }
    return {
        "terms": {str(case): several_means(rank, n, *case) for case in cases[n]},
        "refused": refused(rank) if n == 2 else [],
    }
