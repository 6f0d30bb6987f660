"""What the tests of parameters without a gradient run on each rank: when sums of gradients are begun, and which."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.backends.collectives import calls_so_far
from autopar.errors import CaptureError, CollectiveError
from autopar.runtime.uncaptured.anywhere import Anywhere
from autopar.spec.plan import ParameterSlice, SyncGroup

WIDTH, DEPTHS = 8, ((1, 3), (1, 2), (1, 2), (4, 1), (1, 1), (1, 1), (2, 4))
"""Of each step: how many layers the batches of even and of odd ranks ask for."""


class Deep(nn.Module):
    """Takes as many of its four layers as its batch asks for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)])
        self.last = nn.Linear(WIDTH, 3, bias=False)
        self.log: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x[:, 1:])
        h.register_hook(lambda _: self.log.append("first"))
        for layer in self.layers[: int(x[0, 0].item())]:
            h = layer(h).tanh()
        found: torch.Tensor = self.last(h)
        return found


class Sums(TorchDispatchMode):
    """Writes into a log how many elements each all-reduce of gradients sums."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_reduce" in str(func) and args[0].dtype == torch.float32 and args[0].numel() >= 3 * WIDTH:
            self.log.append("sum")
        return func(*args, **(kwargs or {}))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(4, WIDTH + 1, generator=draw)
    x[:, 0] = DEPTHS[step][rank % 2]
    return x, torch.randn(4, 3, generator=draw)


def come(asked: Anywhere) -> bool:
    """Waits until the ranks' answers are there, as if the backward pass took long."""
    asked.answers()
    return True


def everything(rank: int, n: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    Anywhere.are_there = property(come)  # type: ignore[assignment, method-assign]
    model, alone = Deep(), Deep()
    optimizer, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, alone))
    settings: dict[str, Any] = {"example_inputs": batch(0, rank), "loss_fn": nn.functional.mse_loss, "check": "never"}
    settings["optimizer"] = optimizer
    plan = autopar.optimize(model, strategy="ddp", **settings).plan
    names = [m.name for g in plan.groups for m in g.members]
    groups = tuple(SyncGroup(strategy="all_reduce", members=(ParameterSlice(name=name),)) for name in names)
    program = autopar.optimize(model, plan=plan.model_copy(update={"groups": groups}), **settings)
    found: dict[str, Any] = {"order": names, "logs": [], "apart": []}
    for step in range(len(DEPTHS)):
        model.log.clear()
        with Sums(model.log):
            program.step(batch(step, rank))
        theirs.zero_grad()
        losses = [nn.functional.mse_loss(alone(x), y) for x, y in (batch(step, r) for r in range(n))]
        torch.stack(losses).mean().backward()
        theirs.step()
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        found["apart"].append(max(float((a - b).detach().abs().max()) for a, b in pairs))
        found["logs"].append(list(model.log))
    return found


