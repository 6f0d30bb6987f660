"""`autopar search`: look for a plan for longer than `autopar plan` does, with a journal that can be resumed."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import click

from autopar.cli.console import progress, writable
from autopar.cli.described import load_cluster
from autopar.cli.interrupt import Interrupts
from autopar.cli.plan import Telling, show
from autopar.cli.planning import Asked, planning_options

TIME_BUDGET_S = 60.0
EVALUATIONS = 5000
JOURNAL_SUFFIX = ".journal.jsonl"


def _searcher(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Checks the name when one is given: what lists them takes long to import."""
    if value is not None:
        from autopar.search import SEARCHERS

        if value not in SEARCHERS:
            raise click.BadParameter(
                f"no searcher is called '{value}'; there are {', '.join(SEARCHERS)}", context, parameter
            )
    return value


@click.command("search")
@click.argument("model")
@click.option("--cluster", metavar="FILE|local:N", required=True, help="Cluster description, or N local ranks.")
@click.option(
    "--searcher",
    metavar="NAME",
    callback=_searcher,
    help="combined (default), local, dynamic, greedy, evolutionary, annealing, random, or exhaustive for up to 8 "
    "parameters.",
)
@click.option(
    "--time-budget",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help=f"How long the search may take. Default: {TIME_BUDGET_S:.0f}, or as long as it takes with --evaluations.",
)
@click.option(
    "--evaluations",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"Plans priced at most, beside those that a person would write. Default: {EVALUATIONS}.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the random numbers.")
@click.option(
    "--journal",
    metavar="FILE",
    callback=writable,
    help=f"Append every priced plan to this file. Default: that of -o, with {JOURNAL_SUFFIX} behind its name.",
)
@click.option("--resume", is_flag=True, help="Go on where the same search was cut short, as its journal has it.")
@planning_options
def command(
    model: str,
    cluster: str,
    searcher: str | None,
    time_budget: float | None,
    evaluations: int | None,
    seed: int,
    journal: Path | None,
    resume: bool,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Search a plan for MODEL on a cluster, and keep a journal of all that is priced.

    The same seed and evaluations give the same plan. A search that was killed goes on with --resume, and ends as it
    would have ended. Ctrl-C ends it with the best plan so far, and exit code 130.
    """
    spec, asked = load_cluster(cluster), Asked.of(options)
    if journal is None and output is not None:
        journal = output.with_name(output.stem + JOURNAL_SUFFIX)
    if resume and journal is None:
        raise click.UsageError("--resume needs the journal: --journal FILE, or the -o FILE that it stands beside")
    if resume and asked.measure_compute:
        raise click.UsageError(
            "--resume takes prices from the journal, and --measure-compute would measure other ones: leave one out"
        )
    from autopar.search import SearchOptions
    from autopar.search.searchers import DEFAULT

    stop = threading.Event()
    how = SearchOptions(searcher or DEFAULT, evaluations or EVALUATIONS, journal, resume, stop)
    if time_budget is None:
        time_budget = TIME_BUDGET_S if evaluations is None else float("inf")
    with Interrupts(stop) as interrupts:
        started, tell = time.monotonic(), Telling(interrupts)
        plan = asked.plan(model, spec, time_budget_s=time_budget, tell=tell, seed=seed, search=how)
    tell.ticker.close()
    progress(f"{tell.priced} plans priced in {time.monotonic() - started:.1f} s")
    if journal is not None:
        progress(f"the journal is {journal}")
    show(plan, output, as_json, stop)
