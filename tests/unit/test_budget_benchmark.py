"""The tasks on which lossy methods are tried: their data, metrics and journal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.budget import table
from benchmarks.budget.choices import NETWORKS, Cell
from benchmarks.budget.choices_table import choices_report
from benchmarks.budget.hindsight import Best, best, speeds
from benchmarks.budget.methods import METHODS
from benchmarks.budget.outcome import Journal, Outcome
from benchmarks.budget.rival_trainings import RivalOutcome
from benchmarks.budget.task import Task
from benchmarks.budget.tasks import JUDGED, LEARNED, TASKS
from benchmarks.budget.training import Trained, outcome

OUTCOME = Outcome("waves", "top_k 1%", 0, 0.1, 0.8, 0.02, 0.001, (2.0, None, 1.0), 3.0)


def test_what_the_choice_is_judged_on_is_not_learned_from() -> None:
    assert len(JUDGED) == 6 and len(LEARNED) >= 20
    families = {name.rsplit("_", 1)[0] for name in LEARNED}
    assert not families & set(JUDGED)


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_a_function_of_its_seed_and_its_model_trains_on_it(name: str) -> None:
    task = replace(TASKS[name], test_samples=1_100)
    (inputs, target), (again, _), (other, _) = (
        task.rank_batch(seed, 3, rank) for seed, rank in ((1, 0), (1, 0), (1, 1))
    )
    first = inputs[0] if isinstance(inputs, tuple) else inputs
    assert torch.equal(first, again[0] if isinstance(again, tuple) else again)
    assert not torch.equal(first, other[0] if isinstance(other, tuple) else other)
    model = task.build(0)
    task.loss_fn(model(*inputs) if isinstance(inputs, tuple) else model(inputs), target).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert task.evaluate(model).shape == (1_100,)
    # Evaluated in parts, it is the same test set.
    parts = [task.evaluate(model, part, 2) for part in range(2)]
    assert torch.equal(parts[0] + parts[1], task.evaluate(model))


def test_what_keeps_the_momentum_itself_is_given_an_optimizer_without() -> None:
    assert {m.name for m in METHODS.values() if m.own_momentum} == {"dgc 1%"}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    METHODS["dgc 1%"].prepare(optimizer)
    assert optimizer.param_groups[0]["momentum"] == 0 and not METHODS["dgc 1%"].probed


def test_a_constant_prediction_is_the_best_that_looks_at_no_input() -> None:
    classes = replace(TASKS["waves"], test_samples=2_000)
    assert float(classes.trivial().mean()) == pytest.approx(0.9, abs=0.02)
    chances = replace(TASKS["clicks"], test_samples=2_000)
    assert float(chances.trivial().mean()) < 0.6932  # at most a coin's


def test_what_is_lost_is_a_part_of_what_exact_training_gains() -> None:
    task: Task = TASKS["waves"]
    exact = Trained(torch.tensor([0.0, 0.0, 0.0, 0.4]).double(), (2.0,) * 200, 1.0)
    lossy = Trained(torch.tensor([0.0, 0.0, 0.0, 0.8]).double(), (2.0,) * 100 + (float("nan"),) * 100, 1.0)
    found = outcome(task, METHODS["top_k 1%"], 0, lossy, exact, gained=0.8)
    assert found.lost == pytest.approx(0.125)
    assert found.losses[0] == 2.0 and found.losses[-1] is None


def test_a_journal_goes_on_behind_a_line_that_was_cut_off(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.add(OUTCOME)
    with journal.path.open("a") as file:
        file.write('{"task": "wav\n')
    journal.add(replace(OUTCOME, method="exact", lost=0.0))
    assert set(journal.outcomes()) == {OUTCOME.key, ("waves", "exact", 0)}
    assert journal.outcomes()[OUTCOME.key] == OUTCOME


def test_the_table_says_who_diverged_and_how_many_small_tasks_lost_too_much() -> None:
    small = replace(OUTCOME, task="planted_sgd", lost=0.03)
    rows = table.report([OUTCOME, replace(OUTCOME, seed=1, lost=None), small]).rows
    assert [list(row) for row in rows] == [["top_k 1%", "diverged", "1 of 1, 3.0 (planted_sgd)"]]


def test_the_best_in_hindsight_is_the_fastest_that_kept_the_budget() -> None:
    of = speeds("waves", "50 Mbit/s")
    assert of.by_method["exact"] == 1.0 < of.by_method["bf16"] < of.by_method["quantized 4"]
    assert 0.5 < of.exposed < 1

    def lost(method: str, *each: float | None) -> list[Outcome]:
        return [replace(OUTCOME, method=method, seed=i, lost=one) for i, one in enumerate(each)]

    kept = [*lost("exact", 0.0), *lost("bf16", 0.001, 0.001), *lost("quantized 4", 0.0, 0.012)]
    others = [one for m in ("top_k 1%", "top_k 10%", "scaled_sign", "terngrad", "qsgd 4") for one in lost(m, 0.5)]
    trained = [*kept, *others, *lost("delayed", None)]
    assert best("waves", "50 Mbit/s", 0.01, kept) is None
    assert best("waves", "50 Mbit/s", 0.01, trained) == Best("quantized 4", of.by_method["quantized 4"])
    assert best("waves", "50 Mbit/s", 0.005, trained) == Best("bf16", of.by_method["bf16"])
    assert best("waves", "50 Mbit/s", 0.0, trained) == Best("exact", 1.0)


def test_choices_are_shown_beside_the_best_in_hindsight_and_rivals() -> None:
    of = speeds("waves", "50 Mbit/s")
    cell = Cell("waves", "50 Mbit/s", 0.01, 0, "rounded", 1.8, 1.8, 0.0, 0.004, 0.001, 0.001, "")
    methods = {"quantized 4": 0.002, "bf16": 0.001} | dict.fromkeys(list(METHODS)[-10:], 0.5)
    trained = [replace(OUTCOME, method=m, seed=seed, lost=lost) for seed in (0, 1) for m, lost in methods.items()]
    rival = RivalOutcome("waves", "L-GreCo", 0, 0.02, 0.001, dict.fromkeys(NETWORKS, 3.6))
    assert choices_report([cell], trained[: len(methods)]).rows[0][-2] == ""  # of the same seed
    report = choices_report([cell], trained, [rival])
    assert report.rows[0][-2] == f"{of.by_method['quantized 4']:.2f}, quantized 4"
    words = " ".join(report.notes)
    assert f"choices reach {1.8 / of.by_method['quantized 4']:.2f} of its speed" in words
    assert "L-GreCo keeps the budget in 0 of 1 cells; in 1 of these choices lose no more, and take 2.00 of" in words
