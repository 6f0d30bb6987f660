"""Which plans are worth a trial: what measuring one is expected to save, against what a trial costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost_models.own_trials import Z
from autopar.search import Candidate

NEGLIGIBLE = 0.002
"""Part of a step: where measuring a plan is expected to save less, and nothing is said of how long the training will
be, the plan is not measured."""


@dataclass(frozen=True)
class Time:
    """A step time of which a median and a standard deviation, in logarithms, are known."""

    seconds: float
    deviation: float

    @classmethod
    def predicted(cls, candidate: Candidate) -> Time:
        """As the stated interval of 90 % has it."""
        return cls(candidate.step_time_s, math.log1p(candidate.estimate.relative_error) / Z)


def expected_saving_s(best: Time, other: Time) -> float:
    """Seconds of a step that trying `other` is expected to save, if it is taken where it turns out faster than `best`;
    the two times are taken to be independent."""
    mean, deviation = math.log(other.seconds / best.seconds), math.hypot(best.deviation, other.deviation)
    return best.seconds * expected_part(mean, deviation)


def expected_part(mean: float, deviation: float) -> float:
    """Part of a step that is expected to be saved by whoever takes the faster of two plans once it is known how long
    one takes in the time of the other, `exp(x)` with `x` normal.

    Expected improvement (Jones, Schonlau and Welch, "Efficient Global Optimization of Expensive Black-Box Functions",
    1998, equation 15) with a log-normal ratio of the two times: E[max(0, 1 - exp(x))].
    """
    if deviation == 0:
        return max(0.0, 1 - math.exp(mean))
    faster = _below(-mean / deviation)
    return max(0.0, faster - math.exp(mean + deviation**2 / 2) * _below(-mean / deviation - deviation))


def worth_trying(
    savings_s: Sequence[float], best_s: float, steps: int | None, trial_s: float, beside: int = 1
) -> list[int]:
    """Places of the plans to try, those that are expected to save most first.

    `savings_s`: what trying each is expected to save, in seconds of a step of `best_s`. `steps`: how long the training
    will be; a plan is tried only where what it is expected to save over these exceeds what its trial costs, `trial_s`
    seconds; the first one also pays for `beside` others that it is compared with. Without `steps`: where it saves more
    than is negligible.
    """
    found: list[int] = []
    for place in sorted(range(len(savings_s)), key=lambda i: -savings_s[i]):
        if steps is None:
            pays = savings_s[place] > NEGLIGIBLE * best_s
        else:
            pays = savings_s[place] * steps > trial_s * (1 if found else 1 + beside)
        if not pays:
            break
        found.append(place)
    return found


def _below(x: float) -> float:
    """The standard normal distribution."""
    return 0.5 * math.erfc(-x / math.sqrt(2))
