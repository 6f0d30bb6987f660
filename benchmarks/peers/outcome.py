"""What came of one case: who trained, how long a step took beside the others', and whether the losses agree."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from autopar.spec.plan import Fidelity
from benchmarks.harness import Spread, ratio

OURS: Final = "autopar"
REFERENCE: Final = "ddp"
"""Whose losses the others' are compared with."""

TOLERANCE: Mapping[Fidelity, float] = {
    "exact": 1e-3,
    "rounded": 1e-2,
    "compressed": 1e-1,
    "stale": 1e-1,
    "local": 1e-1,
}
"""By how much a system's losses may differ from the reference's, relative to them. [Empirical] Exact systems add the
same numbers in another order, which AdamW amplifies where gradients are tiny; the others differ by design, and what
leaves these bounds within some tens of steps trains something else."""


COMPARED_STEPS = 16
"""Steps whose losses are compared: fast systems take many in the time of a measurement, over which trainings in float32
drift apart. [Empirical: of a VGG, one process and four DDP ranks differ by 3e-5 at step 12 and 7e-3 within 40, in which
the same plans in float64 stay within 1e-14]"""


@dataclass(frozen=True)
class Measured:
    """One system of a case. Plans by several names that say the same are one system, and several entries."""

    step_s: Mapping[int, float]
    """By round: the mean step time of its block. Rounds are alike for all systems that took part in them."""
    losses: tuple[float, ...]
    """Global mean loss of every step."""
    sent_bytes: float | None
    """Per rank and step, between hosts; mean over ranks and steps."""
    sent_bytes_most: float | None
    """The same of the rank that sends most."""
    options: Mapping[str, Any]
    """The choice that was taken."""

    @property
    def median_step_s(self) -> float:
        """Over its blocks."""
        return statistics.median(self.step_s.values())


@dataclass(frozen=True)
class Entry:
    """A line of the table: one name of a system, within one fidelity."""

    name: str
    fidelity: Fidelity
    """What it promises; of autopar, within which it searched."""
    system: Measured

    @property
    def ours(self) -> bool:
        return self.name.startswith(OURS)


@dataclass(frozen=True)
class Section:
    """The systems of one fidelity in one case, and the best peer among them."""

    case: str
    fidelity: Fidelity
    entries: tuple[Entry, ...]
    """autopar first, then the peers from the fastest to the slowest."""
    best: Entry | None
    """The fastest peer whose losses are right; None where there is none."""

    @property
    def ours(self) -> Entry | None:
        return next((e for e in self.entries if e.ours), None)

    @property
    def ratio(self) -> float | None:
        """autopar's step time, in those of the best peer; None where one of the two is missing."""
        spread = None if self.ours is None else self.ratio_of(self.ours)
        return None if spread is None else spread.median

    def ratio_of(self, entry: Entry) -> Spread | None:
        """An entry's step time, in those of the best peer. Where the two took part in no common round, through
        autopar, with which both did; then without quartiles."""
        if self.best is None:
            return None
        system, best = entry.system, self.best.system
        if system.step_s.keys() & best.step_s.keys() or self.ours is None:
            return relative(system, best)
        ours = self.ours.system
        return Spread(relative(system, ours).median / relative(best, ours).median, math.nan, math.nan)


@dataclass(frozen=True)
class CaseOutcome:
    """All systems of one workload on one cluster."""

    workload: str
    cluster: str
    network: str
    """How the network came about, and whether its rates are those of the cluster."""
    emulated: bool
    machine: str
    """On what, and when, and how busy it was."""
    entries: tuple[Entry, ...]
    absent: Mapping[str, str]
    """Who did not take part, and why."""

    @classmethod
    def load(cls, path: Path) -> CaseOutcome:
        """What `save` has written; raises `ValueError` where it is something else."""
        return TypeAdapter(cls).validate_json(path.read_text())

    def save(self, path: Path) -> None:
        """Writes everything as JSON."""
        path.write_bytes(TypeAdapter(CaseOutcome).dump_json(self, indent=1))

    @property
    def name(self) -> str:
        return f"{self.workload}/{self.cluster}"

    @property
    def reference(self) -> Measured | None:
        """DDP, or else any exact peer."""
        exact = [e for e in self.entries if e.fidelity == "exact" and not e.ours]
        return next((e.system for e in sorted(exact, key=lambda e: e.name != REFERENCE)), None)

    def loss_difference(self, system: Measured) -> float | None:
        """The greatest difference to the reference's losses, relative to them, over the first `COMPARED_STEPS` steps,
        as far as both took them."""
        if self.reference is None:
            return None
        both = list(zip(system.losses, self.reference.losses, strict=False))[:COMPARED_STEPS]
        return max((abs(a - b) / abs(b) if math.isfinite(a) else math.inf for a, b in both), default=None)

    def computes_the_same(self, entry: Entry) -> bool:
        """Whether its losses are within what its fidelity promises."""
        difference = self.loss_difference(entry.system)
        return difference is None or difference <= TOLERANCE[entry.fidelity]

    def sections(self) -> list[Section]:
        """By fidelity, in its order; those that hold a peer, or at least the exact one."""
        found = []
        for fidelity in TOLERANCE:
            ours = [e for e in self.entries if e.fidelity == fidelity and e.ours]
            anchor = ours[0].system if ours else None
            peers = [e for e in self.entries if e.fidelity == fidelity and not e.ours]
            peers.sort(key=lambda e: _order(e.system, anchor))
            best = next((e for e in peers if self.computes_the_same(e)), None)
            if peers or (ours and fidelity == "exact"):
                found.append(Section(self.name, fidelity, (*ours, *peers), best))
        return found


def relative(system: Measured, baseline: Measured) -> Spread:
    """The ratio of two systems' step times, over the rounds that both took part in. Without any, of the medians."""
    if system.step_s.keys() & baseline.step_s.keys():
        return ratio(system.step_s, baseline.step_s)
    return Spread(system.median_step_s / baseline.median_step_s, math.nan, math.nan)


def geometric_mean(ratios: Sequence[float]) -> float | None:
    """None of no ratios."""
    return statistics.geometric_mean(ratios) if ratios else None


def _order(system: Measured, anchor: Measured | None) -> float:
    return system.median_step_s if anchor is None else relative(system, anchor).median
