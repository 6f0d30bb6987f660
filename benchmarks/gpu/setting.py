"""Where a part of `benchmarks.gpu` runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """Where a part runs, and how long it may."""

    device: str
    """"cuda"; "cpu" only to see that the part itself works."""
    seconds: float
    """Until the part is ended."""

    @property
    def small(self) -> bool:
        """Whether to take small models and few repeats."""
        return self.device == "cpu"
