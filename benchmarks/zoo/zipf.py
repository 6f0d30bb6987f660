"""Zipf's law: few things appear often, most of them seldom, as words, products and people in the news do."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

EXPONENT = 1.05

_SPREAD = 2_654_435_761
"""A prime (2^32 over the golden ratio), which divides no count of things here."""


def zipf(random: np.random.Generator, things: int, count: int, exponent: float = EXPONENT) -> npt.NDArray[np.int64]:
    """`count` numbers below `things`, of which the k-th most frequent appears about as often as k ** -exponent.

    Exactly: floors of a Pareto distribution bounded to [1, things + 1), by the inverse of its distribution function;
    then spread evenly, so that the frequent ones have no places of their own. `exponent` is not 1.
    """
    power = 1.0 - exponent
    uniform = random.random(count)
    places = ((things + 1) ** power * uniform + (1 - uniform)) ** (1 / power)
    numbers: npt.NDArray[np.int64] = np.minimum(places.astype(np.int64), things) * _SPREAD % things
    return numbers
