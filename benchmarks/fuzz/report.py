"""Counts what became of the cases, and says it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from benchmarks.fuzz.case import Case
from benchmarks.fuzz.found import Found
from benchmarks.fuzz.generate import generate
from benchmarks.fuzz.outcome import FINDINGS
from benchmarks.fuzz.workers import Told

_REASONS, _SHOWN = 12, 30
_PROGRESS = 200
"""Cases after which the counts so far are said."""

BY_TRACING = "refused: PyTorch's tracing"
"""Of those refused, the ones where PyTorch's own tracing gives other numbers than eager training."""


def _traits(case: Case) -> tuple[object, ...]:
    """What of a case makes it likely that two findings have one cause."""
    sizes = {n for s in case.samples for n in s}
    narrow = case.dtype in ("bfloat16", "float16")
    return case.twist, case.entry, narrow, len(sizes) > 1, bool(case.events), case.world_size > 1


class Tally:
    """Outcomes so far. `echo` is told each finding at once; one whose line matches `until` is what is looked for."""

    def __init__(self, echo: Callable[[str], object], until: str | None = None) -> None:
        self.over = False
        """Whether what is looked for is found."""
        self._until = until
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.findings: list[Found] = []
        self._echo = echo

    def add(self, told: Told) -> None:
        """Counts one answer."""
        outcome = told.outcome
        self.counts[outcome.kind] += 1
        self.counts["models" if told.name.partition("/")[2].startswith("m") else "plans"] += 1
        if (self.counts["models"] + self.counts["plans"]) % _PROGRESS == 0:
            found = ", ".join(f"{self.counts[k]} {k}" for k in ("equal", "refused", "unusable"))
            self._echo(f"... {self.counts['models']} models, {self.counts['plans']} plans: {found}")
        if outcome.warned:
            self.counts["equal, with a warning"] += outcome.kind == "equal"
        self.counts[BY_TRACING] += outcome.is_tracing
        if outcome.kind == "refused":
            self.refusals[outcome.reason] += 1
            self.examples.setdefault(outcome.reason, told.name)
        if outcome.is_finding:
            case: Case = told.case or generate(told.name)
            self.findings.append(Found(told.name, case, outcome))
            said = outcome.said.partition("\n")[0][:200] + (f" [{case.twist}]" if case.twist else "")
            self.over |= self._until is not None and re.search(self._until, f"{outcome.kind}: {said}") is not None
            self._echo(f"{outcome.kind}: {said}\n    python -m benchmarks.fuzz --only {told.name}")

    def kinds(self) -> list[Found]:
        """One finding of each kind, the most serious first."""
        seen: dict[tuple[object, ...], Found] = {}
        for found in self.findings:
            seen.setdefault((found.outcome.kind, found.outcome.reason, *_traits(found.case)), found)
        return sorted(seen.values(), key=lambda f: FINDINGS.index(f.outcome.kind))[:_SHOWN]

    def say(self, seed: int) -> None:
        """The counts, and why cases were refused."""
        cases = self.counts["models"] + self.counts["plans"]
        kinds = ("equal", "equal, with a warning", "refused", BY_TRACING, "unusable", *FINDINGS)
        said = ", ".join(f"{self.counts[k]} {k}" for k in kinds)
        self._echo(
            f"\nseed {seed}: {self.counts['models']} models and {self.counts['plans']} plans"
            + (f": {said}" if cases else "")
        )
        for reason, count in self.refusals.most_common(_REASONS):
            self._echo(f"  refused {count}: {reason}  ({self.examples[reason]})")
