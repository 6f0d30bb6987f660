"""What the tests of optimizers that users change between steps run on each rank: against one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, SparseAdam

import autopar
from autopar.errors import OptimizerError

SIZES = (3, 1)
STRATEGIES = ("ddp", "zero1", "PS", "PartitionedPS")
Given = tuple[torch.Tensor, torch.Tensor]


class Counts(SGD):
    """Counts its steps in its groups and in an attribute, and scales by both and by what users set."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.n, self.scale = 0, 1.0

    def step(self, closure: Any = None) -> Any:
        self.n += 1
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(self.scale * 0.7**self.n + 0.5 ** group["k"])
        return super().step(closure)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def _batches(step: int) -> list[Given]:
    draw = torch.Generator().manual_seed(step)
    x, y = torch.randn(sum(SIZES), 4, generator=draw).double(), torch.randn(sum(SIZES), 3, generator=draw).double()
    return list(zip(x.split(SIZES), y.split(SIZES), strict=True))


def _off(rank: int, strategy: str, make: Callable[[nn.Module], Any], act: Callable[[Any, Any, int], None]) -> float:
    """By how much parameters differ at most from those of one process, where `act` is called with the optimizer, and
    with what saves it, before each step."""
    net, plain = _net(), _net()
    optimizer, reference = make(net), make(plain)
    program = autopar.optimize(
        net,
        example_inputs=_batches(0)[rank],
        loss_fn=F.mse_loss,
        optimizer=optimizer,
        strategy=strategy,
        optimizer_acts_on="element",
    )
    off = 0.0
    for step in range(6):
        batches = _batches(step)
        act(optimizer, lambda: program.state_dict()["optimizer"], step)
        act(reference, reference.state_dict, step)
        program.step(batches[rank])
        reference.zero_grad()
        x, y = (torch.cat(t) for t in zip(*batches, strict=True))
        F.mse_loss(plain(x), y).backward()
        reference.step()
        with program.gathered():
            pairs = zip(net.parameters(), plain.parameters(), strict=True)
            off = max(off, *(float((a.detach() - b.detach()).abs().max()) for a, b in pairs))
    if isinstance(optimizer, Counts):
        assert (optimizer.n, optimizer.param_groups[0]["k"]) == (reference.n, reference.param_groups[0]["k"])
    return off


def _adam(net: nn.Module) -> Optimizer:
    return AdamW(net.parameters(), lr=0.05)


def _counting(net: nn.Module) -> Optimizer:
    return Counts(net.parameters(), lr=0.1)


def _loads(o: Any, save: Callable[[], Any], step: int) -> None:
    if step == 2:
        o.kept = copy.deepcopy(save())
    if step in (4, 5):
        o.load_state_dict(copy.deepcopy(o.kept))


def _resumes(o: Any, save: Callable[[], Any], step: int) -> None:
    if step == 0:
        other = _net()
        optimizer = _adam(other)
        other(_batches(9)[0][0]).square().mean().backward()
        optimizer.step()
        o.load_state_dict(optimizer.state_dict())


def _clears(o: Any, save: Callable[[], Any], step: int) -> None:
    if step == 2:
        o.state.clear()


def _scales(o: Any, save: Callable[[], Any], step: int) -> None:
    if step == 3:
        o.scale = 0.1


class _Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.last = nn.Embedding(50, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.table(x).mean(1))
        return found


def _sparse_adam(rank: int, capture: Literal["always", "never"]) -> float:
    """By how much a drop-in's parameters differ from one process's where SparseAdam is given the rows that are not
    zero of its gradient: other rows' momenta stay."""
    net, plain = _Bags().double(), _Bags().double()
    draw = torch.Generator().manual_seed(0)
    ids, y = torch.randint(0, 50, (4, sum(SIZES), 2), generator=draw), torch.randn(sum(SIZES), 2, generator=draw)
    mine, y = slice(0, SIZES[0]) if rank == 0 else slice(SIZES[0], None), y.double()
    module = autopar.optimize(net, example_inputs=ids[0, mine], strategy="ddp", capture=capture)
    each: list[tuple[Any, Any, list[Optimizer]]] = [
        (m, of, [SparseAdam([m.table.weight], lr=0.1), SGD(m.last.parameters(), lr=0.1)])
        for m, of in ((net, mine), (plain, slice(None)))
    ]
    for x in ids:
        for model, of, optimizers in each:
            for optimizer in optimizers:
                optimizer.zero_grad()
            F.mse_loss(module(x[of]) if model is net else model(x[of]), y[of]).backward()
            if model is net:
                net.table.weight.grad = net.table.weight.grad.to_sparse(1)
            for optimizer in optimizers:
                optimizer.step()
    pairs = zip(net.parameters(), plain.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def everything(rank: int, world_size: int) -> dict[str, Any]:
    """By what a user does and under which plan, by how much it is off; and what is refused, where no rank has all."""
    cases = [(_adam, _loads), (_adam, _resumes), (_adam, _clears), (_counting, _scales), (_counting, _loads)]
    off = {
        f"{make.__name__} {act.__name__} {strategy}": _off(rank, strategy, make, act)
        for make, act in cases
        for strategy in STRATEGIES
    }
    off |= {"SparseAdam": _sparse_adam(rank, "always"), "SparseAdam eager": _sparse_adam(rank, "never")}
    net, refused = _net(), list[str]()
    optimizer = _adam(net)
    given = _batches(0)[rank]
    program = autopar.optimize(net, example_inputs=given, loss_fn=F.mse_loss, optimizer=optimizer, strategy="zero1")
    program.step(given)
    net(given[0]).square().mean().backward()
    for use in (optimizer.step, lambda: copy.deepcopy(optimizer.state_dict())):
        try:
            use()
        except OptimizerError as e:
            refused.append(str(e))
    return {"off": off, "refused": refused}
