"""Quality budgets for jobs unlike the ones that they were built for, on real ranks."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.gloo.ranks import run_ranks
from tests.gloo.test_quality import SLOW, STEPS, batch, made
from tests.unit.synthetic import cpu_hosts


class Head(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.seen = nn.BatchNorm1d(3).eval()

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.seen(output) * self.scale, target)


def by_length(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output.sum(1) - target) ** 2).sum() / len(target)


def of_ranks(rank: int, world_size: int) -> dict[str, Any]:
    import autopar
    from autopar.quality.pilots import Pilots
    from autopar.quality.probe import Job, Probe

    warnings.simplefilter("ignore", autopar.AutoparWarning)
    cluster = cpu_hosts(world_size, SLOW)
    found: dict[str, Any] = {}

    def job_of(model: nn.Module, optimizer: Any, loss_fn: Any, example: Any) -> tuple[Job, Any]:
        options = {"example_inputs": example, "loss_fn": loss_fn, "optimizer": optimizer, "strategy": "ddp"}
        program = autopar.optimize(model, cluster, **options)
        return Job.of(program, example), program.plan

    def refused(topic: str, run: Any) -> None:
        try:
            run()
        except Exception as e:
            found[topic] = f"{type(e).__name__}: {e}"

    # Batches of another shape than the example train by their own size.
    model, optimizer = made(torch.float64)
    job, ddp = job_of(model, optimizer, by_length, batch(0, rank, 4, torch.float64))
    copied = job.copy()
    program = copied.program(ddp)
    losses = [float(program.step(batch(i, rank, 16, torch.float64))) for i in range(3)]
    alone, its = made(torch.float64)
    for i, loss in enumerate(losses):
        both = [batch(i, r, 16, torch.float64) for r in range(world_size)]
        value = by_length(alone(torch.cat([x for x, _ in both])), torch.cat([y for _, y in both]))
        its.zero_grad()
        value.backward()
        its.step()
        found[f"loss {i}"] = abs(loss - float(value))

    # A learning rate of 0 says nothing of plans.
    for group in job.optimizer.param_groups:
        group["lr"] = 0.0
    refused("no rate", lambda: Probe(job, ddp, [batch(i, rank, 4, torch.float64) for i in range(8)], 4))

    # A metric may read the loss; a model's statistics are averaged before pilots are judged.
    torch.manual_seed(0)
    model, head = nn.Sequential(nn.Linear(16, 3), nn.BatchNorm1d(3)), Head()
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.05)
    job, ddp = job_of(model, optimizer, head, batch(0, rank))
    seen: list[float] = []

    def of_head(model: nn.Module) -> float:
        seen.append(float(head.scale.detach().norm()))
        assert not head.training
        return len(seen)

    Pilots(job, ddp, [batch(i, rank) for i in range(16)], 8, of_head, True)
    found["heads"] = seen
    found["head stays"] = torch.equal(head.scale.detach(), torch.ones(3)) and head.training and not head.seen.training

    def failing(model: nn.Module) -> float:
        if rank:
            raise OSError("no such file")
        return 0.0

    refused("metric", lambda: Pilots(job, ddp, [batch(i, rank) for i in range(16)], 8, failing, True))

    # Budgets must be alike; loss scaling allows no lossy plan; pins do not count for exact copies.
    def choose(steps: int = STEPS, **options: Any) -> Any:
        model, optimizer = made()
        x, y = batch(-1, 7, 500)
        batches = (batch(i, rank) for i in itertools.count())
        budget = autopar.QualityBudget(0.3, lambda m: -float(F.cross_entropy(m(x), y)), batches, steps)
        options = {"example_inputs": batch(0, rank), "loss_fn": F.cross_entropy, "time_budget_s": 0.5, **options}
        return autopar.optimize(model, cluster, optimizer=optimizer, budget=budget, **options)

    refused("other steps", lambda: choose(STEPS + 100 * rank))
    found["scaled"] = choose(loss_scale="dynamic").plan.fidelity
    found["pinned"] = choose(pin={"0.*": "parameter_server(owner=0)"}).plan.name
    refused("lossy pin", lambda: choose(pin={"0.*": "scaled_sign"}))
    return found


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    return run_ranks(2, of_ranks)


def test_batches_of_another_shape_than_the_example_count_by_their_own(outcomes: list[dict[str, Any]]) -> None:
    assert all(found[f"loss {i}"] < 1e-12 for found in outcomes for i in range(3))


def test_probes_refuse_a_training_that_stands_still(outcomes: list[dict[str, Any]]) -> None:
    assert all("change no parameter (learning rates: [0.0])" in found["no rate"] for found in outcomes)


def test_a_metric_reads_the_loss_that_was_trained(outcomes: list[dict[str, Any]]) -> None:
    for found in outcomes:
        start, exact, other = found["heads"]
        assert start != exact != other and found["head stays"]


def test_a_metric_that_fails_on_one_rank_is_named_on_all(outcomes: list[dict[str, Any]]) -> None:
    assert "metric fails on rank 1: OSError: no such file" in outcomes[0]["metric"]
    assert outcomes[1]["metric"] == "OSError: no such file"


def test_budgets_that_differ_are_refused(outcomes: list[dict[str, Any]]) -> None:
    assert all("the settings: a budget of 0.3 of the metric" in found["other steps"] for found in outcomes)


def test_options_that_no_lossy_plan_goes_with_leave_the_others(outcomes: list[dict[str, Any]]) -> None:
    assert all(found["scaled"] in ("exact", "rounded") for found in outcomes)
    assert len({found["pinned"] for found in outcomes}) == 1
    assert all("leave the pin out" in found["lossy pin"] for found in outcomes)
