"""The benchmark of what structure saves: its cases can be run, and what falls short is said."""

from __future__ import annotations

import pytest

from benchmarks.harness import Machine, Report
from benchmarks.overlap import NAME, OURS, THEIRS, Overlap
from benchmarks.peers import peer_named
from benchmarks.peers.outcome import CaseOutcome, Entry, Measured
from benchmarks.strategies import COLUMNS, GOALS, SPARSE, TUNED, Goal, fill, fill_overlap
from benchmarks.suite import workload_named
from benchmarks.suite.clusters import case_named

MACHINE = Machine("2026-01-01 00:00 UTC", 2, "processor", 8.0, 0.0, "2.13", 1, "3.11")
GOAL = Goal("dlrm", "4x200m", {TUNED: 20.0, SPARSE: 1.3})


def _entry(name: str, step_s: float, loss: float = 1.0) -> Entry:
    return Entry(name, "exact", Measured({0: step_s, 1: 2 * step_s}, (loss, loss), 1e6, 1e6, {}))


def _report(*entries: Entry) -> Report:
    report = Report("strategies", "a table", COLUMNS, MACHINE)
    fill(report, GOAL, CaseOutcome(GOAL.workload, GOAL.cluster, "a lab", True, "here", entries, {}))
    return report


@pytest.mark.parametrize("goal", GOALS, ids=lambda g: g.name)
def test_cases_name_what_there_is(goal: Goal) -> None:
    workload = workload_named(goal.workload)
    cluster = case_named(goal.cluster)
    assert not cluster.virtual
    assert all(peer_named(name).applies(workload, cluster.cluster) is None for name in goal.faster)


def test_each_peer_is_held_against_its_own_factor() -> None:
    report = _report(_entry("autopar", 1.0), _entry(TUNED, 30.0), _entry(SPARSE, 1.2))
    assert [(t.value, t.met) for t in report.targets] == [(30.0, True), (1.2, False)]
    assert [row[3] for row in report.rows] == ["", "30.00 (30.00 to 30.00)", "1.20 (1.20 to 1.20)"]


def test_a_peer_that_did_not_run_falls_short() -> None:
    report = _report(_entry("autopar", 1.0), _entry(TUNED, 30.0))
    assert [t.met for t in report.targets] == [True, False]
    assert f"Not measured: {GOAL.name}, {SPARSE}" in report.notes[0]


def test_speed_at_other_losses_does_not_count() -> None:
    report = _report(_entry("autopar", 1.0, loss=0.5), _entry(TUNED, 30.0), _entry(SPARSE, 2.0))
    assert not any(t.met for t in report.targets)


@pytest.mark.parametrize(("compute_s", "bytes_s", "met"), [(0.14, 0.13, True), (0.13, 0.13, False), (0.1, 0.14, True)])
def test_a_step_is_held_against_the_longer_of_compute_and_bytes(compute_s: float, bytes_s: float, met: bool) -> None:
    report = Report("strategies", "a table", COLUMNS, MACHINE)
    steps = {OURS: 0.15, THEIRS: 0.3}
    fill_overlap(report, Overlap(compute_s, bytes_s, steps, steps, dict.fromkeys(steps, 2e6), "a busy machine"))
    assert [t.met for t in report.targets] == [met]
    assert [row[:4] for row in report.rows] == [(NAME, OURS, "150", ""), (NAME, THEIRS, "300", "2.00")]
    assert report.notes[0].endswith("a busy machine")
