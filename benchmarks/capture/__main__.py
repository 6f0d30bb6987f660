"""Whether autopar trains the models that people take from libraries.

    python -m benchmarks.capture [--check] [--save] [--only MODEL or FAMILY] [--journal FILE]

Every model is trained on two ranks in both modes under three plans, and compared with plain PyTorch (see `table`).
Processes are replaced where one dies or hangs, so that no model can take the others down. Outcomes are kept in the
journal: a run that was stopped goes on where it was. About an hour in all.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue

import click

from benchmarks.capture.families import chosen, family_of, missing
from benchmarks.capture.journal import Journal, revision
from benchmarks.capture.outcome import Outcome
from benchmarks.capture.table import report
from benchmarks.capture.team import WORLD_SIZE, Team
from benchmarks.harness import options, publish

REQUIRED = {
    "huggingface": 200,
    "timm": 60,
    "torchvision": 20,
    "diffusers": 6,
    "geometric": 6,
    "audio": 6,
    "peft": 6,
}
"""Models of each family that must be tried for the check."""


def outcomes(names: Sequence[str], teams: int) -> Iterator[Outcome]:
    """Tries every model, with so many teams at a time; yields outcomes as they come."""
    waiting, lock, found = list(names), threading.Lock(), SimpleQueue[Outcome]()

    def work() -> None:
        team = Team()
        while True:
            with lock:
                name = waiting.pop(0) if waiting else None
            if name is None:
                return team.stop()
            found.put(team.attempt(name))

    for _ in range(teams):
        threading.Thread(target=work, daemon=True).start()
    for _ in names:
        yield found.get()


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--only", multiple=True, metavar="NAME", help="This model or family alone; may be repeated.")
@click.option("--teams", default=max((os.cpu_count() or 1) // WORLD_SIZE, 1), help="Models that are tried at a time.")
@click.option(
    "--journal",
    default="benchmarks/results/capture.jsonl",
    type=click.Path(path_type=Path),
    help="Where outcomes are kept.",
)
@click.option("--again", is_flag=True, help="Try again what the journal has.")
@click.option("--any-revision", is_flag=True, help="Take outcomes of other revisions of autopar, too.")
@options
def main(
    only: tuple[str, ...],
    teams: int,
    journal: Path,
    again: bool,
    any_revision: bool,
    check: bool,
    json_file: str | None,
    save: bool,
) -> None:
    """Trains models of libraries on two ranks, in two modes under three plans."""
    absent = missing()
    try:
        names = [e.name for e in chosen(only) if family_of(e.name) not in absent]
    except KeyError as e:
        raise click.UsageError(e.args[0]) from e
    kept = Journal(journal, revision())
    known = {} if again else kept.outcomes(any_revision)
    found = [known[n] for n in names if n in known]
    if found:
        click.echo(f"{len(found)} of {len(names)} are in {journal}", err=True)
    start = time.monotonic()
    for outcome in outcomes([n for n in names if n not in known], teams):
        kept.add(outcome)
        found.append(outcome)
        words = f"{outcome.kind}{', eager' if outcome.eager else ''} {outcome.said}".strip()
        took = f"{time.monotonic() - start:5.0f} s"
        click.echo(f"[{took}, {len(found)}/{len(names)}] {outcome.name}: {words} ({outcome.seconds:.0f} s)", err=True)
    result = report(found, {} if only else REQUIRED, absent)
    asked_for = [*(f"--only {word}" for word in only), *(["--any-revision"] if any_revision else [])]
    command = " ".join(["python -m benchmarks.capture", *asked_for])
    sys.exit(publish(result, command=command, check=check, json_file=json_file, save=save))


if __name__ == "__main__":
    main()