def clipped(rank: int, n: int) -> float:
    """How far parameters are from one process's under parameter servers with clipping, which reads what owners sum."""
    warnings.simplefilter("ignore")
    model, alone = Deep().double(), Deep().double()
    optimizer, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone))

    def own(step: int, r: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch(step, r)
        return x.double(), y.double()

    program = autopar.optimize(
        model,
        strategy="PS",
        example_inputs=own(0, rank),
        loss_fn=nn.functional.mse_loss,
        optimizer=optimizer,
        clip_grad_norm=0.1,
        capture="never",
        timeout_s=20,
    )
    for step in range(3):
        program.step(own(step, rank))
        theirs.zero_grad()
        losses = [nn.functional.mse_loss(alone(x), y) for x, y in (own(step, r) for r in range(n))]
        torch.stack(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        theirs.step()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def changed_between(rank: int, n: int) -> float:
    """How far a drop-in's parameters are from those under DDP, where gradients are changed between two backward passes
    of which each comes to other layers on each rank."""
    warnings.simplefilter("ignore")
    models = Deep().double(), Deep().double()
    synced = autopar.optimize(models[0], example_inputs=batch(0, rank)[0].double(), strategy="ddp", capture="never")
    ways = synced, nn.parallel.DistributedDataParallel(models[1], find_unused_parameters=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    for step in range(0, 6, 2):
        for model, way, optimizer in zip(models, ways, optimizers, strict=True):
            optimizer.zero_grad()
            for x, y in (batch(step, rank), batch(step + 1, rank)):
                nn.functional.mse_loss(way(x.double()), y.double()).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
    pairs = zip(*(m.parameters() for m in models), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def waits(rank: int, n: int) -> list[int]:
    """By step, how often this rank has waited to hear what others have gradients of: of that step, or of the one
    before. The second rank's batch leaves layers out in the third step alone."""
    warnings.simplefilter("ignore")
    calls: list[None] = []
    answers = Anywhere.answers

    def counted(asked: Anywhere) -> list[bool]:
        calls.append(None)
        return answers(asked)

    Anywhere.answers = counted  # type: ignore[assignment, method-assign]
    model, found = Deep(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    settings: dict[str, Any] = {"optimizer": optimizer, "loss_fn": nn.functional.mse_loss, "check": "never"}
    program = autopar.optimize(model, example_inputs=batch(0, rank), strategy="ddp", **settings)
    for depth in (4, 4, 4 - 3 * rank, 4):
        calls.clear()
        x, target = batch(0, rank)
        x[:, 0] = depth
        program.step((x, target))
        found.append(len(calls))
    return found


def in_branches(rank: int, n: int) -> dict[str, tuple[float, list[int]]]:
    """By plan: how far parameters are from one process's, and how often this rank has communicated in each step. Layers
    that batches do not ask for have groups of their own."""
    warnings.simplefilter("ignore")
    found = {}
    for strategy in ("branches", "branches_zero1", "branches_zero1+late"):
        model, alone = Deep().double(), Deep().double()
        optimizer, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, alone))

        def own(step: int, r: int) -> tuple[torch.Tensor, torch.Tensor]:
            x, y = batch(step, r)
            return x[: 3 + r].double(), y[: 3 + r].double()

        program = autopar.optimize(
            model,
            strategy=strategy,
            example_inputs=own(0, rank),
            loss_fn=nn.functional.mse_loss,
            optimizer=optimizer,
            late_parameters=True,
        )
        sent = []
        for step in range(len(DEPTHS)):
            before = calls_so_far()
            program.step(own(step, rank))
            sent.append(calls_so_far() - before)
            theirs.zero_grad()
            batches = [own(step, r) for r in range(n)]
            losses = [nn.functional.mse_loss(alone(x), y, reduction="sum") / y.shape[1] for x, y in batches]
            (torch.stack(losses).sum() / sum(len(y) for _, y in batches)).backward()
            theirs.step()
        program.synchronize()
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        found[strategy] = max(float((a - b).detach().abs().max()) for a, b in pairs), sent
    return found


class GivesNone(torch.autograd.Function):
    """A product whose weight gets no gradient where that is not wanted."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, weight: torch.Tensor, gives: bool) -> torch.Tensor:
        ctx.save_for_backward(h, weight)
        ctx.gives = gives
        return h @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        h, weight = ctx.saved_tensors
        return gradients[0] @ weight.t(), h.t() @ gradients[0] if ctx.gives else None, None


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, 3))
        self.double()

    def forward(self, x: torch.Tensor) -> Any:
        return GivesNone.apply(self.first(x[:, 1:].double()), self.weight, bool(x[0, 0] > 1))


def given_none(rank: int, n: int) -> float:
    """How far parameters are from one process's, where a function gives a parameter no gradient on some ranks."""
    warnings.simplefilter("ignore")
    model, alone = Product(), Product()
    optimizer, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, alone))
    settings: dict[str, Any] = {"optimizer": optimizer, "loss_fn": _squares, "capture": "never"}
    program = autopar.optimize(model, example_inputs=batch(0, rank), strategy="ddp", **settings)
    for step in range(len(DEPTHS)):
        program.step(batch(step, rank))
        theirs.zero_grad()
        torch.stack([_squares(alone(x), y) for x, y in (batch(step, r) for r in range(n))]).mean().backward()
        theirs.step()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def _squares(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(found, wanted.double())


def checkpointed_in_the_loss(rank: int, n: int, ranks: int) -> tuple[float, str]:
    """How far a drop-in's gradients are from one process's, where the losses of this many ranks go through one of its
    layers in a checkpoint that begins a backward pass; and what is said about it in this step or in the next."""
    warnings.simplefilter("ignore")
    model, alone = Deep().double(), Deep().double()
    example = batch(3, rank)[0].double()
    module = autopar.optimize(model, example_inputs=example, strategy="ddp", capture="never", timeout_s=20)

    def loss(net: Deep, call: Any, r: int) -> torch.Tensor:
        x, y = (t.double() for t in batch(3, r))
        found = nn.functional.mse_loss(call(x), y)
        if r >= ranks:
            return found
        h = torch.ones(4, WIDTH, dtype=torch.double, requires_grad=True)
        more: torch.Tensor = checkpoint(net.last, h, use_reentrant=True).square().mean()
        return found + more

    try:
        loss(model, module, rank).backward()
        torch.stack([loss(alone, alone, r) for r in range(n)]).mean().backward()
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        apart = max(float((a.grad - b.grad).abs().max()) for a, b in pairs if a.grad is not None and b.grad is not None)
        loss(model, module, rank).backward()
    except (CaptureError, CollectiveError) as e:
        return 0.0, str(e)
    return apart, ""
