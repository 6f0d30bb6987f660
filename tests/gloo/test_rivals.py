"""Others' adaptive compression: which rates their rules decide, and that trainings go on under them."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.budget.hindsight import built
from benchmarks.budget.rival_trainings import PARTS, train
from benchmarks.budget.rivals import RIVALS, SMALL, accordion, l_greco, legacy, with_rates
from benchmarks.budget.tasks import TASKS
from tests.gloo.ranks import run_ranks


def test_l_greco_gives_rank_to_layers_that_need_it() -> None:
    draw = torch.Generator().manual_seed(0)
    thin = torch.randn(40, 2, generator=draw) @ torch.randn(2, 30, generator=draw)
    full = torch.randn(40, 30, generator=draw)
    now = {"thin": thin, "full": full, "bias": torch.ones(40)}
    ranks = l_greco(now, None, 0.5)
    assert ranks == {"thin": 2, "full": 4}  # a rank more of the full one would send more
    assert l_greco({"a": torch.zeros(3, 3)}, None, 0.5) == {"a": 2}
    # What a layer with a steep spectrum may lose is what another one loses less.
    steep = torch.diag(torch.tensor([10.0, 9, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3]))
    alike = torch.diag(torch.tensor([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]))
    found = l_greco({"steep": steep, "alike": alike}, None, 0.5)
    assert found["steep"] == 2 and found["alike"] in (4, 5)


def test_accordion_sends_more_where_norms_change() -> None:
    now = {"same": torch.ones(4, 4), "grown": 2 * torch.ones(4, 4)}
    assert set(accordion(now, None, 0.1).values()) == {4.0}
    assert accordion(now, dict.fromkeys(now, torch.ones(4, 4)), 0.2) == {"same": 1.0, "grown": 4.0}


def test_legacy_sends_more_of_small_layers_and_early() -> None:
    now = {"small": torch.ones(SMALL - 1), "large": torch.ones(SMALL)}
    assert legacy(now, None, 0.4) == {"small": 0.2, "large": 0.02}
    assert legacy(now, None, 0.5) == {"small": 0.1, "large": 0.01}


def test_groups_are_divided_by_rates() -> None:
    plan = built("residual_sgd", "power_sgd(rank=4)")
    names = [m.name for g in plan.groups for m in g.members]
    rates = {n: 1.0 + i % 2 for i, n in enumerate(names[1:])}
    divided = with_rates(plan, "rank", rates)
    found = {m.name: g.options["rank"] for g in divided.groups for m in g.members}
    assert found == {names[0]: 4, **{n: int(r) for n, r in rates.items()}}


def test_a_training_goes_on_under_each_plan() -> None:
    first, second = run_ranks(2, _trained)
    assert first == second
    losses, strategies = first
    assert strategies[0] == ["all_reduce"] and set(map(tuple, strategies[1:])) == {("top_k",)}
    assert len(losses) == 20 and losses[-1] < losses[0]


def _trained(rank: int, ranks: int) -> tuple[list[float], list[list[str]]]:
    task = replace(TASKS["residual_sgd"], steps=2 * PARTS, test_samples=1_000)
    trained, plans = train(task, RIVALS["LEGACY"], 0, rank, ranks)
    return list(trained.losses), [sorted({g.strategy for g in plan.groups}) for plan in plans]
