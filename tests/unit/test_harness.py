"""The harness of the benchmarks: its order of runs, its statistics, its targets, what it prints last, its exit code."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from benchmarks.harness import Machine, Report, Spread, Target, Timings, interleave, options, publish
from benchmarks.interleaved import Answer, System, Turns


class FakeTime:
    """A clock that only the contestants move on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def contestant(self, name: str, *durations: float) -> Callable[[], None]:
        waiting = list(durations)

        def run() -> None:
            self.calls.append(name)
            self.now += waiting.pop(0)

        return run


def test_pairs_are_interleaved_and_warmup_does_not_count() -> None:
    clock = FakeTime()
    contestants = {"a": clock.contestant("a", 100, 1, 2, 4), "b": clock.contestant("b", 100, 2, 3, 4)}
    timings = interleave(contestants, 3, 1, clock)
    assert clock.calls == ["a", "b", "b", "a"] * 2
    assert timings.seconds == {"a": (1, 2, 4), "b": (2, 3, 4)}
    assert timings.ratio("b", "a") == Spread(median=1.5, lower=1.25, upper=1.75)
    assert timings.time("a").median == 2


def test_ratios_are_taken_within_a_round() -> None:
    """A machine that slows down tenfold in one round changes no ratio; the ratio of medians would change."""
    timings = Timings({"a": (1, 10, 1, 10), "b": (2, 20, 2, 20)})
    assert timings.ratio("b", "a") == Spread(2, 2, 2)


def test_steps_that_are_not_timed_are_taken_before_those_of_a_block() -> None:
    taken: list[tuple[int, int]] = []

    def steps(first: int, count: int, timeout_s: float) -> list[Answer]:
        taken.append((first, count))
        return [{"times_s": [float(first + i) for i in range(count)], "losses": [0.5] * count}]

    turns = Turns()
    blocks = [turns.round([(System("one", (), steps), 2)], untimed=1)[0] for _ in range(2)]
    assert taken == [(0, 3), (3, 3)]
    assert [b.step_s for b in blocks] == [(1.0, 2.0), (4.0, 5.0)]
    assert [len(b.losses) for b in blocks] == [3, 3]


def test_any_number_of_contestants() -> None:
    clock = FakeTime()
    names = ("a", "b", "c")
    timings = interleave({n: clock.contestant(n, 1, 1) for n in names}, rounds=2, warmup=0, clock=clock)
    assert clock.calls == [*names, *names[::-1]]
    assert set(timings.seconds) == set(names)
    with pytest.raises(ValueError, match="at least 1"):
        interleave({}, rounds=0)


def test_the_real_clock_moves() -> None:
    assert all(t > 0 for t in interleave({"a": lambda: sum(range(1000))}, 2).seconds["a"])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0], Spread(3, 3, 3)),
        ([1.0, 2.0], Spread(1.5, 1.25, 1.75)),
        ([5.0, 1.0, 3.0, 2.0, 4.0], Spread(3, 2, 4)),
    ],
)
def test_spread(values: list[float], expected: Spread) -> None:
    assert Spread.of(values) == expected


def test_spread_of_nothing_is_an_error_and_it_formats_all_three() -> None:
    with pytest.raises(ValueError, match="no values"):
        Spread.of([])
    assert f"{Spread(1, 0.5, 2):.2f}" == "1.00 (0.50 to 2.00)"


@pytest.mark.parametrize(
    ("target", "met"),
    [
        (Target("t", 1.0, 1.0), True),
        (Target("t", 1.001, 1.0), False),
        (Target("t", 30, 30, "at least"), True),
        (Target("t", 29, 30, "at least"), False),
        (Target("t", None, 1.0), False),
        (Target("t", float("nan"), 1.0), False),
    ],
)
def test_targets(target: Target, met: bool) -> None:
    assert target.met is met


def test_a_target_says_what_was_expected() -> None:
    assert str(Target("capture", 16.25, 15, unit="s")) == "capture: 16.25 s, expected at most 15 s"
    assert str(Target("models", None, 30, "at least")) == "models: not measured, expected at least 30"


MACHINE = Machine("2026-01-02 03:04 UTC", 2, "a processor", 23.4, 0.1, "2.13.0", 2, "3.11.0")


def _report(*targets: Target) -> Report:
    return Report("some", "A title", ("model", "ratio"), MACHINE, [("bert [x]|y", "1.5")], list(targets), ["A note."])


def _publish(report: Report, **arguments: object) -> tuple[int, list[str]]:
    out = io.StringIO()
    console = Console(file=out, width=160)
    code = publish(report, command="python -m benchmarks.some", console=console, **arguments)  # type: ignore[arg-type]
    return code, out.getvalue().strip().splitlines()


def test_what_falls_short_comes_last_and_fails_a_check_alone() -> None:
    report = _report(Target("bad", 2, 1), Target("good", 1, 1), Target("worse", None, 1))
    code, lines = _publish(report, check=True)
    assert code == 1
    assert lines[-3:] == [
        "met: good: 1, expected at most 1",
        "falls short: bad: 2, expected at most 1",
        "falls short: worse: not measured, expected at most 1",
    ]
    assert any("bert [x]|y" in line and "1.5" in line for line in lines)
    assert _publish(report)[0] == 0
    assert _publish(_report(Target("good", 1, 1)), check=True)[0] == 0


def test_json_holds_rows_targets_and_the_machine(tmp_path: Path) -> None:
    report = _report(Target("bad", 2, 1))
    report.data = {"seconds": [1, 2]}
    _publish(report, json_file=str(tmp_path / "r.json"))
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["rows"] == [{"model": "bert [x]|y", "ratio": "1.5"}]
    assert written["targets"][0] == {
        "name": "bad", "value": 2, "limit": 1, "direction": "at most", "unit": "", "met": False
    }  # fmt: skip
    assert written["machine"]["cores"] == 2
    assert written["data"] == {"seconds": [1, 2]}


def test_a_saved_report_is_dated_and_complete(tmp_path: Path) -> None:
    _publish(_report(Target("bad", 2, 1), Target("good", 1, 1)), save=True, results=tmp_path)
    text = (tmp_path / "2026-01-02-some.md").read_text()
    assert text.startswith("# A title\n\n2026-01-02 03:04 UTC; 2 cores (a processor)")
    for part in (
        "`python -m benchmarks.some`",
        "| model | ratio |\n| --- | --- |\n| bert [x]\\|y | 1.5 |",
        "A note.",
        "- **falls short**: bad: 2, expected at most 1",
        "- met: good: 1, expected at most 1",
    ):
        assert part in text


def test_the_machine_is_described() -> None:
    here = Machine.here()
    assert here.cores >= 1
    assert here.memory_gib > 0
    assert here.torch in str(here)
    assert here.date in str(here)


def test_options_reach_the_command() -> None:
    seen: dict[str, object] = {}

    @click.command()
    @options
    def command(**given: object) -> None:
        seen.update(given)

    assert CliRunner().invoke(command, ["--check", "--json", "f.json"]).exit_code == 0
    assert seen == {"check": True, "json_file": "f.json", "save": False}
