"""What became of a case."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

Kind = Literal["equal", "refused", "unusable", "wrong", "drifted", "disproved", "crashed", "died", "hung"]
"""`refused`: an `AutoparError`. `unusable`: eager training fails, or leads to no numbers. `drifted`: ranks' parameters
differ. `disproved`: autopar itself says that it computes something else."""
FINDINGS: tuple[Kind, ...] = ("wrong", "drifted", "disproved", "crashed", "died", "hung")
"""The most serious first."""


@dataclass(frozen=True)
class Outcome:
    """Of one case, on one rank or on all of them."""

    kind: Kind
    said: str = ""
    """What was wrong, in words, or an error's class and message."""
    warned: str = ""
    groups: str = ""
    """JSON of the plan's groups, where there are several ranks."""
    digest: str = ""
    as_ddp: bool = False
    """Whether a wrong number is what DDP computes."""
    size: float = 0.0
    drawn: tuple[str, ...] = ()
    """Of the random numbers of each step, which ranks must not have alike."""

    @property
    def is_finding(self) -> bool:
        return self.kind in FINDINGS

    @property
    def is_tracing(self) -> bool:
        """Whether it was refused because PyTorch's own tracing gives other numbers than eager training."""
        return self.kind == "refused" and self.said.startswith("TracingError")

    @property
    def may_be_slow(self) -> bool:
        """Whether a loaded machine may have led to it: a rank has waited in vain, or was ended for its memory."""
        return self.kind in ("hung", "died") or (self.is_finding and "CollectiveError" in self.said)

    @property
    def reason(self) -> str:
        """What was said, without the names and numbers of this case: findings that agree in it are of one kind."""
        text = re.sub(
            r"'[^']*'|\"[^\"]*\"|-?\d+(\.\d+)?(e-?\d+)?|\bp\d+\b|\([^)]*\)", "_", self.said.partition("\n")[0]
        )
        return " ".join(text.split())[:160]

    def as_dict(self) -> dict[str, Any]:
        return {f: getattr(self, f) for f in self.__dataclass_fields__}


def merged(outcomes: list[Outcome]) -> Outcome:
    """Of all ranks: the most serious; a number that is DDP's is right where autopar has warned of it."""
    if all(o.kind in ("equal", "wrong") and (o.kind == "equal" or o.as_ddp) for o in outcomes):
        warned = next((o.warned for o in outcomes if o.warned), "")
        if warned:
            first = outcomes[0]
            outcomes = [Outcome("equal", "", warned, first.groups, o.digest, drawn=o.drawn) for o in outcomes]
    order: list[Kind] = ["equal", "unusable", "refused", *FINDINGS[::-1]]
    worst = max(outcomes, key=lambda o: (order.index(o.kind), not _follows(o)))
    if _follows(worst):  # what another rank has said comes first
        worst = next((o for o in outcomes if o.kind in ("crashed", "refused") and not _follows(o)), worst)
    if worst.kind == "equal" and len({o.digest for o in outcomes}) > 1:
        return replace(worst, kind="drifted", said="ranks' parameters differ after the last step")
    drawn = [o.drawn for o in outcomes if o.kind == "equal"]
    alike = [step for step, numbers in enumerate(zip(*drawn, strict=True)) if len(set(numbers)) < len(numbers)]
    if worst.kind == "equal" and alike:
        return replace(worst, kind="drifted", said=f"ranks have drawn the same random numbers in step {alike[0]}")
    return worst


def _follows(outcome: Outcome) -> bool:
    """Whether a rank may only have waited for another one in vain."""
    return outcome.said.startswith("CollectiveError")
