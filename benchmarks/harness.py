"""What all benchmarks share: paired timing, targets and their check, the machine's description, and reports.

A benchmark fills a `Report` and hands it to `publish`, which prints its table, then its targets, and what falls
short last. `options` gives every benchmark the same command line: `--check`, `--json FILE`, `--save`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from autopar.spec.detect import processor
from benchmarks.interleaved import Answer, System, Turns
from benchmarks.plots import Plot

RESULTS = Path(__file__).parent / "results"
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Quartiles by linear interpolation between the values; raises `ValueError` where there are none."""
        known = list(values)
        if not known:
            raise ValueError("no values to take the median of")
        lower, median, upper = statistics.quantiles(known, method="inclusive") if len(known) > 1 else known * 3
        return cls(median, lower, upper)

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.lower:{spec}} to {self.upper:{spec}})"


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """While it is open, no other benchmark of this machine can open it: each would measure what the other leaves.
    Raises `ClickException` where one has."""
    with (Path(tempfile.gettempdir()) / "autopar-benchmark.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise click.ClickException("another benchmark is measuring here, and both would be wrong: wait") from None
        yield


def ratio(seconds: Mapping[int, float], baseline: Mapping[int, float]) -> Spread:
    """Of the times in each round that both took part in, so that what slows a whole round down cancels. Raises
    `ValueError` where there is no such round."""
    return Spread.of(seconds[r] / baseline[r] for r in sorted(seconds.keys() & baseline.keys()))


@dataclass(frozen=True)
class Timings:
    """Seconds of each of several contestants, round by round: entry i of every one was taken in the same round."""

    seconds: Mapping[str, tuple[float, ...]]

    def time(self, name: str) -> Spread:
        return Spread.of(self.seconds[name])

    def ratio(self, name: str, baseline: str) -> Spread:
        """The time of one in those of another: see `ratio`."""
        return ratio(dict(enumerate(self.seconds[name])), dict(enumerate(self.seconds[baseline])))


def interleave(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> Timings:
    """Runs all in turn in this process, as `Turns` has it, after `warmup` rounds that do not count. Each call must have
    finished when it returns."""
    if rounds < 1:
        raise ValueError(f"rounds: expected at least 1, got {rounds}")

    def system(name: str, run: Callable[[], object]) -> System:
        def steps(first: int, count: int, timeout_s: float) -> list[Answer]:
            times_s = []
            for _ in range(count):
                start = clock()
                run()
                times_s.append(clock() - start)
            return [{"times_s": times_s, "losses": []}]

        return System(name, (), steps)

    systems, turns = [system(*contestant) for contestant in contestants.items()], Turns()
    taken = [turns.round([(s, 1) for s in systems]) for _ in range(warmup + rounds)]
    blocks = [block for round_ in taken[warmup:] for block in round_]
    return Timings({name: tuple(b.step_s[0] for b in blocks if b.system == name) for name in contestants})


@dataclass(frozen=True)
class Target:
    """A figure that a benchmark must reach."""

    name: str
    value: float | None
    """None where it could not be measured, which falls short."""
    limit: float
    direction: Literal["at most", "at least"] = "at most"
    unit: str = ""

    @property
    def met(self) -> bool:
        if self.value is None or math.isnan(self.value):
            return False
        return self.value <= self.limit if self.direction == "at most" else self.value >= self.limit

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        value = "not measured" if self.value is None else f"{self.value:.4g}{unit}"
        return f"{self.name}: {value}, expected {self.direction} {self.limit:g}{unit}"


@dataclass(frozen=True)
class Machine:
    """What a figure was measured on."""

    date: str
    cores: int
    """That this process may use."""
    processor: str
    memory_gib: float
    load_average: float
    """Over the last minute, when the benchmark began: above 1, others were at work."""
    torch: str
    torch_threads: int
    python: str

    @classmethod
    def here(cls) -> Machine:
        import torch

        return cls(
            date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            processor=processor(),
            memory_gib=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
            load_average=round(os.getloadavg()[0], 2),
            torch=torch.__version__,
            torch_threads=torch.get_num_threads(),
            python=platform.python_version(),
        )

    def __str__(self) -> str:
        return (
            f"{self.date}; {self.cores} cores ({self.processor}), {self.memory_gib} GiB, load average "
            f"{self.load_average}; torch {self.torch} with {self.torch_threads} threads, Python {self.python}"
        )


def additions_us() -> float:
    """How fast this machine is at the moment, which varies by itself: what 100,000 additions in Python take, in
    microseconds. The fastest of three, as others may come between."""

    def once() -> float:
        start, x = time.perf_counter(), 0
        for i in range(100_000):
            x += i
        return 1e6 * (time.perf_counter() - start)

    return round(min(once() for _ in range(3)))


@dataclass
class Report:
    """What a benchmark found. Rows are text for people; `data` are the figures, for `--json`."""

    name: str
    """Short, as in `python -m benchmarks.NAME`."""
    title: str
    columns: Sequence[str]
    machine: Machine = field(default_factory=Machine.here)
    rows: list[Sequence[str]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """How it was measured, and what to know to read the table."""
    data: dict[str, Any] = field(default_factory=dict)
    plots: list[Plot] = field(default_factory=list)
    """Drawn with `--save`."""

    @property
    def short(self) -> list[Target]:
        """The targets that are not met."""
        return [t for t in self.targets if not t.met]

    def markdown(self, command: str) -> str:
        """The report as a file for people: title, machine, command, table, notes, targets."""
        verdicts = [f"- {'met' if t.met else '**falls short**'}: {t}" for t in self.targets]
        parts = [
            f"# {self.title}",
            str(self.machine),
            f"`{command}`",
            markdown_table(self.columns, self.rows),
            *self.notes,
        ]
        pictures = [f"![{plot.title}]({self.plot_file(plot)})" for plot in self.plots]
        return "\n\n".join([*parts, *pictures, "\n".join(verdicts)]).strip() + "\n"

    def plot_file(self, plot: Plot) -> str:
        """The name of a plot's file, beside that of the report."""
        return f"{self.machine.date[:10]}-{self.name}-{plot.name}.svg"

    def json(self) -> str:
        """Machine, rows, targets and data, as JSON."""
        targets = [asdict(t) | {"met": t.met} for t in self.targets]
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        whole = {"name": self.name, "machine": asdict(self.machine), "rows": rows, "targets": targets}
        return json.dumps(whole | {"notes": self.notes, "data": self.data}, indent=1) + "\n"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as GitHub draws it."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def publish(
    report: Report,
    *,
    command: str,
    check: bool = False,
    json_file: str | None = None,
    save: bool = False,
    console: Console | None = None,
    results: Path = RESULTS,
) -> int:
    """Prints the report, what falls short last, and writes the files asked for. Returns the exit code: 1 where
    `check` is set and a target is not met."""
    console = console or Console(highlight=False, width=None if Console().is_terminal else 160)
    table = Table(title=report.title, title_justify="left")
    for column in report.columns:
        table.add_column(column, overflow="fold")
    for row in report.rows:
        table.add_row(*(escape(cell) for cell in row))
    console.print(table)
    for line in (str(report.machine), *report.notes):
        console.print(escape(line))
    if json_file:
        Path(json_file).write_text(report.json())
    if save:
        path = results / f"{report.machine.date[:10]}-{report.name}.md"
        path.write_text(report.markdown(command))
        for plot in report.plots:
            plot.save(results / report.plot_file(plot))
        console.print(f"Written to {escape(path.name)} in benchmarks/results.")
    for target in report.targets:
        if target.met:
            console.print(f"met: {escape(str(target))}")
    for target in report.short:
        console.print(f"[bold red]falls short[/]: {escape(str(target))}")
    return 1 if check and report.short else 0


def options(command: F) -> F:
    """Adds the options that all benchmarks have, as the parameters `check`, `json_file` and `save`."""
    for decorate in (
        click.option("--save", is_flag=True, help="Write a dated report into benchmarks/results."),
        click.option("--json", "json_file", metavar="FILE", help="Write the figures as JSON."),
        click.option("--check", is_flag=True, help="Exit 1 where a target is not met."),
    ):
        command = decorate(command)
    return command
