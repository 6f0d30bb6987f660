"""What the tests of `autopar.gather` run on each rank: contrastive losses of the global batch, against one process."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import AutoparError

SIZES = (3, 1, 2)


class Pair(nn.Module):
    """Two encoders; each of a rank's pairs is told from those of all ranks."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 6), nn.Linear(5, 6)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.whole = whole

    def forward(self, a: torch.Tensor, b: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        a, b = F.normalize(torch.tanh(self.left(a)), dim=-1), F.normalize(self.right(b), dim=-1)
        if self.whole:  # the loss of the global batch, on each rank
            a = autopar.gather(a)
            index = autopar.gather(index)
        place = (autopar.gather(index) if not self.whole else index).argsort()
        others = autopar.gather(b)[place]
        return F.cross_entropy(self.scale * a @ others.T, index)


class Counts(Pair):
    """Counts by itself where its pairs stand among those of all ranks, which have equally many."""

    def forward(self, a: torch.Tensor, b: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        first = len(a) * dist.get_rank() if dist.is_initialized() else 0
        return super().forward(a, b, first + torch.arange(len(a)))


class Plain(Pair):
    """The same on a global batch in one process."""

    def forward(self, a: torch.Tensor, b: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        a, b = F.normalize(torch.tanh(self.left(a)), dim=-1), F.normalize(self.right(b), dim=-1)
        return F.cross_entropy(self.scale * a @ b.T, index)


def model(kind: type[Pair], whole: bool) -> Pair:
    torch.manual_seed(6)
    return kind(whole).double()


def batch(step: int, rank: int, n: int, of_ranks: tuple[int, ...] = SIZES) -> dict[str, torch.Tensor]:
    sizes = [s + (step == 2) for s in of_ranks[:n]]
    draw = torch.Generator().manual_seed(10 * step + rank)
    first = sum(sizes[:rank])
    return {
        "a": torch.randn(sizes[rank], 4, generator=draw).double(),
        "b": torch.randn(sizes[rank], 5, generator=draw).double(),
        "index": torch.arange(first, first + sizes[rank]),
    }


def train(
    rank: int, n: int, strategy: str, whole: bool, sizes: tuple[int, ...] = SIZES, kind: type[Pair] = Pair
) -> float:
    """How far losses and parameters are from one process's, over steps of two sizes; warnings are errors."""
    mine, eager = model(kind, whole), model(Plain, whole)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (mine, eager)]
    worst = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error", autopar.AutoparWarning)
        program = autopar.optimize(
            mine, example_inputs=batch(0, rank, n, sizes), optimizer=optimizers[0], strategy=strategy
        )
        for step in range(4):
            loss = program.step(batch(step, rank, n, sizes))
            optimizers[1].zero_grad()
            every = [batch(step, r, n, sizes) for r in range(n)]
            expected = eager(**{k: torch.cat([b[k] for b in every]) for k in every[0]})
            expected.backward()
            optimizers[1].step()
            worst = max(worst, abs(loss.item() - expected.item()))
    with program.gathered():
        pairs = list(zip(mine.parameters(), eager.parameters(), strict=True))
        return max(worst, *(float((x - y).detach().abs().max()) for x, y in pairs))


def train_module(rank: int, n: int, whole: bool) -> float:
    """How far a drop-in module's gradients and parameters are from one process's; warnings are errors."""
    mine, eager = model(Pair, whole), model(Plain, whole)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (mine, eager)]
    worst = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error", autopar.AutoparWarning)
        synced = autopar.optimize(mine, example_inputs=batch(0, rank, n), strategy="ddp")
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            synced(**batch(step, rank, n)).backward()
            every = [batch(step, r, n) for r in range(n)]
            eager(**{k: torch.cat([b[k] for b in every]) for k in every[0]}).backward()
            pairs = list(zip(mine.parameters(), eager.parameters(), strict=True))
            worst = max(worst, *(float((x.grad - y.grad).abs().max()) for x, y in pairs))  # type: ignore[operator]
            for optimizer in optimizers:
                optimizer.step()
            worst = max(worst, *(float((x - y).detach().abs().max()) for x, y in pairs))
    return worst


def frozen(rank: int, n: int, whole: bool) -> float:
    """How far the loss of a drop-in module, and the gradient of its input, are while all is frozen from what they are
    while it trains: the first step's sizes differ between ranks."""
    mine = model(Pair, whole)
    synced = autopar.optimize(mine, example_inputs=batch(0, rank, n), strategy="ddp")
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for trains in (True, False):
        mine.requires_grad_(trains)
        given = batch(0, rank, n)
        loss = synced(**{**given, "b": given["b"].requires_grad_()})
        loss.backward()
        assert given["b"].grad is not None
        found.append((loss.detach(), given["b"].grad))
    with torch.no_grad():
        synced(**batch(0, rank, n) | {"index": torch.arange(SIZES[rank])})  # each rank's own
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


def refused(rank: int, n: int) -> list[str]:
    said: list[str] = []
    mine = model(Pair, True)
    program = autopar.optimize(
        mine, example_inputs=batch(0, rank, n), optimizer=torch.optim.SGD(mine.parameters(), lr=0.1), strategy="ddp"
    )
    data = batch(0, rank, n)
    with program.evaluation():
        mine(data["a"], data["b"], torch.arange(len(data["a"])))  # each rank's own
    for run in (lambda: program.step(micro_batches=[data, data]), lambda: mine(**data)):
        try:
            run()
            said.append("")
        except AutoparError as e:
            said.append(str(e))
    return said


def everything(rank: int, n: int) -> dict[str, Any]:
    cases: dict[int, tuple[tuple[str, bool], ...]] = {
        1: (("ddp", True),),
        2: (("ddp", False), ("zero1", True)),
        3: (("sharded", False), ("zero1", True)),
    }
    trained = {str(case): train(rank, n, *case) for case in cases[n]}
    for kind in (Pair, Counts):  # ranks with batches of one size compare what they compute
        trained[f"of one size, {kind.__name__}"] = train(rank, n, "ddp", kind is Pair, (2, 2, 2), kind)
    modules = [train_module(rank, n, whole) for whole in (False, True)] if n > 1 else []
    if n > 1:
        modules += [frozen(rank, n, whole) for whole in (False, True)]
    return {"trained": trained, "modules": modules, "refused": refused(rank, n) if n == 2 else []}
