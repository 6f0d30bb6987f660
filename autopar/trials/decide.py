"""Which plans are worth a trial: what measuring one is expected to save, against what a trial costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.search import Candidate

ALIKE = 0.005
"""Plans of the same strategies, in as many groups, whose predictions differ by less than this part count as alike: one
of them is measured in a round."""
NEGLIGIBLE = 0.002
"""Part of a step: where measuring a plan is expected to save less, and nothing is said of how long the training will
be, the plan is not measured."""

DOUBT = 3.0
"""What an expected saving is divided by, before trials have shown anything: it is the largest of those of many plans,
and how far their predictions are apart is a guess. [Empirical: between what five searches of the benchmarks' suite
promised, whose trials found nothing, and five others, some of whose did]"""
VAIN = 0.001
"""Part of a step: for each such part that rounds in a row were expected to save, and did not, an expected saving is
divided by one more. [Assumed]"""


def expected_saving_s(best_s: float, other_s: float, deviation: float) -> float:
    """Seconds of a step that trying a plan of which `other_s` seconds are predicted is expected to save, if it is taken
    where it turns out faster than the best one. `deviation`: by how much a trial is expected to move the logarithm of
    what the one takes in the time of the other."""
    return best_s * expected_part(math.log(other_s / best_s), deviation)


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


def credibility(in_vain: float) -> float:
    """The part of an expected saving that counts, from 0 to 1. Of plans that take almost the same, each promises
    something. `in_vain`: what the rounds of trials since the last one that paid for itself were expected to save, as
    parts of a step, in sum."""
    return 1 / (DOUBT + in_vain / VAIN)


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


def unlike(candidates: Sequence[Candidate], reference: Candidate) -> list[Candidate]:
    """Those that are like none before them, nor like the one that they are compared with."""
    found = [reference]
    for candidate in candidates:
        if not any(_alike(candidate, other) for other in found):
            found.append(candidate)
    return found[1:]


def _alike(a: Candidate, b: Candidate) -> bool:
    near = abs(a.step_time_s - b.step_time_s) <= ALIKE * b.step_time_s
    return near and len(a.groups) == len(b.groups) and {g.strategy for g in a.groups} == {g.strategy for g in b.groups}


def _below(x: float) -> float:
    """The standard normal distribution."""
    return 0.5 * math.erfc(-x / math.sqrt(2))
