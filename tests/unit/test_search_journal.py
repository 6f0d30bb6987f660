"""The journal: searches that were cut short, at any byte, end as they would have ended."""

from __future__ import annotations

import json
import os
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.cost_models import AnalyticCostModel, CorrectedCostModel, Observation, optimizer_cost
from autopar.errors import AutoparWarning, SpecError
from autopar.ir.training_graph import TrainingGraph
from autopar.search import Budget, Evaluator, Journal, Problem, SearchResult, search_result
from autopar.search.evaluate import CHECKED
from autopar.search.journal import known
from autopar.spec.cluster import ClusterSpec
from autopar.spec.lines import read_lines as read
from autopar.spec.plan import ParameterSlice, SyncGroup
from autopar.spec.topology import topology_of
from autopar.strategies import Context
from autopar.strategies.lowering import lower_plan
from tests.unit.synthetic import MLP, cpu_hosts, training_graph

CLUSTER = cpu_hosts(3, "50 Mbit/s")
GRAPH = training_graph()


def run(
    journal: Path | None,
    resume: bool = False,
    seed: int = 0,
    evaluations: int = 30,
    graph: TrainingGraph = GRAPH,
    cluster: ClusterSpec = CLUSTER,
    time_s: float = 1e9,
    **given: object,
) -> tuple[SearchResult, int]:
    """The result, and how many plans were priced anew."""
    priced = 0
    model = AnalyticCostModel(optimizer_cost("SGD", {"momentum": 0.0}))
    predict = model.predict

    def counted(*args: object, **more: object) -> object:
        nonlocal priced
        priced += 1
        return predict(*args, **more)  # type: ignore[arg-type]

    model.predict = counted  # type: ignore[method-assign,assignment]
    budget = Budget(time_s=time_s, evaluations=evaluations)
    result = search_result(
        graph, cluster, Context(cluster.world_size), budget=budget, seed=seed, journal=journal, resume=resume,
        **{"cost_model": model, **given},  # type: ignore[arg-type]
    )  # fmt: skip
    return result, priced


def outcome(result: SearchResult) -> list[object]:
    return [result.plan, *((c.name, c.groups, c.estimate) for c in result.candidates)]


