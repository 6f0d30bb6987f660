"""Training loops with `no_sync()`, which run with the drop-in module and with DistributedDataParallel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
        self.double()

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.first(x).tanh())


def batch(k: int, rank: int, samples: int = 3) -> torch.Tensor:
    return torch.randn(samples, 4, generator=torch.Generator().manual_seed(10 * k + rank), dtype=torch.float64)


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


Loop = Callable[[Any, nn.Module, int], Iterator[None]]
"""Is given a wrapped module, its model and the rank; what lies in `grad` is compared at each `yield`."""


def looks(module: Any, model: nn.Module, rank: int) -> Iterator[None]:
    for k in range(2):
        with module.no_sync():
            loss(module(batch(3 * k, rank))).backward()
            yield
            loss(module(batch(3 * k + 1, rank))).backward()
            yield
        loss(module(batch(3 * k + 2, rank))).backward()
        yield
        model.zero_grad()


def says_by_attribute(module: Any, model: nn.Module, rank: int) -> Iterator[None]:
    for k in range(6):
        module.require_backward_grad_sync = k % 3 == 2
        assert module.require_backward_grad_sync is (k % 3 == 2)
        loss(module(batch(k, rank))).backward()
        yield


def drops(module: Any, model: nn.Module, rank: int) -> Iterator[None]:
    for to_none in (True, False):
        with module.no_sync():
            loss(module(batch(0, rank))).backward()
        model.zero_grad(set_to_none=to_none)
        loss(module(batch(1, rank))).backward()
        yield
        model.zero_grad(set_to_none=to_none)


def changes(module: Any, model: nn.Module, rank: int) -> Iterator[None]:
    with module.no_sync():
        for k in range(2):
            loss(module(batch(k, rank))).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    for p in model.parameters():
        p.grad = p.grad * 2 if p.grad is not None and p.dim() > 1 else None
    loss(module(batch(2, rank))).backward()
    yield


def continues(module: Any, model: nn.Module, rank: int) -> Iterator[None]:
    """Adds to gradients that were synchronized."""
    loss(module(batch(0, rank))).backward()
    with module.no_sync():
        loss(module(batch(1, rank))).backward()
        yield
    loss(module(batch(2, rank))).backward()
    yield


def takes_derivatives(module: Any, model: nn.Module, rank: int) -> Iterator[None]:
    with module.no_sync():
        first = torch.autograd.grad(loss(module(batch(0, rank))), [*model.parameters()])
        loss(module(batch(1, rank))).backward()
        yield
    for p, g in zip(model.parameters(), first, strict=True):
        assert p.grad is not None
        p.grad += g
    loss(module(batch(2, rank))).backward()
    yield


def has_different_numbers_of_batches(module: Any, model: nn.Module, rank: int) -> Iterator[None]:
    """On the ranks, as where one of them leaves a batch out; in the last pass of the second step, beside another way to
    the parameters."""
    for step in range(3):
        with module.no_sync():
            for k in range(2 * (step % 2 == rank)):
                loss(module(batch(k, rank))).backward()
        total = loss(module(batch(2, rank)))
        if step:
            total = total + loss(model(batch(3, rank)))
        total.backward()
        yield
        model.zero_grad()


def calls_outside(module: Any, model: nn.Module, rank: int) -> Iterator[None]:
    """The forward pass says whether to synchronize."""
    found = loss(module(batch(0, rank)))
    with module.no_sync():
        found.backward()
    yield


def has_other_terms(module: Any, model: nn.Module, rank: int) -> Iterator[None]:
    def penalty() -> torch.Tensor:
        return sum((p.square().sum() for p in model.parameters()), torch.zeros(()))

    with module.no_sync():
        (loss(module(batch(0, rank))) + penalty()).backward()
        yield
    (loss(module(batch(1, rank))) + penalty()).backward()
    yield


def calls_twice(module: Any, model: nn.Module, rank: int) -> Iterator[None]:
    with module.no_sync():
        (loss(module(batch(0, rank))) * loss(module(batch(1, rank)))).backward()
        yield
    loss(module(batch(2, rank))).backward()
    yield


def has_hooks(module: Any, model: nn.Module, rank: int) -> Iterator[None]:
    """That are linear, so that it makes no difference to which of them a sum is given."""
    hooks = [p.register_hook(lambda g: 2 * g) for p in model.parameters()]
    with module.no_sync():
        loss(module(batch(0, rank))).backward()
    loss(module(batch(1, rank))).backward()
    yield
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    loss(module(batch(1, rank))).backward()
    yield


def calls_the_plain_model(module: Any, model: nn.Module, rank: int) -> Iterator[None]:
    """Beside the module, with other numbers on each rank, from the first pass on."""
    for k in range(3):
        (loss(module(batch(k, rank))) + loss(model(batch(k + 5, rank)))).backward()
        yield
    with module.no_sync():
        (loss(module(batch(3, rank))) + loss(model(batch(4, rank)))).backward()
    loss(module(batch(1, rank))).backward()
    yield


def calls_the_plain_model_later(module: Any, model: nn.Module, rank: int) -> Iterator[None]:
    """First in the 3rd pass, of which ranks do not tell each other, and where `grad` is not empty."""
    for k in range(5):
        total = loss(module(batch(k, rank)))
        if k == 2:
            total = total + loss(model(batch(5, rank)))
        total.backward()
        yield


def calls_the_plain_model_on_rank_1(module: Any, model: nn.Module, rank: int) -> Iterator[None]:
    """And twice through the module, in the 4th pass, of which ranks tell each other, and in the 5th."""
    for k in range(5):
        total = loss(module(batch(k, rank))) + loss(module(batch(k + 7, rank)))
        if k >= 3 and rank == 1:
            total = total + loss(model(batch(5, rank)))
        total.backward()
        yield


def reads_parameters(module: Any, model: nn.Module, rank: int) -> Iterator[None]:
    """In the loss, some of them, with hooks that are linear."""
    hook = model.get_parameter("last.weight").register_hook(lambda g: 2 * g)
    for k in range(3):
        total = loss(module(batch(k, rank)))
        if k:
            total = total + (rank + 1) * model.get_parameter("last.weight").square().sum()
        total.backward()
        yield
    hook.remove()


def has_gradients_before(module: Any, model: nn.Module, rank: int) -> Iterator[None]:
    """Each rank's own, of a backward pass without the module, or written by hand."""
    for k in range(4):
        if k % 2:
            (loss(model(batch(k + 5, rank))) + (rank + 1) * model.get_parameter("first.weight").sum()).backward()
        elif k:
            model.get_parameter("last.bias").grad = torch.full((2,), rank + 1.0, dtype=torch.float64)
        loss(module(batch(k, rank))).backward()
        yield
        loss(module(batch(k + 1, rank))).backward()
        yield
        model.zero_grad(set_to_none=k < 2)


def takes_derivatives_between(module: Any, model: nn.Module, rank: int) -> Iterator[None]:
    """Of which what lies in `grad` is no part."""
    for k in range(2):
        with module.no_sync() if k else contextlib.nullcontext():
            loss(module(batch(0, rank))).backward()
        if not k:
            model.get_parameter("last.bias").grad = torch.ones(2, dtype=torch.float64)
        yield
        torch.autograd.grad(loss(module(batch(1, rank))), [*model.parameters()])
        yield
        loss(module(batch(2, rank))).backward()
        yield
        model.zero_grad()


LOOPS: tuple[Loop, ...] = (
    looks,
    says_by_attribute,
    drops,
    changes,
    continues,
    takes_derivatives,
    has_different_numbers_of_batches,
    calls_outside,
    has_other_terms,
    calls_twice,
    has_hooks,
    calls_the_plain_model,
    calls_the_plain_model_later,
    calls_the_plain_model_on_rank_1,
    reads_parameters,
    has_gradients_before,
    takes_derivatives_between,
)
