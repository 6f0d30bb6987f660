"""Captured programs that meet batches which cannot be captured, on some ranks, beside one process."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
from torch import nn

import autopar
from autopar.errors import AutoparError

Batch = tuple[torch.Tensor, torch.Tensor]
SIZES = ((4, 4), (4, 2), (3, 4), (4, 3), (3, 3), (5, 4), (4, 4))
"""Of each step, the ranks' samples; batches of three cannot be captured."""
ODD = 3


class Branches(nn.Module):
    """Takes a branch by the values in its batch where that has three samples, and writes a buffer that it reads."""

    mean: torch.Tensor

    def __init__(self, rows: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(30, 4)
        self.first, self.middle, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.register_buffer("mean", torch.zeros(8))
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x + self.table((x[:, 0].abs() * 5).long().clamp(max=29))).tanh()
        if len(x) == ODD:
            h = h * 2 if x.sum().item() > 0 else h * 3
        found: torch.Tensor = self.last(self.middle(h) * self.factor + self.mean)
        self.mean = 0.9 * self.mean + 0.1
        return found


class Unwritten(nn.Module):
    """The same without the buffer."""

    def __init__(self, model: Branches) -> None:
        super().__init__()
        self.table, self.first, self.middle, self.last = model.table, model.first, model.middle, model.last

    def forward(self, x: torch.Tensor) -> Any:
        h = self.first(x + self.table((x[:, 0].abs() * 5).long().clamp(max=29))).tanh()
        if len(x) == ODD:
            h = h * 2 if x.sum().item() > 0 else h * 3
        return self.last(self.middle(h))


def batches(step: int, sizes: tuple[int, ...], each: int = 1) -> list[list[Batch]]:
    """Of every rank, the micro-batches of one step."""
    draw = torch.Generator().manual_seed(step)

    def one(size: int) -> Batch:
        return torch.randn(size, 4, generator=draw), torch.randn(size, 2, generator=draw)

    return [[one(size if k == 0 else 4) for k in range(each)] for size in sizes]


def one_process(model: Branches, of_all: list[list[Batch]], sums: bool = False) -> torch.Tensor:
    """The mean over all batches, each looked at by itself; the backward pass is done. Each rank's batches write the
    buffer one after the other. `sums`: as with DDP, passes that were kept back are added, not averaged."""
    total, begun = sum(len(x) for of_rank in of_all for x, _ in of_rank), model.mean
    loss = torch.zeros(())
    for of_rank in of_all:
        model.mean = begun
        for x, y in of_rank:
            share = 1.0 if sums and len(of_all) == 1 else len(x) / total * (len(of_rank) if sums else 1)
            part = nn.functional.mse_loss(model(x), y) * share
            part.backward()
            loss += part.detach()
    return loss


def pair() -> tuple[Branches, Branches, list[torch.optim.Optimizer]]:
    torch.set_default_dtype(torch.float64)
    models = Branches(), Branches()
    return *models, [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01) for m in models]


def apart(model: nn.Module, other: nn.Module) -> float:
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def steps(rank: int, n: int, strategy: str, kind: str = "", **settings: Any) -> tuple[float, list[str]]:
    """How far losses, gradients' norms and parameters are from one process's; and what was said."""
    model, other, (optimizer, theirs) = pair()
    each = 2 if kind == "micro-batches" else 1
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        program: Any = autopar.optimize(
            model,
            example_inputs=batches(0, (4,) * n)[rank][0],
            loss_fn=nn.functional.mse_loss,
            optimizer=optimizer,
            strategy=strategy,
            late_parameters="late" in strategy,
            clip_grad_norm=0.5,
            **settings,
        )
        worst = 0.0
        for step, sizes in enumerate((SIZES[3], *SIZES) if kind == "at once" else SIZES):
            if kind == "changes":
                model.factor = other.factor = 1.0 + 0.1 * step
            of_all = batches(step, sizes[:n], each)
            if each > 1:
                result = program.step(micro_batches=of_all[rank], grad_norm=True)
            else:
                result = program.step(of_all[rank][0], outputs=kind == "outputs", grad_norm=True)
                assert kind != "outputs" or result.output.shape == of_all[rank][0][1].shape
            theirs.zero_grad()
            loss = one_process(other, of_all)
            norm = nn.utils.clip_grad_norm_(other.parameters(), 0.5)
            theirs.step()
            worst = max(worst, abs(float(result.loss - loss)), abs(float(result.grad_norm - norm)))
        program.synchronize()
        state = program.state_dict()["model"]
    off = max(float((state[k] - v).detach().abs().max()) for k, v in other.state_dict().items())
    return max(worst, off), [str(w.message) for w in said if "runs eagerly" in str(w.message)]


def module(rank: int, n: int, accumulates: bool, **settings: Any) -> tuple[float, list[str]]:
    """The same of a drop-in module, and of the gradients that it leaves."""
    model, other, (optimizer, theirs) = pair()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        synced: Any = autopar.optimize(model, example_inputs=torch.randn(4, 4), strategy="ddp", **settings)
        worst = 0.0
        for step, sizes in enumerate(SIZES):
            of_all = batches(step, sizes[:n], 2 if accumulates else 1)
            optimizer.zero_grad()
            theirs.zero_grad()
            for k, (x, y) in enumerate(of_all[rank]):
                last = k + 1 == len(of_all[rank])
                with contextlib.nullcontext() if last else synced.no_sync():
                    nn.functional.mse_loss(synced(x), y).backward()
            one_process(other, of_all, sums=True)
            pairs = zip(model.parameters(), other.parameters(), strict=True)
            worst = max(worst, *(float((a.grad - b.grad).abs().max()) for a, b in pairs))  # type: ignore[operator]
            optimizer.step()
            theirs.step()
            worst = max(worst, apart(model, other))
        both = ""
        if rank == 0:
            try:
                with synced.no_sync():
                    (synced(torch.randn(4, 4)).sum() + synced(torch.randn(ODD, 4)).sum()).backward()
            except AutoparError as e:
                both = str(e)
    return worst, [both, *(str(w.message) for w in said if "runs eagerly" in str(w.message))]


