"""Measured step times beside the predicted one: where they lie apart, that is said once."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from autopar.formatting import duration
from autopar.spec.plan import Prediction

SKIPPED, STEPS = 3, 20
"""The first ones warm up; then the median of so many is looked at."""

_ADVICE = {
    "measured": "Something is other than it was when it was measured; `autopar calibrate` measures it again",
    "looked up": "`autopar calibrate` measures what the prediction took from data sheets",
    "guessed": "`autopar calibrate` measures what the prediction had to guess",
}

_log = logging.getLogger("autopar")


class StepTimes:
    """Of a program's steps, on one rank."""

    def __init__(self, prediction: Prediction | None, says: bool, asynchronous: bool) -> None:
        """`says`: whether this rank is the one that tells the user. `asynchronous`: whether a step's call returns
        before the device is done; then a step lasts from one return to the next."""
        self.prediction = prediction
        self._says = says
        self._asynchronous = asynchronous
        self._ended_at: float | None = None
        self._seconds: list[float] = []

    @property
    def median_s(self) -> float | None:
        """Of the steps that were looked at; None before there are enough."""
        return median(self._seconds[SKIPPED:]) if len(self._seconds) >= SKIPPED + STEPS else None

    @contextmanager
    def one(self) -> Iterator[None]:
        """Around a step. One that fails does not count."""
        began_at = time.perf_counter()
        if self._asynchronous and self._ended_at is not None:
            began_at = self._ended_at
        yield
        self._ended_at = time.perf_counter()
        if len(self._seconds) < SKIPPED + STEPS:
            self._seconds.append(self._ended_at - began_at)
            if self._says and self.median_s is not None:
                self._compare(self.median_s)

    def _compare(self, found_s: float) -> None:
        said = self.prediction
        if said is None or abs(found_s / said.step_time_s - 1) <= said.relative_error:
            return
        _log.warning(
            "a step takes %s (the median of %d), and was predicted to take %s, give or take %.0f %%. %s.",
            duration(found_s),
            STEPS,
            duration(said.step_time_s),
            100 * said.relative_error,
            _ADVICE[said.provenance],
        )
