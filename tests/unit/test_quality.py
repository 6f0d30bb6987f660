"""What lossy plans cost: candidates, the guard, the names of methods, and what a user may ask for."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparWarning, SpecError
from autopar.quality.budget import HELD_BYTES, QualityBudget
from autopar.quality.candidates import (
    Candidate,
    Plans,
    begun_exactly,
    candidates,
    fastest,
    loses,
    predicted_s,
)
from autopar.quality.choice import Hopeful, worth_a_pilot
from autopar.quality.degradation import Loss
from autopar.quality.guard import LOOK_STEPS, LOST_STEPS, SETTLING_LOOKS, Guard
from autopar.quality.methods import method_of
from autopar.quality.verdict import NOT_SHOWN, REFUTED, SHOWN, Shown
from autopar.runtime.compiled import Settings
from autopar.runtime.optimizers.optimizer import context_for, optimizer_scope
from autopar.search import Budget, Prices, build_plan, price, search, training_step_s
from autopar.search.constraints import Constraints
from autopar.spec.plan import Fidelity
from autopar.strategies import Context
from autopar.training import Training
from tests.unit.synthetic import cpu_hosts, training_graph

CONTEXT = Context(4)
STEPS, STEPS_LONG = 1_000, 600
"""Of a training; and of those, too many for a variance to settle in."""


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("ddp", ""),
        ("ddp+bf16", "wire=bfloat16"),
        ("all_reduce(wire=float16)", "wire=float16"),
        ("quantized(bits=4,exchange=gather)+from_step=8", "quantized(bits=4)"),
        ("ddp+every=4", "all_reduce+every=4"),
        ("ddp+delay=1", "all_reduce+delay=1"),
    ],
)
def test_what_a_plan_loses_by_has_one_name(name: str, method: str) -> None:
    plan = planned(name)
    assert method_of(plan.groups, CONTEXT) == method
    if method.startswith("quantized"):
        mixed = (*plan.groups[:1], *planned("ddp").groups[1:])
        assert method_of(mixed, CONTEXT) == method
        assert method_of((*mixed, *planned("power_sgd").groups[-1:]), CONTEXT) == ""


def test_rounding_what_the_forward_pass_reads_is_called_otherwise_than_rounding_gradients_alone() -> None:
    first, *others = planned("ddp+bf16").groups
    for name, method in (
        ("row_sharded_table", "wire=bfloat16+forward"),
        ("sharded_parameters", "wire=bfloat16"),  # which sends parameters as they are
    ):
        group = first.model_copy(update={"strategy": name})
        assert method_of((group, *others), CONTEXT) == method


def planned(name: str) -> autopar.Plan:
    return build_plan(name, GRAPH, CLUSTER, CONTEXT)


def priced(plan: autopar.Plan) -> autopar.Plan:
    return price(plan, GRAPH, CLUSTER, CONTEXT)


def over(plan: autopar.Plan, steps: int) -> float:
    return training_step_s(plan, GRAPH, CLUSTER, CONTEXT, steps)


GRAPH = training_graph([(f"w{i}", (512, 512)) for i in range(8)])
CLUSTER = cpu_hosts(4, "50 Mbit/s")
PLANS = Plans(
    lambda fidelity: planned("ddp"), planned, lambda: planned("ddp"), priced, over, Prices(GRAPH, CLUSTER, CONTEXT)
)


def test_candidates_are_lossy_plans_that_are_worth_it_the_fastest_first() -> None:
    exact = planned("ddp")
    found = candidates(CONTEXT, PLANS, exact, STEPS)
    times = [c.training_step_s for c in found]
    assert times == sorted(times) and times[-1] <= 0.95 * predicted_s(exact)
    assert {"power_sgd", "top_k", "one_bit_adam", "weight_differences(bits=4,wire=bfloat16)", "ddp+every=16"} <= {
        c.name for c in found
    }
    assert all(any(loses(g, CONTEXT) for g in c.plan.groups) for c in found)
    few = fastest(found, 5)
    assert len(few) == 5 and len({c.name.partition("(")[0] for c in few}) == 5


def test_what_has_a_better_way_without_loss_goes_that_way() -> None:
    """Of a table, rows are sent; all its gradients in 4 bits would be far more."""
    model = nn.Sequential(nn.Embedding(300_000, 16), nn.Flatten(), nn.Linear(64, 1024), nn.Linear(1024, 512))
    batch = torch.zeros(1_000, 4, dtype=torch.int64), torch.zeros(1_000, dtype=torch.int64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = Training(model, batch, Settings(nn.functional.cross_entropy), optimizer, "step").graph()
    context = context_for(4, optimizer, optimizer_scope(optimizer), None, True, False)

    def searched(fidelity: Fidelity) -> autopar.Plan:
        return search(graph, CLUSTER, context, fidelity=fidelity, budget=Budget(1e9, 100))

    plans = Plans.of(graph, CLUSTER, context, None, Constraints(), searched)
    found = {c.name: c.plan.groups for c in candidates(context, plans, searched("rounded"), STEPS)}
    for name in ("quantized(bits=4)", "power_sgd"):
        [of_table] = [g for g in found[name] if g.members[0].name == "0.weight"]
        assert "row" in of_table.strategy and not loses(of_table, context)
        assert any(loses(g, context) for g in found[name])


def test_where_the_network_is_no_bottleneck_nothing_is_lost() -> None:
    cluster = cpu_hosts(4, "400 Gbit/s")

    def fast(name: str) -> autopar.Plan:
        return build_plan(name, GRAPH, cluster, CONTEXT)

    plans = replace(
        PLANS,
        build=fast,
        price=lambda plan: price(plan, GRAPH, cluster, CONTEXT),
        prices=Prices(GRAPH, cluster, CONTEXT),
    )
    assert candidates(CONTEXT, plans, fast("ddp"), STEPS) == []


def test_candidates_are_cut_into_the_groups_that_are_fastest_and_keep_their_period() -> None:
    """In one bucket, nothing is sent before the backward pass has ended."""
    found = {c.name: c for c in candidates(CONTEXT, PLANS, planned("ddp"), STEPS)}
    for name in ("quantized(bits=4)", "ddp+every=4"):
        one, plain = found[name], planned(name)
        assert one.step_time_s < predicted_s(plain)
        assert len(one.plan.groups) > len(plain.groups)
    assert {g.every for g in found["ddp+every=4"].plan.groups} <= {1, 4}


def test_steps_that_are_exact_before_count_in_a_candidates_time() -> None:
    """A tenth of all; under 1-bit Adam a fifth, and as many at least as the variance is an average over."""
    exact, context = planned("ddp"), replace(CONTEXT, plain_adam=True, variance_steps=STEPS // 4)
    found = {c.name: c for c in candidates(context, PLANS, exact, STEPS)}
    for name, part in (("scaled_sign", 0.1), ("one_bit_adam", 0.25)):
        one = found[name]
        mean_s = part * predicted_s(exact) + (1 - part) * one.step_time_s
        assert one.training_step_s == pytest.approx(mean_s, rel=0.05), name
        begun = begun_exactly(one.plan, STEPS, context)
        assert {g.from_step for g in begun.groups if loses(g, context)} == {part * STEPS}


@pytest.mark.parametrize("changed", [{"plain_adam": False}, {"variance_steps": STEPS_LONG}])
def test_one_bit_adam_is_offered_where_the_variance_of_adam_can_settle(changed: dict[str, Any]) -> None:
    context = replace(CONTEXT, **changed)

    def built(name: str) -> autopar.Plan:
        return build_plan(name, GRAPH, CLUSTER, context)

    found = candidates(context, replace(PLANS, build=built), planned("ddp"), STEPS)
    assert found and "one_bit_adam" not in {c.name for c in found}


def test_lossy_groups_begin_with_exact_steps_and_others_stay_as_they_are() -> None:
    plan = planned("power_sgd")
    mixed = plan.model_copy(update={"groups": (*plan.groups[:1], *planned("ddp").groups[1:])})
    begun = begun_exactly(mixed, 70, CONTEXT)
    assert [g.from_step for g in begun.groups] == [7] + [0] * (len(begun.groups) - 1)
    in_few, of_sgd = planned("quantized(bits=4)"), replace(CONTEXT, keeps_moments=False)
    at_once = [(planned("quantized"), CONTEXT), (in_few, of_sgd)]
    assert all(begun_exactly(plan, 70, context) == plan for plan, context in at_once)
    assert {g.from_step for g in begun_exactly(in_few, 70, CONTEXT).groups} == {7}


def guard(norms: Any = (), begins: int = 10) -> Guard:
    left = iter(norms)
    return Guard(begins, lambda: next(left), says=False)


def test_a_training_that_goes_well_is_let_go_on() -> None:
    steady = guard([1.0] * 1_000)
    for step in range(2_000):
        steady.look(step, 5 / (1 + step / 50) + 0.3 * math.sin(step))
    assert steady.reason == ""


def test_a_loss_that_rises_ends_what_is_lossy_and_exact_steps_do_not() -> None:
    early = guard([1.0] * 100, begins=1_000)
    for step in range(500):
        early.look(step, float(step))
    assert early.reason == ""
    late = guard([1.0] * 100)
    for step in range(400):
        late.look(step, 5.0 - 0.1 * step if step < 20 else 3.0 + 0.1 * (step - 20))
    assert "smoothed loss rose" in late.reason


@pytest.mark.parametrize("noise", [0.05, 0.1, 0.2, 0.5])
def test_a_loss_that_no_longer_falls_but_is_noisy_ends_nothing(noise: float) -> None:
    """As in fine-tuning, or behind a checkpoint that does not know of the guard."""
    draw = random.Random(0)
    for _ in range(20):
        flat = guard([1.0] * 200, begins=0)
        for step in range(2_000):
            flat.look(step, draw.gauss(1.0, noise))
        assert flat.reason == ""
        for step in range(2_000, 3_000):
            flat.look(step, draw.gauss(2.5, noise))
        assert "smoothed loss rose" in flat.reason


def test_a_guard_goes_on_where_it_was_saved() -> None:
    kept, resumed = guard([1.0] * 200), guard([1.0] * 200)
    for step in range(100):
        kept.look(step, 5.0 - 0.02 * step)
    resumed.load(kept.saved())
    for step in range(100, 300):
        for one in (kept, resumed):
            one.look(step, 3.0 + 0.05 * (step - 100))
    assert kept.reason and resumed.seen == kept.seen
    again = guard()
    again.load(kept.saved())
    assert again.reason == kept.reason
    again.load("")
    assert again.seen == guard().seen
    for other in ("{", "[1]", '{"losses": "many"}', 7, None):
        with pytest.raises(SpecError, match="leave 'guard' out"):
            again.read(other)


def test_a_lucky_first_batch_of_a_plan_that_is_lossy_at_once_ends_nothing() -> None:
    lucky = guard([1.0] * 100, begins=0)
    for step in range(500):
        lucky.look(step, 1.0 if step == 0 else 2.0 - 0.001 * step)
    assert lucky.reason == ""
    risen = guard([1.0] * 100, begins=0)
    for step in range(500):
        risen.look(step, 2.0 - 0.01 * step if step < 100 else 1.0 + 0.01 * (step - 100))
    assert "smoothed loss rose" in risen.reason


def test_a_loss_that_is_no_number_ends_it_where_it_was_one_before() -> None:
    lost = guard([1.0] * 10)
    for step in range(20):
        lost.look(step, 1.0)
    for step in range(20, 20 + LOST_STEPS - 1):
        lost.look(step, math.nan)
    assert lost.reason == ""
    lost.look(22, math.nan)
    assert "no number" in lost.reason


def test_residuals_that_grow_for_ever_end_it() -> None:
    growing = guard([2.0**i for i in range(100)])
    for step in range(10 + LOOK_STEPS * (SETTLING_LOOKS + 3)):
        growing.look(step, 1.0)
        assert growing.reason == ""
    for step in range(10 + LOOK_STEPS * (SETTLING_LOOKS + 3), 10 + LOOK_STEPS * (SETTLING_LOOKS + 4)):
        growing.look(step, 1.0)
    assert "grew" in growing.reason


def test_it_is_said_once() -> None:
    told = replace(guard([1.0] * 20), says=True)
    for step in range(60):
        told.look(step, 1.0)
    with pytest.warns(AutoparWarning, match="exact synchronization"):
        for step in range(60, 300):
            told.look(step, 3.0)


def test_what_cannot_be_asked_for_is_said() -> None:
    model = nn.Linear(4, 2)
    asked: dict[str, Any] = {"metric": lambda model: 0.0, "batches": [], "steps": 1_000}
    with pytest.raises(SpecError, match=r"expected a part of what training gains"):
        QualityBudget(1.0, **asked)
    with pytest.raises(SpecError, match="fewer than 500 steps"):
        QualityBudget(0.01, **{**asked, "steps": 400})
    budget = QualityBudget(0.01, **asked)
    with pytest.raises(SpecError, match="batches are empty"):
        budget.taken(3)
    assert replace(budget, batches=[1, 2]).taken(5) == [1, 2, 1, 2, 1]
    large = (torch.empty(HELD_BYTES // 100, dtype=torch.uint8, device="meta") for _ in range(1_000))
    assert len(set(map(id, replace(budget, batches=large).taken(500)))) == 100
    given: dict[str, Any] = {"example_inputs": torch.randn(2, 4), "budget": budget}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SpecError, match="needs the optimizer"):
        autopar.optimize(model, **given)
    with pytest.raises(SpecError, match="the strategy 'ddp' is given as well"):
        autopar.optimize(model, optimizer=optimizer, strategy="ddp", **given)
    with pytest.raises(SpecError, match="fidelity='rounded' is given as well"):
        autopar.optimize(model, optimizer=optimizer, fidelity="rounded", **given)


def chosen_plan() -> autopar.Plan:
    """As a quality budget leaves it."""
    from autopar.spec.quality import Considered, QualityChoice

    plan = planned("power_sgd(rank=2)")
    looked_at = (
        Considered(
            name=plan.name, step_time_s=0.1, expected=0.002, bound=0.008, lost=-0.001, metric=0.9, verdict="chosen"
        ),
        Considered(name="top_k", step_time_s=0.2, expected=None, bound=None, verdict="may lose more"),
    )
    choice = QualityChoice(budget=0.01, exact_step_s=0.5, considered=looked_at, chance=0.03, steps=640)
    return plan.model_copy(update={"quality": choice})


def test_a_plan_says_why_a_budget_took_it_also_when_it_comes_from_a_file(tmp_path: Path) -> None:
    plan = chosen_plan()
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.digest == plan.digest
    text = " ".join(loaded.explain().split())
    assert "at most 1.00% of what exact training gains; the fastest exact plan takes 500 ms" in text
    assert "expected to lose 0.20%, at most 0.80%, lost -0.10% in its pilot: chosen" in text
    assert "top_k: 200 ms, expected to lose everything, at most everything: may lose more" in text
    assert "640 steps were trained on copies" in text
    assert "quality" not in planned("ddp").model_dump()


def test_a_plan_that_was_edited_since_says_that_nothing_is_known(tmp_path: Path) -> None:
    plan = chosen_plan()
    group = plan.groups[0].model_copy(update={"options": {"rank": 1}})
    edited = plan.model_copy(update={"groups": (group, *plan.groups[1:])})
    assert "what it loses is not known" in " ".join(edited.explain().split())
    assert priced(edited).quality is None


def test_the_report_has_a_row_for_each_plan_that_was_looked_at(tmp_path: Path) -> None:
    from autopar.report import build_report

    page = build_report(chosen_plan(), tmp_path / "report.html").read_text()
    section = page[page.index('id="quality"') : page.index('id="groups"')]
    assert "at most 1.00% of what exact training gains" in section
    assert section.count("<tr") == 3 and "0.80%" in section and "may lose more" in section
    without = build_report(planned("ddp"), tmp_path / "other.html").read_text()
    assert 'id="quality"' not in without


def test_a_pilot_is_judged_by_what_chance_does_to_trainings_on_the_same_batches() -> None:
    """Those of other batches differ by a third; one that rounds stays close to exact training."""
    unsure = Loss(expected=0.001, bound=0.06)
    assert Shown(unsure, lost=0.001, chance=0.3, apart=0.02).verdict(0.01) == SHOWN
    assert Shown(unsure, lost=0.001, chance=0.3, apart=0.5).verdict(0.01) == NOT_SHOWN
    assert Shown(unsure, lost=-0.2, chance=0.1).verdict(0.01) == NOT_SHOWN, "it has gone elsewhere"
    assert Shown(unsure, lost=0.2, chance=0.1).verdict(0.01) == REFUTED
    assert Shown(unsure, lost=0.001, chance=math.inf, apart=0.0).verdict(0.01) == NOT_SHOWN
    sure = Loss(expected=0.001, bound=0.005)
    assert Shown(sure, lost=math.inf, chance=math.inf).verdict(0.01) == SHOWN, "exact pilots gained nothing"
    assert Shown(sure, lost=math.inf, chance=math.inf, is_number=False).verdict(0.01) == REFUTED


def test_pilots_are_given_to_plans_that_save_most_in_the_mean() -> None:
    def hopeful(name: str, step_s: float, bound: float, likely: tuple[float, ...]) -> Hopeful:
        return Hopeful(Candidate(name, planned("ddp"), step_s), Loss(likely[2], bound, likely), "", 0.1, 0.0, 1.0)

    bold = hopeful("bold", 0.1, 1.0, (0.02, 0.03, 0.05, 0.1, 0.5))
    even = hopeful("even", 0.3, 1.0, (0.001, 0.004, 0.009, 0.02, 0.1))
    mild = hopeful("mild", 0.4, 0.05, (0.0, 0.001, 0.002, 0.005, 0.009))
    sure = hopeful("sure", 0.6, 0.009, (0.0, 0.0, 0.001, 0.002, 0.005))
    slow = hopeful("slow", 0.7, 1.0, (0.0, 0.0, 0.001, 0.002, 0.5))
    exact = Candidate("exact", planned("ddp"), 1.0)
    assert worth_a_pilot([bold, even, mild, sure, slow], exact, 0.01, 0.005) == [even, mild, sure], (
        "the boldest never kept to it"
    )
    assert worth_a_pilot([bold, even, mild, slow], exact, 0.01, 0.005) == [even, mild]
    near = replace(slow, apart=0.01)
    assert worth_a_pilot([bold, even, mild, near], exact, 0.01, 0.2) == [near], "others are too far off to be shown"
    assert worth_a_pilot([even, mild, sure], exact, 0.01, math.inf) == [sure]
