"""What rounds say of step times: exact where nothing disturbs, compared block by block, sure of what was seen often."""

from __future__ import annotations

import math
import random
from collections.abc import Hashable

import numpy as np
import pytest

from autopar.trials.standings import BLOCK, BLOCKS, LOADED, Standings


def test_times_are_those_of_the_first_round_whatever_slows_the_machine_down_later() -> None:
    seen = Standings()
    seen.add({"a": [1.0, 1.2, 0.9, 1.1], "b": [2.0, 2.4, 1.8, 2.2]})
    seen.add({"a": [1.5] * 4, "c": [0.75] * 4})  # a takes 1.4 times what it took: the machine is slower
    first_s = math.prod([1.0, 1.2, 0.9, 1.1]) ** 0.25
    assert seen.seconds("a") == pytest.approx(first_s, rel=2e-3)
    assert seen.seconds("b") == pytest.approx(2 * first_s, rel=2e-3)
    assert seen.seconds("c") == pytest.approx(first_s / 2, rel=2e-3)


def test_what_slows_whole_blocks_down_is_no_noise() -> None:
    calm, disturbed = Standings(), Standings()
    calm.add({"a": [1.0, 3.0, 1.0, 3.0], "b": [1.0, 3.0, 1.0, 3.0]})
    disturbed.add({"a": [1.0, 3.0, 1.0, 3.0], "b": [3.0, 1.0, 3.0, 1.0]})
    assert calm.block_deviation < BLOCK < 0.5 < disturbed.block_deviation
    assert calm.lead("b", "a").deviation < 0.03 < 0.3 < disturbed.lead("b", "a").deviation


def test_a_plan_that_was_soon_known_to_be_slow_says_nothing_of_noise() -> None:
    with_it, without = Standings(), Standings()
    both: dict[Hashable, list[float]] = {"a": [1.0, 3.0, 1.1, 3.0], "b": [1.0, 3.1, 1.0, 3.0]}
    with_it.add({**both, "slow": [5.0]})
    without.add(both)
    assert with_it.block_deviation == without.block_deviation > 0
    assert with_it.seconds("slow") == pytest.approx(5 * with_it.seconds("a"), rel=0.05)


def test_a_plan_measured_twice_is_known_better() -> None:
    once, twice = Standings(), Standings()
    for _ in range(2):
        twice.add({"a": [1.0] * 4, "b": [1.01] * 4})
    once.add({"a": [1.0] * 4, "b": [1.01] * 4})
    fresh = 2 * (LOADED**2 + once.block_deviation**2 / BLOCKS)
    assert once.lead("b", "a").deviation == pytest.approx(math.sqrt(fresh), rel=1e-3)
    assert twice.lead("b", "a").deviation < 0.75 * once.lead("b", "a").deviation
    assert twice.lead("b", "a").after_one_more < once.lead("b", "a").after_one_more < once.lead("b", "a").deviation
    assert once.lead("b", "a").mean == pytest.approx(math.log(1.01), rel=1e-6)


def test_a_round_without_a_plan_of_an_earlier_one_counts_as_if_the_machine_were_alike() -> None:
    seen = Standings()
    seen.add({"a": [1.0] * 4})
    seen.add({"b": [1.1] * 4})
    assert seen.seconds("b") == pytest.approx(1.1, rel=0.02)
    assert seen.lead("b", "a").deviation > 0.1


def test_intervals_hold_what_they_say() -> None:
    """Of a hundred times three rounds of plans whose times are drawn, with a machine that drifts."""
    draw, inside, of = random.Random(0), 0, 0
    for _ in range(100):
        true = {p: math.exp(draw.gauss(0, 0.1)) for p in "abcdef"}
        seen = Standings()
        for members in ("abcd", "aefb", "caed"):
            drift = [draw.gauss(0, 0.1) for _ in range(4)]
            loaded = {p: draw.gauss(0, LOADED) for p in members}
            seen.add({p: [true[p] * math.exp(d + loaded[p] + draw.gauss(0, BLOCK)) for d in drift] for p in members})
        for p in "bcdef":
            lead = seen.lead(p, "a")
            inside += abs(lead.mean - math.log(true[p] / true["a"])) <= 1.645 * lead.deviation
            of += 1
    assert 0.87 <= inside / of <= 0.93


def test_what_was_expected_counts_as_much_as_it_is_sure() -> None:
    """Two plans that were predicted alike, and one of which took 3 % less."""
    seen = Standings()
    seen.add({"a": [1.0] * 4, "b": [0.97] * 4})
    alike, unlike = np.full((2, 2), 1.0) + np.eye(2) * 1e-4, np.eye(2)
    expected: dict[Hashable, float] = {"a": 0.0, "b": 0.0}
    measured = seen.lead("b", "a")
    lead = seen.beside(expected, alike).lead("b", "a")
    weight = 2e-4 / (2e-4 + measured.deviation**2)
    assert lead.mean == pytest.approx(weight * measured.mean, rel=1e-3)
    assert lead.deviation == pytest.approx(math.sqrt(2e-4 * (1 - weight)), rel=1e-3)
    assert seen.beside(expected, unlike).lead("b", "a").mean == pytest.approx(measured.mean, rel=2e-3)
    slower = seen.beside({"a": 0.0, "b": 0.05}, alike).lead("b", "a")
    assert slower.mean == pytest.approx(weight * measured.mean + (1 - weight) * 0.05, rel=1e-3)
