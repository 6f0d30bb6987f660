"""Copies of a job that a quality budget tries plans on: whole, and apart from what the user has."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import SpecError
from autopar.quality.budget import QualityBudget
from autopar.quality.copies import copies_of
from autopar.runtime.optimizers.joint_optimizer import JointOptimizer


class Scaled(nn.Module):
    """A model with its loss as a method."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.t = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return out

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((self.t * output - target) ** 2).mean()


class Called:
    def __init__(self, known: dict[str, Scaled]) -> None:
        self.known = known

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.known["model"].loss(output, target)


KNOWN: list[Scaled] = []


def of_known(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return KNOWN[0].loss(output, target)


def of_global(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return of_known(output, target)


def losses(model: Scaled) -> dict[str, Callable[..., torch.Tensor]]:
    def outer(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return model.loss(output, target)

    bound = model.loss

    def of_method(output: torch.Tensor, target: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
        return factor * bound(output, target)

    held = [model]

    def of_default(output: torch.Tensor, target: torch.Tensor, known: Scaled = model) -> torch.Tensor:
        return known.loss(output, target)

    @functools.wraps(outer)
    def wrapped(*args: torch.Tensor) -> torch.Tensor:
        return outer(*args)

    KNOWN[:] = [model]
    return {
        "a function that knows a list": lambda output, target: held[0].loss(output, target),
        "a default": of_default,
        "a wrapped function": wrapped,
        "a partial function of one that knows the model": functools.partial(of_method, factor=1.0),
        "an object that is called": Called({"model": model}),
        "a global name": of_global,
        "a method": model.loss,
        "a partial function": functools.partial(model.loss),
        "a function that knows the model": outer,
        "a function that knows its method": of_method,
    }


@pytest.mark.parametrize("which", list(losses(Scaled())))
def test_a_loss_that_reads_the_model_reads_the_copy(which: str) -> None:
    model = Scaled()
    loss_fn = losses(model)[which]
    copied, optimizer, own, _ = copies_of(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, None)
    own(copied(torch.ones(1, 2)), torch.zeros(1, 1)).backward()
    assert copied.t.grad is not None and model.t.grad is None
    assert any(p is copied.t for group in optimizer.param_groups for p in group["params"])


def test_a_loss_that_reads_no_model_is_the_users_own() -> None:
    model = Scaled()
    loss_fn = nn.functional.mse_loss
    assert copies_of(model, torch.optim.SGD(model.parameters()), loss_fn, None)[2] is loss_fn


class Slowed(torch.optim.SGD):
    """An optimizer with an attribute, which `Optimizer.__getstate__` leaves out."""

    def __init__(self, parameters: Iterator[nn.Parameter], factor: float) -> None:
        super().__init__(parameters, lr=1.0)
        self.factor = [factor]


def test_optimizers_keep_their_attributes_and_several_stay_several() -> None:
    model = Scaled()
    first = Slowed(model.linear.parameters(), 0.5)
    torch.optim.lr_scheduler.StepLR(first, 1)  # puts a method of its own in place of `step`
    joint = JointOptimizer([first, torch.optim.Adam([model.t])])
    copied, optimizer, _, _ = copies_of(model, joint, None, None)
    mine, other = optimizer.each
    assert mine.factor == [0.5] and mine.factor is not first.factor
    assert other.param_groups[0]["params"][0] is copied.t
    copied.linear.weight.grad = torch.ones(1, 2)
    before = model.linear.weight.clone()
    mine.step()
    assert torch.equal(model.linear.weight, before) and not torch.equal(copied.linear.weight, before)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_what_a_forward_pass_has_left_in_a_module_does_not_stand_in_the_way() -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 2)))
    out = model(torch.ones(1, 2))
    copied, *_ = copies_of(model, torch.optim.SGD(model.parameters()), None, None)
    assert torch.equal(copied(torch.ones(1, 2)), out)


def test_what_cannot_be_copied_is_said() -> None:
    model = Scaled()
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(SpecError, match=r"one of them cannot be copied: .*lock"):
        copies_of(model, torch.optim.SGD(model.parameters()), None, None)


def test_a_function_that_a_module_holds_knows_the_copy() -> None:
    model = Scaled()
    model.twice = lambda x: 2 * model.t * x  # type: ignore[assignment]
    copied, *_ = copies_of(model, torch.optim.SGD(model.parameters()), None, None)
    with torch.no_grad():
        copied.t.fill_(3.0)
        found = [float(vars(one)["twice"](1.0)) for one in (copied, model)]
    assert found == [6.0, 2.0]


@pytest.mark.parametrize("buffers", [1, 2])
def test_batches_of_a_loader_that_fills_few_buffers_are_told_apart(buffers: int) -> None:
    def filled() -> Iterator[Any]:
        each = torch.zeros(buffers, 3)
        for i in range(5):
            yield each[i % buffers].fill_(i), i

    budget = QualityBudget(0.01, lambda model: 0.0, filled(), 1000)
    assert [(int(x[0]), i) for x, i in budget.taken(7)] == [(i, i) for i in (0, 1, 2, 3, 4, 0, 1)]
