"""What became of one model: each of its runs, and of all together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Kind = Literal["equal", "wrong", "crashed", "refused", "unusable"]
"""`refused`: an `AutoparError`. `unusable`: the model itself fails, or its training is not the same twice."""
_WORST_FIRST: tuple[Kind, ...] = ("wrong", "crashed", "refused", "unusable", "equal")


@dataclass(frozen=True)
class Run:
    """A few steps under one plan, on one rank or on all."""

    mode: str
    """"step" or "module"."""
    plan: str
    kind: Kind
    said: str = ""
    """What is wrong, or an error's class and message."""
    eager: str = ""
    """Why it runs eagerly; empty where it is captured."""
    error: float = 0.0
    """The largest difference between updates, relative to the update."""
    seconds: float = 0.0
    """Of `optimize`: capture, planning, rewriting."""
    strategies: str = ""


@dataclass(frozen=True)
class Outcome:
    """Of one model."""

    name: str
    parameters: int = 0
    dtype: str = ""
    seconds: float = 0.0
    runs: tuple[Run, ...] = ()
    failure: str = ""
    """Where it did not come to any run, or a process died or hung."""
    unusable: bool = False
    """Whether the failure is the model's own."""
    trace: str = ""
    """Of the first crash."""

    @property
    def kind(self) -> Kind:
        """The most serious of its runs."""
        if self.failure:
            return "unusable" if self.unusable else "crashed"
        return min((r.kind for r in self.runs), key=_WORST_FIRST.index)

    @property
    def eager(self) -> str:
        """Why some run was eager; empty where all were captured."""
        return next((r.eager for r in self.runs if r.eager), "")

    @property
    def said(self) -> str:
        """What is wrong with the most serious run."""
        if self.failure:
            return self.failure
        return next((f"{r.mode}, {r.plan}: {r.said}" for r in self.runs if r.kind == self.kind and r.said), "")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, told: dict[str, Any]) -> Outcome:
        return cls(**{**told, "runs": tuple(Run(**r) for r in told["runs"])})


def merged(outcomes: Sequence[Outcome]) -> Outcome:
    """Of all ranks: of each run the most serious."""
    failed = next((o for o in outcomes if o.failure), None)
    if failed is not None:
        return failed
    kinds: dict[tuple[str, str], list[Run]] = {}
    for run in (r for o in outcomes for r in o.runs):
        kinds.setdefault((run.mode, run.plan), []).append(run)
    runs = [min(of_ranks, key=lambda r: (_WORST_FIRST.index(r.kind), -r.error)) for of_ranks in kinds.values()]
    trace = next((o.trace for o in outcomes if o.trace), "")
    return replace(outcomes[0], runs=tuple(runs), trace=trace, seconds=max(o.seconds for o in outcomes))
