"""Which plans are worth a trial, with numbers worked out by hand."""

from __future__ import annotations

import pytest

from autopar.trials.decide import NEGLIGIBLE, expected_saving_s, worth_trying

# E[max(0, 1 - exp(x))] of x with mean 0 and deviation 0.1: 1/2 - exp(0.005) * Phi(-0.1) = 0.5 - 1.0050125 * 0.4601722
EVEN = 0.0375213


def test_plans_predicted_alike_save_what_their_uncertainty_promises() -> None:
    assert expected_saving_s(0.1, 0.1, 0.1) == pytest.approx(0.1 * EVEN, rel=1e-5)


def test_what_is_certain_saves_the_difference_or_nothing() -> None:
    assert expected_saving_s(0.1, 0.08, 0.0) == pytest.approx(0.02)
    assert expected_saving_s(0.1, 0.12, 0.0) == 0.0
    assert expected_saving_s(0.1, 0.3, 0.014) == pytest.approx(0.0, abs=1e-12)


def test_a_trial_is_taken_only_where_it_pays_over_the_training() -> None:
    saving_s = expected_saving_s(0.1, 0.1, 0.1)  # 3.75 ms: 56.3 s in 15,000 steps, 63.8 s in 17,000
    assert worth_trying([saving_s], 0.1, 15_000, trial_s=30.0) == []
    assert worth_trying([saving_s], 0.1, 17_000, trial_s=30.0) == [0]
    assert worth_trying([saving_s], 0.1, 15_000, trial_s=30.0, beside=0) == [0]


def test_those_that_save_most_come_first_and_further_ones_pay_for_themselves_alone() -> None:
    # 3.75 ms a step are 45 s in 12,000 steps: less than two trials of 30 s, and more than one.
    assert worth_trying([1e-6, 3.75e-3, 9e-3], 0.1, 12_000, trial_s=30.0) == [2, 1]
    assert worth_trying([1e-6, 3.75e-3], 0.1, 12_000, trial_s=30.0) == []


def test_without_the_length_of_the_training_all_are_taken_of_which_something_is_expected() -> None:
    savings_s = [expected_saving_s(0.1, other_s, 0.1) for other_s in (0.3, 0.1)]
    assert worth_trying(savings_s, 0.1, None, trial_s=1e9) == [1]
    assert savings_s[0] < NEGLIGIBLE * 0.1
