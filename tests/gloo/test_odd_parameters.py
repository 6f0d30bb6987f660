"""Parameters without dimensions, without rows, in any memory layout, and complex ones: under every strategy."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.ir.batch import flatten
from autopar.ir.build import training_graph
from autopar.runtime.compiled import Settings
from autopar.runtime.job.process_group import join, take_from_rank_0
from autopar.runtime.job.servers import serve_here
from autopar.runtime.optimizers.optimizer import context_for
from autopar.runtime.program import Program
from autopar.strategies import STRATEGIES
from autopar.testing.cases import SERVERS, uses
from autopar.testing.tasks import Task
from autopar.testing.training import TRAININGS, batches, trained
from tests.gloo.ranks import run_ranks

LIMIT = 1e-10


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Odd(nn.Module):
    """Convolutions in channels-last layout, turned matrices, single numbers, and parameters without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 3)
        self.turned = nn.Parameter(values(4, 7).t())
        self.permuted = nn.Parameter(values(2, 7, 4).permute(1, 2, 0))
        self.scale, self.one = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.ones(1))
        self.no_rows, self.no_columns = nn.Parameter(torch.zeros(0, 7)), nn.Parameter(torch.zeros(4, 0))
        self.expanded: torch.Tensor
        self.register_buffer("expanded", torch.ones(7).expand(2, 7), persistent=False)
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.tanh(self.first(x))).mean((2, 3)) * self.scale.exp() * self.one
        z = (
            self.expanded.sum(0)
            + y @ self.turned.t()
            + y @ self.permuted.sum(2).t()
            + self.no_rows.sum(0)
            + self.no_columns.sum()
        )
        found: torch.Tensor = self.head(torch.tanh(z))
        return found


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(values(27, 3, dtype=torch.complex128) / 5)
        self.scale = nn.Parameter(torch.tensor(1 + 1j, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.flatten(1)[:, :27].to(self.weight.dtype) @ self.weight * self.scale).abs()


def odd() -> nn.Module:
    torch.manual_seed(0)
    return Odd().double().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def batch(samples: int, seed: int) -> Any:
    return values(samples, 3, 4, 4, seed=seed), values(samples, 3, seed=seed + 1)


TASKS = (Task("odd", odd, batch, F.mse_loss), Task("complex", Complex, batch, F.mse_loss))


@cache
def graph(task: Task, samples: int) -> Any:
    return training_graph(task.model(), flatten(task.batch(samples, 0)), task.loss_fn)


def differences(rank: int, world_size: int) -> list[str]:
    """What differs from one process."""
    group = join(60.0)
    if rank == 0:
        serve_here(SERVERS)
    wrong, seen = [], 0
    mine = torch.full((3,), float(rank)).expand(4, 3)
    take_from_rank_0([mine], group, "a test")
    if mine.any():
        wrong.append("an expanded tensor is not rank 0's")
    for task in TASKS:
        for turn, strategy in enumerate(STRATEGIES.values()):
            training = ("sgd", "clipped", "accumulated")[turn % 3]
            how = TRAININGS[training]
            model = task.model()
            context = context_for(
                world_size, how.optimizer(model.parameters()), "element", how.clip, True, late_parameters=True
            )
            first = batches(task, training, "unequal", 0, rank)[0]
            captured = graph(task, len(first[0]))
            for use in uses(strategy, captured, context):
                if use.fidelity != "exact":
                    continue
                model = task.model()
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(2)
                optimizer = how.optimizer(model.parameters())
                program = Program(model, use.plan, group, optimizer, Settings(task.loss_fn, how.clip), context)
                program.adopt(captured, first)
                with program.gathered():
                    for p, q in zip(model.parameters(), task.model().parameters(), strict=True):
                        p.data = q.data  # other memory, with other values than the program was made with
                outcome = trained(program, task, training, "unequal", 2)
                whole = {n: p for n, p in outcome.parameters.items() if p.numel()}
                program.load_state_dict(program.state_dict())
                with program.gathered():
                    kept = all(
                        p.stride() == q.stride()
                        for p, q in zip(model.parameters(), task.model().parameters(), strict=True)
                    )
                off = type(outcome)(outcome.losses, whole).differences(task, training, "unequal", world_size)
                seen += 1
                if max(off.values()) > LIMIT or not kept:
                    wrong.append(f"{task.name}, {strategy.name}, {use.options}, {training}: {off}, layout kept: {kept}")
    return wrong or ([] if seen > 10 else [f"only {seen} plans"])


def test_odd_parameters_train_under_every_strategy() -> None:
    assert run_ranks(2, differences) == [[], []]


class Sums(nn.Module):
    """The gradient of a parameter that is summed is one row, expanded: all slices of it lie in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(values(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + self.rows.sum(0))


def largest_difference(rank: int, world_size: int) -> float:
    model, alone = Sums(), Sums()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    every = [(values(2, 3, seed=r), values(2, 3, seed=r + world_size)) for r in range(world_size)]
    program = autopar.optimize(
        model,
        example_inputs=every[rank],
        loss_fn=F.mse_loss,
        optimizer=optimizers[0],
        strategy="PartitionedPS",
        check="never",
    )
    program.step(every[rank])
    F.mse_loss(alone(torch.cat([x for x, _ in every])), torch.cat([y for _, y in every])).backward()
    optimizers[1].step()
    return float((model.rows - alone.rows).detach().abs().max())


def test_slices_of_an_expanded_gradient_are_summed_apart() -> None:
    assert max(run_ranks(2, largest_difference)) < LIMIT


class Narrow(nn.Module):
    """One complex64 parameter in a net of float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64)).double()
        self.factor = nn.Parameter(torch.randn(64, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (self.layers(x) * self.factor).abs().pow(2).sum(1)
        return found


def farthest_gradient(rank: int, world_size: int) -> float:
    model, alone = Narrow(), Narrow()
    every = [values(3 + 4 * r, 6, seed=r) for r in range(world_size)]
    autopar.optimize(model, example_inputs=every[rank])(every[rank]).mean().backward()
    alone(torch.cat(every)).mean().backward()
    farthest = 0.0
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        farthest = max(farthest, float((p.grad - q.grad).abs().max() / q.grad.abs().max()))
    return farthest


def test_the_narrowest_parameter_of_a_drop_in_may_be_complex() -> None:
    """Its rounding is what the proof of the first pass allows for."""
    assert max(run_ranks(2, farthest_gradient)) < 1e-5
