"""What is learned from measured times: what it makes better, what it leaves alone, and how sure it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from autopar.cost_models.correction import CLIP, Correction, Floats, stacked
from autopar.cost_models.learning import LEAST_SAMPLES, learn
from autopar.errors import SpecError

NAMES = ("a", "b")


def _measured(n: int = 200, seed: int = 0) -> tuple[Floats, Floats, Floats, list[int]]:
    """Predictions that are too quick where the first feature is large; the second one says nothing."""
    draw = np.random.default_rng(seed)
    rows = draw.uniform(0, 1, (n, 2))
    predicted = draw.uniform(0.1, 1, n)
    measured = predicted * np.exp(0.25 * (rows[:, 0] > 0.5) + draw.normal(0, 0.01, n))
    return rows, predicted, measured, [i % 10 for i in range(n)]


@pytest.fixture(scope="module")
def learned() -> Correction:
    rows, predicted, measured, choices = _measured()
    return learn(NAMES, rows, predicted, measured, choices)


def test_what_is_predicted_wrongly_is_corrected(learned: Correction) -> None:
    rows, predicted, measured, _ = _measured(seed=1)
    corrected = predicted * np.exp(learned.residual(rows))
    assert np.abs(predicted / measured - 1).mean() > 0.08
    assert np.abs(corrected / measured - 1).mean() < 0.02
    assert learned.belief == 1.0
    off = np.abs(np.log(measured / corrected))
    assert 0.8 <= (off <= learned.interval(rows)).mean() <= 1.0


def test_far_from_what_it_knows_it_says_nothing_and_is_less_sure(learned: Correction) -> None:
    near, far = np.array([[0.9, 0.5]]), np.array([[5.0, 0.5]])
    assert learned.residual(near)[0] == pytest.approx(0.25, abs=0.05)
    assert abs(learned.residual(far)[0]) < 0.01
    assert learned.interval(far)[0] > 2 * learned.interval(near)[0]


def test_noise_is_not_believed() -> None:
    rows, predicted, _, choices = _measured()
    noise = np.random.default_rng(5).normal(0, 0.2, len(rows))
    found = learn(NAMES, rows, predicted, predicted * np.exp(noise), choices)
    assert found.belief <= 0.25


def test_a_residual_is_clipped() -> None:
    rows, predicted, _, choices = _measured()
    found = learn(NAMES, rows, predicted, 10 * predicted, choices)
    assert found.residual(rows) == pytest.approx(CLIP)


def test_it_is_read_as_it_was_written(learned: Correction, tmp_path: Path) -> None:
    rows = _measured(seed=2)[0]
    learned.save(tmp_path / "correction.json")
    again = Correction.load(tmp_path / "correction.json")
    assert again == learned
    assert (again.residual(rows) == learned.residual(rows)).all()
    (tmp_path / "other.json").write_text('{"members": []}')
    with pytest.raises(SpecError, match=r"other\.json cannot be read"):
        Correction.load(tmp_path / "other.json")


def test_trees_are_those_of_scikit_learn() -> None:
    """Taken apart, an ensemble says what it said, but for the digits that are not kept."""
    from sklearn.ensemble import GradientBoostingRegressor

    from autopar.cost_models.learning import _member

    rows, predicted, measured, _ = _measured()
    booster = GradientBoostingRegressor(n_estimators=20, loss="huber", random_state=0)
    booster.fit(rows, np.log(measured / predicted))
    assert stacked([_member(booster)], rows)[0] == pytest.approx(booster.predict(rows), abs=2e-5)


def test_too_little_to_learn_from_is_said() -> None:
    rows, predicted, measured, choices = _measured(LEAST_SAMPLES - 1)
    with pytest.raises(ValueError, match=f"needs {LEAST_SAMPLES} measured times, got {LEAST_SAMPLES - 1}"):
        learn(NAMES, rows, predicted, measured, choices)
