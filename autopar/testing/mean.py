"""Whether what a compressor loses is nothing in the mean."""

from __future__ import annotations

import math

import torch

DEVIATIONS = 6.0
"""Of a sum of errors, which chance exceeds once in 10^9 times."""

ROUNDED = 1e-5
"""Of what was to be sent: scales may be in float32."""


class Mean:
    """Adds up errors, each with the sign of what was to be sent: their mean is zero where nothing is lost, and where
    numbers come out too small or too large, it is not."""

    def __init__(self) -> None:
        self._sum = self._squares = self._size = 0.0

    def add(self, sent: torch.Tensor, given: torch.Tensor) -> None:
        """Takes in what was sent of a gradient."""
        error = (sent - given).double()
        self._sum += float((error * given.sign()).sum())
        self._squares += float(error.square().sum())
        self._size += float(given.abs().sum())

    def biased(self) -> str | None:
        """By how much the mean is off, in words; `None` where chance explains it."""
        deviation = math.sqrt(self._squares)
        if abs(self._sum) <= DEVIATIONS * deviation + ROUNDED * self._size:
            return None
        return (
            f"what is sent is not the gradient in the mean: off by {abs(self._sum):.1e}, where chance has a standard "
            f"deviation of {deviation:.1e}"
        )