def test_a_search_that_was_cut_at_any_byte_ends_the_same(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    straight, priced = run(whole)
    text, draw = whole.read_bytes(), random.Random(0)
    for at in sorted(draw.randrange(len(text) + 1) for _ in range(20)):
        journal = tmp_path / f"{at}.jsonl"
        journal.write_bytes(text[:at])
        resumed, anew = run(journal, resume=True)
        assert outcome(resumed) == outcome(straight)
        lines = text[:at].count(b"\n")
        checked = anew - (priced - max(0, lines - 1))
        assert 0 <= checked <= 16, "what was recorded is not priced again, but for some to see that prices are the same"
        kept = known(journal, 3, **next(iter(read(whole)))["search"])
        assert len(kept) == len(straight.candidates), "what was priced anew is recorded"


def test_without_resume_all_is_priced_again(tmp_path: Path) -> None:
    journal = tmp_path / "j.jsonl"
    _, first = run(journal)
    _, second = run(journal)
    assert first == second


def test_other_searches_in_the_journal_are_left_alone(tmp_path: Path) -> None:
    journal = tmp_path / "j.jsonl"
    _, first = run(journal, seed=1)
    _, second = run(journal, seed=2)
    _, third = run(journal, resume=True, seed=2)
    assert third < 0.5 * first < second


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"seed": 2}, "The nearest one has seed 1 where this one has 2. Leave"),
        ({"seed": 1, "evaluations": 20}, "has evaluations 30 where this one has 20. Leave"),
        ({"seed": 1, "cluster": cpu_hosts(3, "60 Mbit/s")}, "has another cluster. Leave"),
        ({"seed": 1, "graph": training_graph(MLP[:4])}, "has another model. Leave"),
    ],
)
def test_the_journal_of_another_search_is_refused_with_what_differs(
    tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    journal = tmp_path / "j.jsonl"
    run(journal, seed=1)
    before = journal.read_bytes()
    with pytest.raises(SpecError, match=said):
        run(journal, resume=True, **given)
    assert journal.read_bytes() == before


def test_a_search_that_was_cut_before_it_computed_anything_again_goes_on(tmp_path: Path) -> None:
    journal = tmp_path / "j.jsonl"
    run(journal)
    run(journal, resume=True, graph=replace(GRAPH, recompute="full"))


def test_two_searches_write_to_one_journal(tmp_path: Path) -> None:
    journal = tmp_path / "j.jsonl"
    alone = [run(None, seed=seed) for seed in (1, 2)]
    threads = [threading.Thread(target=run, args=(journal,), kwargs={"seed": seed}) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    again = [run(journal, resume=True, seed=seed) for seed in (1, 2)]
    assert [outcome(result) for result, _ in again] == [outcome(result) for result, _ in alone]
    for (_, anew), (result, priced) in zip(again, alone, strict=True):
        assert 0 < anew - (priced - len(result.candidates)) <= 16, "some, to see that prices are the same"


def test_half_a_line_of_a_killed_search_costs_no_other_line(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path, seed=1) as one:
        with path.open("ab") as killed:
            killed.write(b'{"of":"dead","candi')
        one.write(run(None, evaluations=1)[0].candidates[0], 0.0)
    assert [sorted(record)[0] for record in read(path)] == ["of", "by_rank"]


def test_lines_that_a_stranger_wrote_are_passed_over(tmp_path: Path) -> None:
    """Numbers of other ranks, more of them than memory holds, or none; and a pipe, which is no journal to read."""
    journal = tmp_path / "j.jsonl"
    straight, _ = run(journal)
    rows = list(read(journal))
    header = rows[0]["search"]
    strange: list[object] = [[[1, 10**13]], [[1, 2]], [[1, -1], [1, 4]], "[]", [[1]], None]
    for row, runs in zip(rows[1:], strange, strict=False):
        row["by_rank"]["sent_bytes"] = runs
    journal.write_text("\n".join(map(json.dumps, rows)) + "\n")
    kept = known(journal, 3, **header)
    assert len(kept) == len(straight.candidates) - len(strange)
    assert outcome(run(journal, resume=True)[0]) == outcome(straight)
    os.mkfifo(pipe := tmp_path / "pipe")
    assert known(pipe, 3, **header) == []


def test_prices_that_changed_are_not_mixed(tmp_path: Path) -> None:
    journal = tmp_path / "j.jsonl"
    run(journal)
    with pytest.raises(SpecError, match="has another price today than there"):
        run(journal, resume=True, cost_model=AnalyticCostModel(optimizer_cost("AdamW", {})))


def test_the_chosen_plan_has_the_price_of_today(tmp_path: Path) -> None:
    """One wrong digit in any line would win."""
    journal = tmp_path / "j.jsonl"
    run(journal)
    header, *rows = read(journal)
    every = max(1, len(rows) // CHECKED)
    rows[every + 1]["prediction"]["step_time_s"] /= 10
    assert (every + 1) % every, "a line that is not looked at as the search begins"
    journal.write_text("\n".join(map(json.dumps, [header, *rows])) + "\n")
    with pytest.raises(SpecError, match=r"has another price today than there.* or the journal was changed"):
        run(journal, resume=True)


def test_a_journal_that_has_lost_its_first_line_is_refused(tmp_path: Path) -> None:
    journal = tmp_path / "j.jsonl"
    result, _ = run(journal)
    before = b"".join(journal.read_bytes().splitlines(keepends=True)[1:])
    journal.write_bytes(before)
    said = f"j.jsonl: .*it holds {len(result.candidates)} plans of a search whose first line.* is lost. Leave --resume"
    with pytest.raises(SpecError, match=said):
        run(journal, resume=True)
    assert journal.read_bytes() == before


def test_a_search_whose_time_is_up_keeps_the_best_plan_of_its_journal(tmp_path: Path) -> None:
    """A seed is lost from the journal, and the other plans take longer than there is time."""
    journal, cluster = tmp_path / "j.jsonl", cpu_hosts(2, devices="2 x cpu")
    run(journal, cluster=cluster, evaluations=150, cost_model=AnalyticCostModel())
    header, *rows = read(journal)
    del rows[3]
    for i, row in enumerate(rows, 1):
        row["elapsed_s"] = 45 * i / len(rows)
    journal.write_text("\n".join(map(json.dumps, [header, *rows])) + "\n")
    resumed, _ = run(journal, resume=True, cluster=cluster, evaluations=150, time_s=50, cost_model=AnalyticCostModel())
    best_s = min(row["prediction"]["step_time_s"] for row in rows if not row["overflow_bytes"])
    assert min(c.step_time_s for c in resumed.candidates) <= best_s
    assert resumed.chosen.step_time_s <= 1.005 * best_s


def test_a_recorded_plan_takes_the_time_that_it_took() -> None:
    """Others take none of the record's, those that cannot be used included."""
    context = Context(3, elementwise_update=False).on(CLUSTER)
    of = Problem(GRAPH, CLUSTER, topology_of(CLUSTER), context, AnalyticCostModel())
    evaluate, recorded = (Evaluator(of, Budget(time_s=1e9)) for _ in range(2))
    members = tuple(ParameterSlice(name=p.name) for p in GRAPH.parameters)
    one, two, unusable = (
        (SyncGroup(strategy=name, members=members),)
        for name in ("all_reduce", "parameter_server", "partitioned_parameter_server")
    )
    first, second = recorded("one", one), recorded("two", two)
    assert first is not None and second is not None
    evaluate.resume([(first, 1000.0), (second, 4000.0)])
    assert evaluate("unusable", unusable) is None and evaluate.elapsed_s < 1000
    assert evaluate("two", two) is not None and 3000 <= evaluate.elapsed_s < 4000
    assert evaluate.unasked == [first]
    assert evaluate("one", one) is not None and 4000 <= evaluate.elapsed_s < 5000
    assert evaluate.unasked == []


def test_a_search_that_trials_have_taught_since_begins_anew(tmp_path: Path) -> None:
    journal = tmp_path / "j.jsonl"
    model = CorrectedCostModel(AnalyticCostModel())
    ignorant, _ = run(journal, cost_model=model)
    program = lower_plan(ignorant.chosen.groups, GRAPH, Context(3).on(CLUSTER))
    model.fit([Observation(GRAPH, program, topology_of(CLUSTER), 2 * ignorant.chosen.step_time_s)])
    with pytest.warns(AutoparWarning, match="trials have changed what plans are predicted to take"):
        taught, _ = run(journal, resume=True, cost_model=model)
    assert taught.chosen.step_time_s > ignorant.chosen.step_time_s
    again, _ = run(journal, resume=True, cost_model=model)
    assert outcome(again) == outcome(taught)


def test_a_search_that_is_stopped_keeps_the_best_so_far(tmp_path: Path) -> None:
    budget = Budget(time_s=1e9, evaluations=10**6)
    priced = 0

    def progress(what: str, count: int, best_s: float) -> None:
        nonlocal priced
        priced = count
        if count == 20:
            budget.stop.set()

    result = search_result(GRAPH, CLUSTER, Context(3), budget=budget, progress=progress)
    assert priced == 20
    assert result.plan.prediction is not None
    assert result.plan.prediction.step_time_s <= 1.005 * min(c.step_time_s for c in result.candidates)
