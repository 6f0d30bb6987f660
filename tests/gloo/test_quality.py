"""A choice under a quality budget, on real ranks: what probes show, that the job is left as it was, and the guard."""

from __future__ import annotations

import copy
import itertools
import math
import tempfile
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.gloo.ranks import run_ranks
from tests.unit.synthetic import cpu_hosts

STEPS = 600
SLOW = "20 Mbit/s"
LOSSY = ("ddp+bf16", "power_sgd(rank=4)", "scaled_sign", "ddp+every=4", "ddp+delay=1")
GUARDED = ("power_sgd+from_step=2", "ddp+delay=2", "quantized", "ddp+every=4", "diloco+every=4")
UNDER_ADAM = (
    "weight_differences(bits=8)",
    "weight_differences(bits=4)",
    "one_bit_adam+from_step=1",
    "one_bit_adam+from_step=16",
)


def made(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)).to(dtype)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batch(step: int, rank: int, samples: int = 16, dtype: torch.dtype = torch.float32) -> tuple[Any, torch.Tensor]:
    """Which of three sums of the inputs is the largest."""
    x = torch.randn(samples, 16, generator=torch.Generator().manual_seed(1_000 * rank + step))
    return x.to(dtype), x[:, :15].view(-1, 3, 5).sum(2).argmax(1)


def _trained_on(program: Any, state: dict[str, Any], rank: int) -> list[float]:
    """The losses of some steps behind a checkpoint of three."""
    program.load_state_dict(copy.deepcopy(state))
    return [float(program.step(batch(step, rank, dtype=torch.float64))) for step in range(3, 12)]


def of_ranks(rank: int, world_size: int) -> dict[str, Any]:
    import autopar
    from autopar.quality.on_evidence import OnEvidence
    from autopar.quality.probe import Job, Probe
    from autopar.quality.program import BudgetedProgram
    from autopar.search import Budget, build_plan, search_result

    warnings.simplefilter("ignore", autopar.AutoparWarning)
    cluster = cpu_hosts(world_size, SLOW)
    found: dict[str, Any] = {}

    def accuracy(model: nn.Module) -> float:
        x, y = batch(-1, 7, 500)
        return float((model(x).argmax(1) == y).double().mean())

    model, optimizer = made()
    before, stream = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    budget = autopar.QualityBudget(0.05, accuracy, (batch(i, rank) for i in itertools.count()), STEPS)
    program = autopar.optimize(
        model,
        cluster,
        example_inputs=batch(0, rank),
        loss_fn=F.cross_entropy,
        optimizer=optimizer,
        budget=budget,
        time_budget_s=2.0,
    )
    assert isinstance(program, BudgetedProgram)
    found["untouched"] = (
        all(torch.equal(before[k], v) for k, v in model.state_dict().items())
        and not optimizer.state
        and torch.equal(stream, torch.get_rng_state())
    )
    found["name"], found["text"] = program.plan.name, program.plan.explain()
    found["plan"] = program.plan.digest
    with tempfile.TemporaryDirectory() as folder:
        program.plan.save(Path(folder) / "evidence.json")
        again = OnEvidence(0.05, STEPS, Path(folder) / "evidence.json", Budget(time_s=2.0))
        fastest = search_result(program.graph, cluster, program.context, budget=Budget(time_s=2.0))
        found["again"] = again(fastest, "SGD").name
    found["losses"] = [float(program.step(batch(i, rank))) for i in range(80)]

    exact = build_plan("ddp", program.graph, cluster, program.context)
    batches = [batch(i, rank) for i in range(64)]
    model, optimizer = made()
    job = Job(model, optimizer, program.settings, program.graph, program.context, program.group, batches[0])
    probe = Probe(job, exact, batches, 32)
    found["exact"] = list(asdict(probe.of(exact)).values())
    plans = {name: build_plan(name, program.graph, cluster, program.context) for name in LOSSY}
    found["divergence"] = {name: probe.of(plan).divergence for name, plan in plans.items()}

    model, _ = made()
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    context = replace(program.context, plain_adam=True, keeps_moments=True)
    probe = Probe(replace(job, model=model, optimizer=adam, context=context), exact, batches, 32)
    plans = {name: build_plan(name, program.graph, cluster, context) for name in UNDER_ADAM}
    found["under adam"] = {name: probe.of(plan).divergence for name, plan in plans.items()}

    # Once the guard has stepped in, training is that of one process again, from where it is.
    for name in GUARDED:
        model, optimizer = made(torch.float64)
        first = batch(0, rank, dtype=torch.float64)
        plain = autopar.optimize(
            model, cluster, example_inputs=first, loss_fn=F.cross_entropy, optimizer=optimizer, strategy="ddp"
        )
        plan = build_plan(name, plain.graph, cluster, plain.context)
        guarded = BudgetedProgram(model, plan, plain.group, optimizer, plain.settings, plain.context)
        guarded.adopt(plain.graph, first)
        assert guarded.guard is not None
        early: dict[str, Any] = {}
        for step in range(6):
            if step == 3:
                early = copy.deepcopy(guarded.state_dict())
            if step == 5:
                guarded.guard.seen.limit = -math.inf
            guarded.step(batch(step, rank, dtype=torch.float64))
        assert guarded.guard.reason
        alone, its_optimizer = copy.deepcopy((model, optimizer))
        whole = autopar.optimize(
            alone, cluster, example_inputs=first, loss_fn=F.cross_entropy, optimizer=its_optimizer, strategy="ddp"
        )
        state = guarded.state_dict()
        assert "state" not in state, "nobody goes on with what was not sent"
        whole.load_state_dict({**state, "random": whole.state_dict()["random"]})
        resumed_model, its_optimizer = made(torch.float64)
        resumed = BudgetedProgram(resumed_model, plan, plain.group, its_optimizer, plain.settings, plain.context)
        resumed.adopt(plain.graph, first)
        resumed.load_state_dict(state)
        for step in range(6, 10):
            here = batch(step, rank, dtype=torch.float64)
            for one in (guarded, whole, resumed):
                one.step(here)
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        found[name] = max(float((a - b).detach().abs().max()) for a, b in pairs)
        assert resumed.guard is not None
        equal = zip(model.parameters(), resumed_model.parameters(), strict=True)
        found[f"{name} resumed"] = resumed.guard.seen == guarded.guard.seen and all(torch.equal(a, b) for a, b in equal)
        resumed_early = _trained_on(guarded, early, rank), _trained_on(resumed, early, rank)
        found[f"{name} put back"] = resumed_early[0] == resumed_early[1] and not guarded.guard.reason
    return found


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    return run_ranks(2, of_ranks)


