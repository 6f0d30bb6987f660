"""What the tests of `no_sync()` run on each rank: loops beside DistributedDataParallel, and what it cannot do."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.errors import AutoparError, AutoparWarning, CaptureError
from tests.gloo.no_sync_loops import LOOPS, Loop, Net, batch, loss


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def apart(loop: Loop, rank: int, capture: Any) -> float:
    """How far gradients are from those of `DistributedDataParallel`, at worst."""
    mine, theirs = Net(), Net()
    module = autopar.optimize(mine, example_inputs=batch(0, rank), strategy="ddp", capture=capture)
    wrapped = DistributedDataParallel(theirs)
    worst = 0.0
    for _ in zip(loop(module, mine, rank), loop(wrapped, theirs, rank), strict=True):
        for a, b in zip(gradients(mine), gradients(theirs), strict=True):
            assert (a is None) == (b is None)
            worst = max(worst, 0.0 if a is None or b is None else float((a - b).abs().max()))
    return worst


def uneven(rank: int, n: int, capture: Any) -> float:
    """Of micro-batches of unequal sizes, and with a term that no module computes: how far from one process."""
    mine, other = Net(), Net()
    module = autopar.optimize(mine, example_inputs=batch(0, rank), strategy="ddp", capture=capture)
    sizes = [[2 + rank_, 4, 0 if rank_ else 3, 1 + rank_] for rank_ in range(n)]
    total = sum(map(sum, sizes))

    def penalty(model: nn.Module) -> torch.Tensor:
        return sum((p.square().sum() for p in model.parameters()), torch.zeros(()))

    penalty(mine).backward()
    for k in range(4):
        with module.no_sync() if k < 3 else contextlib.nullcontext():
            (loss(module(batch(k, rank, sizes[rank][k]))) + penalty(mine)).backward()
    parts = [(k, r, sizes[r][k]) for r in range(n) for k in range(4) if sizes[r][k]]
    whole = sum((loss(other(batch(*part))) * (4 * part[2] / total) for part in parts), torch.zeros(()))
    (whole + 5 * penalty(other)).backward()
    return max(
        float((a - b).abs().max())
        for a, b in zip(gradients(mine), gradients(other), strict=True)
        if a is not None and b is not None
    )


def around_a_checkpoint(
    rank: int, n: int, before: bool, capture: Any = "always", reentrant: bool = True
) -> tuple[float, list[str]]:
    """Of a checkpoint around the module, whose backward pass may lie within that of another term of the loss: how far
    from one process, and what is said. `before`: whether the term's backward pass comes first."""
    mine, other = Net(), Net()
    module = autopar.optimize(mine, example_inputs=batch(0, rank), strategy="ddp", capture=capture)

    def term(model: nn.Module, rank: int) -> torch.Tensor:
        return (rank + 1) * model.get_parameter("last.weight").square().sum()

    told: list[str] = []
    for k in range(2):
        first = None if before else term(mine, rank)
        inputs = batch(k, rank, rank + 2).requires_grad_()
        output = loss(checkpoint(module, inputs, use_reentrant=reentrant))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", AutoparWarning)
            (output + (term(mine, rank) if first is None else first)).backward()
        told += [str(w.message) for w in said if w.category is AutoparWarning]
        total = sum(r + 2 for r in range(n))
        parts = [(loss(other(batch(k, r, r + 2))) + term(other, r)) * ((r + 2) / total) for r in range(n)]
        sum(parts, torch.zeros(())).backward()
    pairs = zip(mine.parameters(), other.parameters(), strict=True)
    return max(float((a.grad - b.grad).abs().max()) for a, b in pairs), told  # type: ignore[operator]


def both_in_one_pass(rank: int, n: int, capture: Any, kept_first: bool) -> float:
    """Of a backward pass through a call that is kept back and one that is not, and a pass after it: how far from one
    process. (`DistributedDataParallel` looks at the last call alone.)"""
    mine, other = Net(), Net()
    module = autopar.optimize(mine, example_inputs=batch(0, rank), strategy="ddp", capture=capture)
    with module.no_sync():
        loss(module(batch(0, rank))).backward()
        kept = loss(module(batch(1, rank))) if kept_first else None
    total = loss(module(batch(2, rank)))
    if kept is None:
        with module.no_sync():
            kept = loss(module(batch(1, rank)))
    (total + kept).backward()
    loss(module(batch(3, rank))).backward()
    sum((loss(other(batch(k, r))) / n for k in range(4) for r in range(n)), torch.zeros(())).backward()
    return max(
        float((a - b).abs().max())
        for a, b in zip(gradients(mine), gradients(other), strict=True)
        if a is not None and b is not None
    )


