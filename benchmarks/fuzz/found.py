"""A finding."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.fuzz.case import Case
from benchmarks.fuzz.outcome import Outcome


@dataclass(frozen=True)
class Found:
    """A case, and what went wrong with it."""

    name: str
    case: Case
    outcome: Outcome
