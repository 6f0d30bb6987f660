"""The figures that say how good predictions are, and what comes out on published measurements."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.fidelity import autodist, nccl, vtrain
from benchmarks.fidelity.baselines import METHODS, linear_ranker
from benchmarks.fidelity.figures import Choices, Quality, grouped
from benchmarks.harness import Report


def test_regret_is_what_the_choice_costs() -> None:
    choices = Choices(np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.5, 1.2, 1.0, 2.0]))
    assert choices.regret() == pytest.approx(0.5)
    assert choices.regret(2) == pytest.approx(0.2)
    assert choices.regret(3) == 0.0


def test_order_is_looked_at_where_there_is_one() -> None:
    assert Choices(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 4.0])).tau() == 1.0
    assert Choices(np.array([3.0, 2.0, 1.0]), np.array([1.0, 2.0, 4.0])).tau() == -1.0
    assert Choices(np.array([1.0]), np.array([1.0])).tau() is None
    # The first two differ by 1 %: noise may have decided between them.
    assert Choices(np.array([2.0, 1.0, 3.0]), np.array([1.0, 1.01, 4.0])).pairs() == (2, 2)


def test_figures_are_taken_within_choices() -> None:
    """Times of two models differ tenfold; within each, the order is wrong."""
    predicted, measured = np.array([1.0, 2.0, 3.0, 10.0, 20.0, 30.0]), np.array([3.0, 2.0, 1.0, 30.0, 20.0, 10.0])
    choices = ["a", "a", "a", "b", "b", "b"]
    quality = Quality.of(predicted, measured, choices)
    assert (quality.tau, quality.pairs) == (-1.0, 0.0)
    assert (quality.regret, quality.worst_regret, quality.regret_of_3) == (2.0, 2.0, 0.0)
    assert quality.mape == pytest.approx((2 / 3 + 0 + 2) / 3)
    assert quality.bias == pytest.approx((-2 / 3 + 0 + 2) / 3)
    assert set(grouped(predicted, measured, choices, choices)) == {"a", "b"}


def test_a_plan_that_was_measured_again_is_one_of_its_choice() -> None:
    """Nobody chooses between a plan and itself: its two times have no order."""
    predicted, measured = np.array([1.0, 1.0, 2.0, 3.0]), np.array([1.1, 0.9, 2.0, 3.0])
    once, twice = (Quality.of(predicted, measured, "aaaa", plans) for plans in ("0123", "0023"))
    assert once.tau is not None and once.tau < 1.0 and twice.tau == 1.0
    assert twice.count == 4 and twice.mape == pytest.approx((1 / 11 + 1 / 9) / 4)
    assert Quality.of(predicted[2:], measured[2:], "aa").tau is None  # two have hardly an order


def test_published_tables_are_whole() -> None:
    assert sum(map(len, nccl.measured().values())) == 14336
    assert len(vtrain.measured()) == 1440
    assert {b.model for b in autodist.measured()} == set(autodist.PARAMETERS)


@pytest.mark.parametrize("part", [nccl, autodist], ids=["nccl", "autodist"])
def test_what_was_not_measured_is_predicted_from_what_was(part: object) -> None:
    report = Report(name="fidelity", title="", columns=("data",))
    part.fill(report)  # type: ignore[attr-defined]
    assert report.targets and all(t.met for t in report.targets), [str(t) for t in report.targets]


def test_baselines_learn_what_there_is_to_learn() -> None:
    """Times are the product of two features' exponentials, and of what each choice has for itself."""
    draw = np.random.default_rng(0)
    choices = [i // 6 for i in range(240)]
    rows = draw.normal(size=(240, 3))
    own = draw.normal(size=40)[choices]
    truth = np.exp(rows[:, 1] - 0.5 * rows[:, 2] + own)
    names = ("log step", "a", "b")
    for name, (method, is_time) in METHODS.items():
        predicted = method(names, rows[:180], truth[:180], choices[:180])(rows[180:])
        found = Quality.of(predicted, truth[180:], choices[180:])
        assert found.tau is not None and found.tau > 0.6, name
        assert not is_time or found.mape < 2.0, name


def test_a_ranker_that_has_seen_no_difference_ranks_nothing() -> None:
    predict = linear_ranker(("log step", "a"), np.ones((4, 2)), np.ones(4), [0, 0, 1, 1])
    assert set(predict(np.ones((3, 2)))) == {1.0}