def one_pass(rank: int, n: int, captured_first: bool) -> float:
    """How far gradients are from one process's where one backward pass goes through a batch that was captured and, on
    rank 0, one that cannot be. In the last pass, a term of the loss reads parameters."""
    model, other, _ = pair()
    synced: Any = autopar.optimize(
        Unwritten(model), example_inputs=torch.randn(4, 4), strategy="ddp", weight=lambda batch: 1.0
    )
    worst = 0.0
    for step in range(3):
        of_all = [batches(3 * step + r, (4, 2 if r else ODD)) for r in range(n)]
        parts = [(x, y) for ((x, y),) in (of_all[rank] if captured_first else of_all[rank][::-1])]
        model.zero_grad()
        other.zero_grad()
        total = sum((nn.functional.mse_loss(synced(x), y) for x, y in parts), torch.zeros(()))
        if step == 2:
            total = total + (rank + 1) * model.last.weight.square().sum()
        total.backward()
        whole = [nn.functional.mse_loss(Unwritten(other)(x), y) / n for of_rank in of_all for ((x, y),) in of_rank]
        terms = [(r + 1) / n * other.last.weight.square().sum() for r in range(n) if step == 2]
        torch.stack([*whole, *terms]).sum().backward()
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        worst = max(worst, *(float((a.grad - b.grad).abs().max()) for a, b in pairs))  # type: ignore[operator]
    return worst


def added_up(rank: int, n: int) -> float:
    """How far what lies in `grad` is from one process's, where nothing is zeroed between backward passes."""
    model, other, _ = pair()
    synced: Any = autopar.optimize(Unwritten(model), example_inputs=torch.randn(4, 4), strategy="ddp")
    worst = 0.0
    for step, sizes in enumerate(SIZES):
        of_all = [batch for (batch,) in batches(step, sizes[:n])]
        x, y = of_all[rank]
        nn.functional.mse_loss(synced(x), y).backward()
        total = sum(len(x) for x, _ in of_all)
        for x, y in of_all:
            (nn.functional.mse_loss(Unwritten(other)(x), y) * len(x) / total).backward()
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        worst = max(worst, *(float((a.grad - b.grad).abs().max()) for a, b in pairs))  # type: ignore[operator]
    return worst


class Mean(Unwritten):
    """Returns a mean over the samples that a mask leaves: NaN where it leaves none."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:  # type: ignore[override]
        return (super().forward(x).square().mean(1) * mask).sum() / mask.sum()


def uncounted(rank: int, n: int, capture: Any) -> float:
    """How far gradients are from one process's where rank 0's batch counts as nothing and its loss is NaN, in one pass
    or behind one that was kept back; and where none counts on any rank, but all losses are numbers."""
    model, other, _ = pair()
    counts, every = [1.0], torch.ones(4)
    synced: Any = autopar.optimize(
        Mean(model),
        example_inputs={"x": torch.ones(4, 4), "mask": every},
        weight=lambda batch: counts[0] * float(batch["mask"].sum()),
        capture=capture,
    )
    worst = 0.0
    for size, kind in ((size, kind) for size in (4, ODD) for kind in ("", "kept", "nowhere")[2 * (n == 1) :]):
        every, of_all = torch.ones(size), [torch.full((size, 4), r + 1.0) for r in range(n)]
        model.zero_grad()
        other.zero_grad()
        counts[0] = float(kind != "nowhere")
        if kind == "kept":
            with synced.no_sync():
                synced(of_all[rank], every).backward()
        synced(of_all[rank], every if rank or kind == "nowhere" else 0 * every).backward()
        losses = [Mean(other)(x, every) for x in of_all]
        counted = {"": losses[1:], "kept": losses + losses[1:], "nowhere": losses}[kind]
        (torch.stack(counted).mean() * (2 if kind == "kept" else 1)).backward()
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        worst = max(worst, *(float((a.grad - b.grad).abs().nan_to_num(1e9).max()) for a, b in pairs))  # type: ignore[operator]
    return worst


def refused(rank: int, n: int, strategy: str) -> str:
    """Why a batch that cannot be captured is refused under a plan that needs the graph."""
    model, _, (optimizer, _) = pair()
    x, y = batches(0, (4,) * n)[rank][0]
    program: Any = autopar.optimize(
        model, example_inputs=(x, y), loss_fn=nn.functional.mse_loss, optimizer=optimizer, strategy=strategy
    )
    program.step((x, y))
    try:
        program.step((x[:ODD], y[:ODD]))
    except AutoparError as e:
        return f"{type(e).__name__}: {e}"
    return ""


def everything(rank: int, n: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "steps": {s: steps(rank, n, s) for s in ("ddp", "zero1+late", "PartitionedPS")},
        "kinds": {k: steps(rank, n, "ddp", k) for k in ("micro-batches", "outputs", "changes", "at once")},
        "module": {str(a): module(rank, n, a) for a in (False, True)},
        "added up": added_up(rank, n),
        "uncounted": {c: uncounted(rank, n, c) for c in ("auto", "never")},
        "one pass": [one_pass(rank, n, captured_first) for captured_first in (False, True)],
    }
    if n > 1:
        found["kinds"]["always"] = steps(rank, n, "zero1", check="always")
        found["refused"] = {s: refused(rank, n, s) for s in ("sharded_parameters", "sparse_rows")}
    return found
