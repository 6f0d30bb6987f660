"""What is said of measured step times that lie outside of the predicted interval: once, by one rank."""

from __future__ import annotations

import logging
import time

import pytest

from autopar.runtime.proofs.drift import SKIPPED, STEPS, StepTimes
from autopar.spec.plan import Prediction


def prediction(step_time_s: float) -> Prediction:
    return Prediction(
        step_time_s=step_time_s,
        compute_s=0.0,
        exposed_communication_s=0.0,
        wire_bytes=0,
        peak_memory_bytes=0,
        relative_error=0.6,
        provenance="guessed",
    )


def times(predicted_s: float | None, says: bool = True, steps: int = 2 * (SKIPPED + STEPS)) -> StepTimes:
    made = StepTimes(None if predicted_s is None else prediction(predicted_s), says, asynchronous=False)
    for _ in range(steps):
        with made.one():
            time.sleep(0.001)
    return made


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "autopar"):
        made = times(1e-5)
    (record,) = caplog.records
    assert made.median_s is not None and made.median_s >= 0.001
    said = record.getMessage()
    assert said.startswith("a step takes ") and "predicted to take 10.0 us, give or take 60 %" in said
    assert "autopar calibrate" in said


@pytest.mark.parametrize(("predicted_s", "says"), [(1e-5, False), (None, True)])
def test_nobody_else_says_it(caplog: pytest.LogCaptureFixture, predicted_s: float | None, says: bool) -> None:
    assert times(predicted_s, says).median_s is not None
    assert not caplog.records


def test_what_lies_within_the_interval_is_not_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    made = StepTimes(prediction(1.0), says=True, asynchronous=False)
    made._compare(1.59)
    made._compare(0.41)
    assert not caplog.records
    made._compare(1.61)
    made._compare(0.39)
    assert len(caplog.records) == 2


def test_too_few_steps_have_no_median() -> None:
    assert times(1e-5, steps=SKIPPED + STEPS - 1).median_s is None


def test_a_step_that_fails_does_not_count() -> None:
    made = StepTimes(None, says=True, asynchronous=False)
    for _ in range(SKIPPED + STEPS):
        with pytest.raises(RuntimeError), made.one():
            raise RuntimeError("no data")
    assert made.median_s is None
