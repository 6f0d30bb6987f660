"""Trials: the finalists of a search, run for real in turns, and a search that learns from them."""

from __future__ import annotations

from autopar.trials.loop import Trials
from autopar.trials.measure import Measure

__all__ = ["Measure", "Trials"]
