"""The table of the peers: who is compared with whom, what is shown first, and what does not count."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.spec.plan import Fidelity
from benchmarks.harness import Machine, Report, Spread
from benchmarks.peers.outcome import CaseOutcome, Entry, Measured, geometric_mean, relative
from benchmarks.peers.table import COLUMNS, fill, ordered

MACHINE = Machine("2026-01-01 00:00 UTC", 2, "processor", 8.0, 0.0, "2.13", 1, "3.11")
RIGHT = (2.0, 1.5, 1.0)


def _system(*step_s: float, losses: tuple[float, ...] = RIGHT, first: int = 0) -> Measured:
    return Measured(dict(enumerate(step_s, first)), losses, 2e6, 3e6, {})


def _case(name: str, *entries: tuple[str, Fidelity, Measured], absent: dict[str, str] | None = None) -> CaseOutcome:
    workload, cluster = name.split("/")
    return CaseOutcome(workload, cluster, "a lab", True, "here", tuple(Entry(*e) for e in entries), absent or {})


def _against_ddp(name: str, ours_s: float, ddp_s: float) -> CaseOutcome:
    return _case(name, ("autopar", "exact", _system(ours_s)), ("ddp", "exact", _system(ddp_s)))


def _report(*outcomes: CaseOutcome) -> Report:
    report = Report("peers", "a table", COLUMNS, MACHINE)
    fill(report, outcomes)
    return report


def test_ratios_are_over_common_rounds() -> None:
    """What slows a whole round down cancels, and rounds that only one of the two took part in do not count."""
    assert relative(_system(1, 10, 1, 99), _system(2, 20, 2)) == Spread(0.5, 0.5, 0.5)


def test_without_common_rounds_medians_are_compared() -> None:
    ratio = relative(_system(1, 3), _system(4, first=7))
    assert ratio.median == 0.5
    assert math.isnan(ratio.lower)


def test_peers_of_different_groups_are_compared_through_autopar() -> None:
    """The machine was twice as slow during the second group's rounds."""
    ours = Measured({0: 1.0, 1: 2.0}, RIGHT, None, None, {})
    case = _case(
        "a/x",
        ("autopar", "exact", ours),
        ("ddp", "exact", _system(1.2)),
        ("late", "exact", _system(3.6, first=1)),
    )
    late = {row[3]: row[5] for row in _report(case).rows}["late"]
    assert late == "1.500 (through autopar)"


def test_losses_to_a_peer_are_first_and_the_worst_of_them_at_the_top() -> None:
    won, lost, lost_badly = (_against_ddp(n, *s) for n, s in (("a/x", (1, 2)), ("b/x", (3, 2)), ("c/x", (9, 2))))
    assert [s.case for _, s in ordered([won, lost, lost_badly])] == ["c/x", "b/x", "a/x"]
    rows = _report(won, lost, lost_badly).rows
    assert [row[0] for row in rows] == ["c", "c", "b", "b", "a", "a", "all"]
    assert "LOSES to ddp" in rows[0][-1]
    assert "LOSES" not in rows[4][-1]


def test_a_case_without_autopar_counts_as_the_worst() -> None:
    absent = _case("a/x", ("ddp", "exact", _system(1)), absent={"autopar": "failed: it did"})
    report = _report(_against_ddp("b/x", 9, 2), absent)
    assert report.rows[0][0] == "a"
    assert any(t.value is None and t.name == "a/x, exact: autopar did not run" for t in report.short)
    assert any("autopar (a/x): failed: it did" in note for note in report.notes)


def test_peers_are_compared_within_their_fidelity() -> None:
    ours, rounded = _system(4, 4), _system(3, 3)
    case = _case(
        "a/x",
        ("autopar", "exact", ours),
        ("autopar_rounded", "rounded", rounded),
        ("ddp", "exact", _system(5, 5)),
        ("zero", "exact", _system(8, 2)),
        ("fp16", "rounded", _system(2, 2)),
    )
    exact, narrow = case.sections()
    assert [e.name for e in exact.entries] == ["autopar", "ddp", "zero"]
    assert (exact.best and exact.best.name, exact.ratio) == ("ddp", 0.8)
    assert (narrow.best and narrow.best.name, narrow.ratio) == ("fp16", 1.5)


def test_who_computes_something_else_is_marked_and_is_not_the_best() -> None:
    case = _case(
        "a/x",
        ("autopar", "exact", _system(4)),
        ("ddp", "exact", _system(5)),
        ("cheat", "exact", _system(1, losses=(2.0, 1.5, 1.1))),
        ("broken", "exact", _system(1, losses=(2.0, math.nan, 1.0))),
    )
    (section,) = case.sections()
    assert section.best is not None and section.best.name == "ddp"
    remarks = {row[3]: row[-1] for row in _report(case).rows}
    assert {name for name, said in remarks.items() if "SOMETHING ELSE" in said} == {"cheat", "broken"}


def test_autopar_with_other_losses_falls_short() -> None:
    case = _case("a/x", ("autopar", "exact", _system(1, losses=(2.0, 1.5, 1.1))), ("ddp", "exact", _system(5)))
    assert [t.name for t in _report(case).short] == ["a/x, exact: losses"]


def test_losses_are_compared_over_the_steps_that_both_took() -> None:
    longer = _system(1, losses=(*RIGHT, 7.0))
    assert _case("a/x", ("ddp", "exact", _system(1)), ("b", "exact", longer)).loss_difference(longer) == 0.0


def test_plans_that_say_the_same_are_one_system() -> None:
    shared = _system(4, 5)
    case = _case("a/x", ("autopar", "exact", shared), ("ddp", "exact", _system(9, 9)), ("plan", "exact", shared))
    (section,) = case.sections()
    assert section.best is not None and (section.best.name, section.ratio) == ("plan", 1.0)
    assert "the same plan as plan" in _report(case).rows[0][-1]


def test_the_geometric_mean() -> None:
    assert geometric_mean([]) is None
    assert geometric_mean([0.5, 2.0, 8.0]) == pytest.approx(2.0)
    rows = _report(_against_ddp("a/x", 1, 2), _against_ddp("b/x", 4, 2)).rows
    assert rows[-1][3:6] == ("autopar, geometric mean", "", "1.000")
    assert rows[-1][-1] == "over 2 cases, 1 of them lost"


def test_the_target_is_the_worst_case_of_each_fidelity() -> None:
    report = _report(_against_ddp("a/x", 1.02, 1), _against_ddp("b/x", 1.04, 1))
    assert [(t.value, t.met) for t in report.targets] == [(1.04, False)]
    assert "(b/x)" in report.targets[0].name


def test_bytes_that_were_not_counted() -> None:
    unknown = Measured({0: 1.0}, RIGHT, None, None, {})
    assert _report(_case("a/x", ("ddp", "exact", unknown))).rows[0][6] == "not counted"


def test_an_outcome_is_read_as_it_was_written(tmp_path: Path) -> None:
    case = _case("a/x", ("autopar", "exact", _system(1, 2)), ("ddp", "exact", _system(5)), absent={"b": "why"})
    case.save(tmp_path / "a.json")
    assert CaseOutcome.load(tmp_path / "a.json") == case


def test_the_table_says_where_there_was_no_network() -> None:
    rows = _report(replace(_case("a/x", ("ddp", "exact", _system(1))), emulated=False)).rows
    assert rows[0][:2] == ("a", "x (loopback)")