def left_out(rank: int, n: int, capture: Any) -> float:
    """Of a backward pass into one parameter alone, behind one that was kept back: how far from one process."""
    mine, other = Net(), Net()
    module = autopar.optimize(mine, example_inputs=batch(0, rank), strategy="ddp", capture=capture)
    with module.no_sync():
        loss(module(batch(0, rank))).backward()
    loss(module(batch(1, rank))).backward(inputs=[mine.last.weight])
    loss(module(batch(2, rank))).backward()
    parts = {k: sum((loss(other(batch(k, r))) / n for r in range(n)), torch.zeros(())) for k in range(3)}
    parts[1].backward(inputs=[other.last.weight])
    (parts[0] + parts[2]).backward()
    pairs = zip(mine.parameters(), other.parameters(), strict=True)
    return max(float((a.grad - b.grad).abs().max()) for a, b in pairs)  # type: ignore[operator]


def changed_between_sizes(rank: int, capture: Any) -> str:
    """What is said where it cannot be told how much the parts of a gradient count."""
    mine = Net()
    module = autopar.optimize(mine, example_inputs=batch(0, rank), strategy="ddp", capture=capture)
    with module.no_sync():
        loss(module(batch(0, rank, 2))).backward()
        loss(module(batch(1, rank, 4))).backward()
    nn.utils.clip_grad_norm_(mine.parameters(), 0.01)
    try:
        loss(module(batch(2, rank))).backward()
    except CaptureError as e:
        return str(e)
    return ""


def penalty_beside_the_module(rank: int, capture: Any, beside: bool) -> tuple[list[str], float]:
    """What is said of a gradient penalty that is computed without the module, and how far gradients of ranks are apart;
    without `beside`, of a loss that goes through the module alone."""
    mine = Net()
    module = autopar.optimize(mine, example_inputs=batch(0, rank), strategy="ddp", capture=capture)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", AutoparWarning)
        total = loss(module(batch(0, rank))) + loss(module(batch(1, rank)))
        if beside:
            x = batch(2, rank).requires_grad_()
            (slope,) = torch.autograd.grad(mine(x).sum(), x, create_graph=True)
            total = total + slope.square().mean()
        total.backward()
    own = torch.cat([g.flatten() for g in gradients(mine) if g is not None])
    first = own.clone()
    dist.broadcast(first, 0)
    return [str(w.message) for w in said if w.category is AutoparWarning], float((own - first).abs().max())


def beside_on_one_rank_later(rank: int) -> str:
    """What is raised where the first other gradients come on one rank alone, when ranks do not tell each other."""
    mine = Net()
    module = autopar.optimize(mine, example_inputs=batch(0, rank), strategy="ddp", capture="always", timeout_s=10)
    try:
        for k in range(4):
            total = loss(module(batch(k, rank)))
            if k == 2 and rank == 1:
                total = total + loss(mine(batch(5, rank)))
            total.backward()
    except AutoparError as e:
        return f"{type(e).__name__}: {e}"
    return ""


def taken_too_early(rank: int, how: str) -> list[str]:
    """What is said of other gradients that are taken before they are averaged."""
    mine = Net()
    clip = 0.1 if how == "clip" else None
    module = autopar.optimize(
        mine, example_inputs=batch(0, rank), strategy="ddp", capture="always", clip_grad_norm=clip
    )
    if how == "hook":
        mine.get_parameter("last.weight").register_post_accumulate_grad_hook(lambda p: None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", AutoparWarning)
        for k in range(4):
            total = loss(module(batch(k, rank))) + loss(mine(batch(5, rank)))
            if how == "grad":
                torch.autograd.grad(total, [*mine.parameters()])
            else:
                total.backward()
    return [str(w.message) for w in said if w.category is AutoparWarning]


def everything(rank: int, n: int) -> tuple[Any, ...]:
    captures = ("always", "never")
    worst = {f"{loop.__name__}, {c}": apart(loop, rank, c) for c in captures for loop in LOOPS}
    worst |= {f"uneven, {c}": uneven(rank, n, c) for c in captures}
    worst |= {f"both, {c}, {first}": both_in_one_pass(rank, n, c, first) for c in captures for first in (False, True)}
    worst |= {f"left out, {c}": left_out(rank, n, c) for c in captures}
    for of in ((False,), (True,), (True, "never"), (False, "never", False)):
        worst[f"around a checkpoint, {of}"] = around_a_checkpoint(rank, n, *of)[0]
    penalties = [penalty_beside_the_module(rank, c, beside) for c in captures for beside in (False, True)]
    early = [taken_too_early(rank, how) for how in ("grad", "hook", "clip")]
    early.append(around_a_checkpoint(rank, n, False, "never")[1])
    said = [changed_between_sizes(rank, c) for c in captures]
    return worst, said, penalties, early, beside_on_one_rank_later(rank)
