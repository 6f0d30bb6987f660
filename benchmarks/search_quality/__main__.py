"""How good the plans are that the search finds.

    python -m benchmarks.search_quality [--check] [--save] [--only PART or PART/CASE] [--journal FILE] [--any-version]

Parts: `optimum`, small random jobs beside the best plan there is; `random`, the suite's workloads beside random search
of equal budget; `large`, many ranks beside a hundred times the budget; `resume`, searches that are killed; `lab`,
measured beside 100 measured plans; and `pay`, trainings with trials beside trainings without. The last two need root
and are run where they are asked for. What was found is kept in the journal: a run that was stopped goes on where it
was.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from benchmarks.harness import Report, options, publish
from benchmarks.search_quality import against_random, lab, large, optimum, pay, resume
from benchmarks.search_quality.part import COLUMNS, Kept, Part, asked, version

PARTS: dict[str, Part] = {
    "optimum": optimum.run,
    "random": against_random.run,
    "large": large.run,
    "resume": resume.run,
    "lab": lab.run,
    "pay": pay.run,
}
JOURNAL = Path("benchmarks/results/search-quality.jsonl")
WITHOUT_ROOT = [name for name in PARTS if name not in ("lab", "pay")]


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--only", multiple=True, metavar="PART[/CASE]", help="This part or case alone; may be repeated.")
@click.option("--journal", default=JOURNAL, type=click.Path(path_type=Path), help="Where figures are kept.")
@click.option("--any-version", is_flag=True, help="Take figures of other versions of autopar, too.")
@options
def main(
    only: tuple[str, ...],
    journal: Path,
    any_version: bool,
    check: bool,
    json_file: str | None,
    save: bool,
) -> None:
    """Compares what the search finds with the best there is, with random plans, and with far larger budgets."""
    try:
        wanted = asked(only, list(PARTS), WITHOUT_ROOT)
    except KeyError as e:
        raise click.UsageError(e.args[0]) from e
    report = Report("search-quality", "The plans that the search finds", COLUMNS)
    kept = Kept(journal, version(), any_version, lambda line: click.echo(line, err=True))
    for name, cases in wanted.items():
        PARTS[name](report, kept, cases)
    if any_version:
        report.notes.append("Figures are the newest of each case, and may be those of several versions of autopar.")
    asked_for = [*(f"--only {word}" for word in only), *(["--any-version"] if any_version else [])]
    command = " ".join(["python -m benchmarks.search_quality", *asked_for])
    sys.exit(publish(report, command=command, check=check, json_file=json_file, save=save))


if __name__ == "__main__":
    main()