def test_the_job_is_left_as_it_was_and_all_ranks_choose_alike(outcomes: list[dict[str, Any]]) -> None:
    assert all(found["untouched"] for found in outcomes)
    assert len({(found["name"], found["plan"], found["text"]) for found in outcomes}) == 1
    assert "exact" not in outcomes[0]["name"]  # there is much to gain on so slow a network
    assert "were trained on copies of the model" in outcomes[0]["text"]


def test_what_was_found_chooses_the_same_without_ranks(outcomes: list[dict[str, Any]]) -> None:
    assert {found["again"] for found in outcomes} == {outcomes[0]["name"]}


def test_what_was_chosen_trains(outcomes: list[dict[str, Any]]) -> None:
    losses = outcomes[0]["losses"]
    assert losses == outcomes[1]["losses"]
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


def test_a_probe_of_exact_training_finds_nothing_and_coarser_methods_diverge_more(
    outcomes: list[dict[str, Any]],
) -> None:
    found = outcomes[0]["divergence"]
    assert outcomes[0]["exact"] == [0.0, 0.0, 0.0, 0.0]
    assert 0 < found["ddp+bf16"] < 0.02
    assert found["ddp+bf16"] < found["ddp+every=4"] < 1
    assert 0.02 < found["power_sgd(rank=4)"] < found["scaled_sign"] < 3
    assert found == outcomes[1]["divergence"]


def test_what_goes_on_from_exact_steps_is_probed_behind_them(outcomes: list[dict[str, Any]]) -> None:
    found = outcomes[0]["under adam"]
    fine, coarse, early, later = (found[name] for name in UNDER_ADAM)
    assert 0 < fine < coarse < 0.5
    assert 0 < later < min(3, early)  # behind one step, the variance says nothing yet
    assert found == outcomes[1]["under adam"]


@pytest.mark.parametrize("name", GUARDED)
def test_behind_a_guard_that_steps_in_training_is_exact_also_when_it_is_resumed(
    outcomes: list[dict[str, Any]], name: str
) -> None:
    assert outcomes[0][name] < 1e-12
    assert outcomes[0][f"{name} resumed"]
    assert outcomes[0][f"{name} put back"], "what a checkpoint of before holds is gone on with"
