"""The one table: cases in which autopar loses first, and in each the systems of one fidelity beside their best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.harness import Report, Target
from benchmarks.peers.outcome import (
    TOLERANCE,
    CaseOutcome,
    Entry,
    Section,
    geometric_mean,
)

COLUMNS = (
    "workload",
    "cluster",
    "fidelity",
    "system",
    "ms a step",
    "in steps of the best peer",
    "MB sent a rank and step",
    "loss difference",
    "",
)
LIMIT = 1 / 0.97
"""A chosen plan is never slower than 0.97 of the best peer of the same fidelity."""


def fill(report: Report, outcomes: Sequence[CaseOutcome]) -> None:
    """Adds rows, geometric means, targets and figures."""
    for outcome, section in ordered(outcomes):
        report.rows += [_row(outcome, section, entry) for entry in section.entries]
    found: dict[str, list[tuple[float, str]]] = {}
    for _, section in ordered(outcomes):
        if section.ratio is not None:
            found.setdefault(section.fidelity, []).append((section.ratio, section.case))
    for fidelity in [f for f in TOLERANCE if f in found]:
        ratios = found[fidelity]
        mean = geometric_mean([ratio for ratio, _ in ratios])
        losses = sum(ratio > 1 for ratio, _ in ratios)
        report.rows.append(
            ("all", "all", fidelity, "autopar, geometric mean", "", f"{mean:.3f}", "", "", _cases(losses, len(ratios)))
        )
        worst, case = max(ratios)
        report.targets.append(
            Target(f"{fidelity}: autopar's step in steps of the best peer, where it is worst ({case})", worst, LIMIT)
        )
    for outcome in outcomes:
        for section in outcome.sections():
            report.targets += _right(outcome, section)
    report.notes += notes(outcomes)
    report.data["cases"] = [_data(outcome) for outcome in outcomes]


def ordered(outcomes: Iterable[CaseOutcome]) -> list[tuple[CaseOutcome, Section]]:
    """All sections: where autopar did not run, then from its worst to its best."""
    every = [(outcome, section) for outcome in outcomes for section in outcome.sections()]
    return sorted(every, key=lambda pair: -_badness(pair[1]))


def notes(outcomes: Sequence[CaseOutcome]) -> list[str]:
    """What the table rests on, and who is missing in it, by reason."""
    networks = sorted({f"{o.cluster}: {o.network}" for o in outcomes})
    said = ["Network. " + "; ".join(networks) + "."] if networks else []
    missing: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes:
        for name, reason in outcome.absent.items():
            missing.setdefault((name, reason), []).append(outcome.name)
    lines = [f"{name} ({', '.join(cases)}): {reason}" for (name, reason), cases in missing.items()]
    return said + (["Not measured. " + "; ".join(lines) + "."] if lines else [])


def _badness(section: Section) -> float:
    if section.ours is None:
        return math.inf
    return section.ratio if section.ratio is not None else -math.inf


def _right(outcome: CaseOutcome, section: Section) -> list[Target]:
    if section.ours is None:
        return [Target(f"{section.case}, {section.fidelity}: autopar did not run", None, LIMIT)]
    difference = outcome.loss_difference(section.ours.system)
    if difference is None or outcome.computes_the_same(section.ours):
        return []
    return [Target(f"{section.case}, {section.fidelity}: losses", difference, TOLERANCE[section.fidelity])]


def _row(outcome: CaseOutcome, section: Section, entry: Entry) -> tuple[str, ...]:
    step_ms, sent, difference = figures(outcome, entry)
    return (
        outcome.workload,
        outcome.cluster if outcome.emulated else f"{outcome.cluster} (loopback)",
        *(entry.fidelity, entry.name, step_ms, _ratio(entry, section), sent, difference),
        "; ".join(_remarks(outcome, section, entry)),
    )


def figures(outcome: CaseOutcome, entry: Entry) -> tuple[str, str, str]:
    """A system's cells: ms a step, MB that a rank sends in a step, and how far its losses are from the reference's."""
    system, difference = entry.system, outcome.loss_difference(entry.system)
    return (
        f"{system.median_step_s * 1e3:.0f}",
        "not counted" if system.sent_bytes is None else f"{system.sent_bytes / 1e6:.2f}",
        "" if difference is None else f"{difference:.1e}",
    )


def _remarks(outcome: CaseOutcome, section: Section, entry: Entry) -> list[str]:
    said = []
    if entry.ours and section.ratio is not None and section.ratio > 1:
        said.append(f"LOSES to {section.best.name if section.best else ''}")
    if entry == section.best:
        said.append("best peer")
    if entry.system == outcome.reference:
        said.append("reference of the losses")
    twins = [e.name for e in section.entries if e.system == entry.system and e != entry]
    if twins:
        said.append(f"the same plan as {', '.join(twins)}")
    if not outcome.computes_the_same(entry):
        said.append("COMPUTES SOMETHING ELSE: its losses are beyond what its fidelity promises")
    said += [f"{key} {value}" for key, value in entry.system.options.items() if key != "plan"]
    return said


def _ratio(entry: Entry, section: Section) -> str:
    if entry == section.best:
        return "1"
    ratio = section.ratio_of(entry)
    if ratio is None:
        return ""
    if math.isnan(ratio.lower):
        return f"{ratio.median:.3f} (through autopar)"
    return f"{ratio.median:.3f} (one round)" if len(entry.system.step_s) == 1 else f"{ratio:.3f}"


def _cases(losses: int, count: int) -> str:
    return f"over {count} case{'s' if count > 1 else ''}, {losses} of them lost"


def _data(outcome: CaseOutcome) -> dict[str, Any]:
    return {
        "case": outcome.name,
        "network": outcome.network,
        "emulated": outcome.emulated,
        "machine": outcome.machine,
        "absent": dict(outcome.absent),
        "systems": [
            asdict(entry) | {"loss_difference": outcome.loss_difference(entry.system)} for entry in outcome.entries
        ],
        "ratios": {section.fidelity: section.ratio for section in outcome.sections()},
    }
