"""What a strategy was found to do."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from autopar.errors import ConformanceError

Kind = Literal["equality", "rounding", "feedback", "order", "parity", "bytes", "traffic", "memory"]
PROMISES: dict[Kind, str] = {
    "equality": "trains as one process does, in float64, within 1e-10; all ranks alike to the last bit",
    "rounding": "with 16 bits on the wire, the first gradients are within the format's rounding",
    "feedback": "what is sent and kept for later adds up to the gradients, or is them in the mean; all ranks alike",
    "order": "all ranks issue the same collectives, whatever their batches",
    "parity": "what is issued is what is priced, and what virtual compute issues",
    "bytes": "the bytes on the wire are those declared, within 3 %",
    "traffic": "the phases of collectives put on the links what ranks send and receive",
    "memory": "operations allocate no more than they declare",
}


@dataclass(frozen=True)
class Finding:
    """One promise, in one case."""

    kind: Kind
    case: str
    """Which model, options, training and number of ranks."""
    kept: bool
    said: str
    """What was found: a difference, or an error."""


@dataclass(frozen=True)
class Conformance:
    """All that was found of a strategy."""

    strategy: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    """What was not looked at, and why."""

    @property
    def broken(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if not f.kept)

    @property
    def passed(self) -> bool:
        return bool(self.findings) and not self.broken

    def raise_if_broken(self) -> None:
        """Raises `ConformanceError` with the first promises that are broken, and where nothing was looked at."""
        if not self.findings:
            raise ConformanceError(f"{self.strategy} applies to nothing: {'; '.join(self.notes)}")
        if self.broken:
            raise ConformanceError(str(self))

    def __str__(self) -> str:
        lines = [f"{self.strategy}: {'keeps its promises' if self.passed else 'does not keep its promises'}"]
        cases, kept = Counter(f.kind for f in self.findings), Counter(f.kind for f in self.findings if f.kept)
        lines += [f"  {kind:9} {kept[kind]:3} of {cases[kind]:3}  {PROMISES[kind]}" for kind in PROMISES if cases[kind]]
        lines += [f"  broken: {f.kind}, {f.case}: {f.said}" for f in self.broken[:10]]
        if len(self.broken) > 10:
            lines.append(f"  and {len(self.broken) - 10} more")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])
