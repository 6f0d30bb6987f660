"""What lossy synchronization costs in quality.

    python -m benchmarks.budget [--task NAME] [--method NAME] [--seeds N] [--journal FILE] [--learn] [--save]
    python -m benchmarks.budget --choices
    python -m benchmarks.budget --rivals

Each task is trained to its end by gloo ranks on this machine, exactly and with each method, over several seeds. Before,
each method is probed on it: what its first steps show. What is in the journal, and in that of the probes beside it, is
not done again.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import click

from benchmarks.budget import choices as cells
from benchmarks.budget import choices_table, probes, rival_trainings, table, training
from benchmarks.budget.choices import NETWORKS
from benchmarks.budget.learn import shipped_map
from benchmarks.budget.methods import METHODS
from benchmarks.budget.outcome import Journal
from benchmarks.budget.rivals import RIVALS
from benchmarks.budget.tasks import JUDGED, TASKS
from benchmarks.harness import Report, options, publish

JOURNAL = Path("benchmarks/results/budget.jsonl")


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--task", "tasks", multiple=True, type=click.Choice(list(TASKS)), help="This task; may be repeated.")
@click.option("--method", "methods", multiple=True, type=click.Choice(list(METHODS)), help="This method alone.")
@click.option("--seeds", default=1, type=click.IntRange(1), help="So many seeds of each.")
@click.option("--first-seed", default=0, type=click.IntRange(0), help="The first of these.")
@click.option("--seconds", default=None, type=float, help="Nothing begins later than so many seconds from now.")
@click.option("--choices", is_flag=True, help="Judge choices under budgets instead, on the tasks that are for it.")
@click.option("--rivals", is_flag=True, help="Train these tasks with others' adaptive compression instead.")
@click.option("--network", "networks", multiple=True, type=click.Choice(NETWORKS), help="With --choices: this one.")
@click.option("--journal", "path", default=JOURNAL, type=click.Path(path_type=Path), help="Where outcomes are kept.")
@click.option("--learn", is_flag=True, help="Learn autopar's map from the small tasks in the journal.")
@options
def main(
    tasks: tuple[str, ...],
    methods: tuple[str, ...],
    seeds: int,
    first_seed: int,
    seconds: float | None,
    choices: bool,
    rivals: bool,
    networks: tuple[str, ...],
    path: Path,
    learn: bool,
    check: bool,
    json_file: str | None,
    save: bool,
) -> None:
    """What lossy synchronization costs in quality, and what is chosen under a budget."""
    begun = time.monotonic()

    def is_late() -> bool:
        return seconds is not None and time.monotonic() - begun > seconds

    taken = range(first_seed, first_seed + seeds)
    if rivals:
        _rivals(tasks or JUDGED, taken, path, is_late)
    if choices or rivals:
        report = _choices(tasks or JUDGED, networks or NETWORKS, taken, path, is_late)
    else:
        report = _trainings(tasks or tuple(TASKS), methods or tuple(METHODS), taken, path, is_late)
    if learn:
        learned = shipped_map(Journal(path).outcomes(), probes.read(beside(path, "probes")))
        click.echo(f"learned from {learned.lessons} lessons of {learned.families} families: {learned}")
    command = "python -m benchmarks.budget" + " --choices" * choices
    sys.exit(publish(report, command=command, check=check, json_file=json_file, save=save))


def _trainings(
    tasks: Sequence[str], methods: tuple[str, ...], seeds: Iterable[int], path: Path, is_late: Callable[[], bool]
) -> Report:
    """Probes and trainings that are missing, and the report of all."""
    journal, probed = Journal(path), beside(path, "probes")
    for seed, name in itertools.product(seeds, tasks):
        if is_late():
            break
        each = tuple(m for m in methods if defined(name, m))
        if missing := probes.missing(probed, name, seed, each):
            click.echo(f"{name}, seed {seed}: {len(missing)} probes", err=True)
            probes.start(name, missing, seed, probed)
        known = journal.outcomes()
        if missing := tuple(m for m in each if (name, m, seed) not in known):
            click.echo(f"{name}, seed {seed}: {len(missing)} trainings", err=True)
            training.start(name, missing, seed, path)
    return table.report(o for o in journal.outcomes().values() if o.task in tasks)


def _rivals(tasks: Sequence[str], seeds: Iterable[int], path: Path, is_late: Callable[[], bool]) -> None:
    """Trainings of rivals that are missing."""
    journal = beside(path, "rivals")
    for seed, name in itertools.product(seeds, tasks):
        missing = [r for r in RIVALS if (name, r, seed) not in rival_trainings.read(journal)]
        if missing and not is_late():
            click.echo(f"{name}, seed {seed}: {len(missing)} rivals", err=True)
            rival_trainings.start(name, missing, seed, journal)


def _choices(
    tasks: Sequence[str], networks: Sequence[str], seeds: Iterable[int], path: Path, is_late: Callable[[], bool]
) -> Report:
    """Cells that are missing, and the report of all."""
    journal = beside(path, "choices")
    for seed, name in itertools.product(seeds, tasks):
        known = cells.read(journal)
        each = [c for c in itertools.product(networks, cells.BUDGETS) if (name, *c, seed) not in known]
        if each and not is_late():
            click.echo(f"{name}, seed {seed}: {len(each)} choices", err=True)
            cells.start(name, each, seed, journal)
    judged = [c for c in cells.read(journal).values() if c.task in tasks]
    rivals = rival_trainings.read(beside(path, "rivals")).values()
    return choices_table.choices_report(judged, Journal(path).outcomes().values(), rivals)


def beside(path: Path, what: str) -> Path:
    """A journal beside that of the trainings."""
    return path.with_name(f"{path.stem}-{what}.jsonl")


def defined(task: str, method: str) -> bool:
    """Whether a method is defined for the task's optimizer."""
    model = TASKS[task].build(0)
    return METHODS[method].takes(TASKS[task].optimizer(model))


if __name__ == "__main__":
    main()
