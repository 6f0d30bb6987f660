"""The map from a probe to what a whole training loses: what it learns from lessons, and where its bounds hold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autopar.quality.degradation import FINEST, Lesson, Map, learn, shipped
from autopar.quality.methods import optimizer_of
from autopar.quality.probe import Probed
from autopar.runtime.optimizers.joint_optimizer import JointOptimizer


def probed(divergence: float) -> Probed:
    return Probed(divergence, 0.0, 0.0, 0.0)


def lessons(factor: float = 0.02, families: int = 10) -> list[Lesson]:
    """Of a law d^1.5 with noise, a tenth of which is three times as bad."""
    draw = np.random.default_rng(0)
    found = []
    for family in range(families):
        for divergence in (0.03, 0.1, 0.3, 0.6, 1.0, 1.5):
            noise = math.exp(0.2 * draw.normal()) * (3 if draw.random() < 0.1 else 1)
            found.append(Lesson(str(family), divergence, factor * divergence**1.5 * noise))
    return found


def test_a_map_finds_the_law_that_lessons_were_made_by() -> None:
    found = learn(lessons())
    assert 0.9 <= found.covered <= 1.0
    for divergence in (0.1, 0.3, 1.0):
        law = 0.02 * divergence**1.5
        assert found.of(probed(divergence)).expected == pytest.approx(law, rel=1.2)
        assert 1.3 * law < found.of(probed(divergence)).bound < 15 * law
    assert list(found.bound) == sorted(found.bound) and all(list(row) == sorted(row) for row in found.likely)


def test_a_method_that_lost_little_everywhere_is_vouched_for_where_it_diverges_as_it_did_there() -> None:
    mild = [Lesson(str(f), 0.5, 0.001 * (1 + f % 5), "mild") for f in range(20)]
    found = learn([*lessons(), *mild])
    assert found.of(probed(0.5), "mild").bound == pytest.approx(0.005)
    assert found.of(probed(0.5), "mild").chance_within(0.005) == 1.0
    assert found.of(probed(0.5), "mild").chance_within(0.003) in (0.5, 0.75)
    assert found.of(probed(0.5)).bound > 0.01 and found.of(probed(0.5)).chance_within(0.0001) == 0.0
    assert found.of(probed(1.5), "mild") == found.of(probed(1.5))
    assert learn([*lessons(), *mild[:12]]).of(probed(0.5), "mild") == learn([*lessons(), *mild[:12]]).of(probed(0.5))


def test_what_a_method_lost_under_one_optimizer_says_nothing_of_another() -> None:
    under = [
        Lesson(str(f), 0.5, 0.01 * (1 + (optimizer == "Adam")), "mild", optimizer)
        for f in range(20)
        for optimizer in ("SGD", "Adam")
    ]
    found, few = learn([*lessons(), *under]), learn([*lessons(), *under[:32]])
    assert found.of(probed(0.5), "mild", "SGD").bound == pytest.approx(0.01)
    assert found.of(probed(0.5), "mild", "Adam").bound == pytest.approx(0.02)
    assert found.of(probed(0.5), "mild").bound == found.of(probed(0.5), "mild", "RMSprop").bound == pytest.approx(0.02)
    assert few.of(probed(0.5), "mild", "SGD").bound == pytest.approx(0.01)
    assert learn([*lessons(), *under[:30]]).of(probed(0.5), "mild", "SGD").bound == pytest.approx(0.02)


def test_under_an_optimizer_that_few_trainings_were_made_with_the_worse_of_these_and_of_all_counts() -> None:
    """More trainings under the other one do not speak for it."""
    mild = [Lesson(str(f % 20), 0.5, 0.001, "mild", "SGD") for f in range(100)]
    bad = [Lesson(str(f), 0.5, 0.015, "mild", "Adam") for f in range(3)]
    found = learn([*lessons(), *mild, *bad])
    assert found.of(probed(0.5), "mild").bound == pytest.approx(0.001)
    assert found.of(probed(0.5), "mild", "SGD").bound == pytest.approx(0.001)
    assert found.of(probed(0.5), "mild", "Adam").bound == pytest.approx(0.015)


def test_nothing_is_vouched_for_beyond_what_rounding_loses_by_chance() -> None:
    mild = [Lesson(str(f), 0.5, 0.001, "mild") for f in range(20)]
    rounded = [Lesson(str(f), 0.02, 0.0002 * f, FINEST) for f in range(20)]
    found = learn([*lessons(), *mild, *rounded])
    assert found.floor == pytest.approx(0.0038)
    assert found.of(probed(0.5), "mild").bound == found.of(probed(0.001)).bound == found.floor
    assert found.of(probed(0.5), "mild").expected == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("of", "kind"),
    [
        ((torch.optim.SGD,), "SGD"),
        ((torch.optim.AdamW, torch.optim.NAdam), "Adam"),
        ((torch.optim.SGD, torch.optim.Adam), ""),
        ((torch.optim.RMSprop,), ""),
    ],
)
def test_optimizers_that_bounds_tell_apart(of: tuple[Any, ...], kind: str) -> None:
    each = [optimizer([nn.Parameter(torch.ones(1))], lr=0.1) for optimizer in of]
    assert optimizer_of(each[0] if len(each) == 1 else JointOptimizer(each)) == kind


def test_of_few_trainings_the_worst_is_the_bound() -> None:
    few = [*lessons(families=2), *(Lesson("2", 0.1, lost) for lost in (0.001, 0.2))]
    assert learn(few).of(probed(0.1)).bound == pytest.approx(0.2)


def test_a_training_that_diverged_lost_everything_and_no_more() -> None:
    diverged = [*lessons(), *(Lesson(str(f), 0.6, math.inf) for f in range(10))]
    assert learn(diverged).of(probed(0.6)).bound == 1.0
    assert learn(diverged).of(probed(0.03)).bound < 0.01


def test_a_probe_that_is_no_number_loses_everything() -> None:
    assert learn(lessons()).of(probed(math.inf)).expected == 1.0
    with pytest.raises(ValueError, match="at least two"):
        learn(lessons(families=1))


def test_a_map_that_is_saved_is_the_same(tmp_path: Path) -> None:
    found = learn(lessons())
    found.save(tmp_path / "map.json")
    assert Map.load((tmp_path / "map.json").read_text()) == found


def test_the_map_that_comes_with_autopar_holds_where_it_was_not_learned() -> None:
    found = shipped()
    assert found.families >= 10 and found.covered >= 0.9
    assert found.of(probed(0.005)).bound < 0.01 < found.of(probed(1.0)).bound
