"""`autopar plan`: make a plan for a model and a cluster, offline."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autopar.cli.console import Ticker, check_apart, progress, result, trials_option
from autopar.cli.described import load_cluster
from autopar.cli.interrupt import Interrupts
from autopar.cli.model_argument import model_file
from autopar.cli.planning import Asked, planning_options

if TYPE_CHECKING:
    from autopar.spec.plan import Plan

STOPPED = 130
"""The exit code of a search that was interrupted, after the best plan so far was written."""


@click.command("plan")
@click.argument("model")
@click.option(
    "--cluster", metavar="FILE|local:N", help="Cluster description, or N local ranks. Default: that of --plan."
)
@click.option("--strategy", metavar="NAME", help="Take this hand-written plan (ddp, ...) instead of searching.")
@click.option(
    "--plan", "given", metavar="FILE", help="Price this plan, edited by hand, and label it, instead of searching."
)
@click.option(
    "--time-budget",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="How long the search may take.",
)
@trials_option
@planning_options
def command(
    model: str,
    cluster: str | None,
    strategy: str | None,
    given: str | None,
    time_budget: float,
    trials: Path | None,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Make a plan for MODEL on a cluster. Neither the cluster nor a process group is needed.

    The model is made without its weights where its factory allows that. The plan in words goes to stdout; with --json,
    the plan itself. A plan that was edited by hand is priced again, and
    labelled, with --plan edited.json -o edited.json. Ctrl-C keeps the best plan so far. `autopar search` searches
    longer, with a journal.
    """
    edited = _edited(click.get_current_context(), given)
    if cluster is None and edited is None:
        raise click.UsageError("Missing option '--cluster': a cluster description, or local:4 for four local ranks")
    spec = edited.cluster.cluster if cluster is None and edited is not None else load_cluster(cluster or "")
    asked = Asked.of(options)
    read = {
        "MODEL": model_file(model),
        "--cluster": cluster,
        "--calibration": asked.calibration,
        "--trials": trials,
    }
    check_apart(read, {"-o": output})
    from autopar.search import SearchOptions

    stop = threading.Event()
    with Interrupts(stop) as interrupts:
        started, tell = time.monotonic(), Telling(interrupts)
        plan = asked.plan(
            model,
            spec,
            time_budget_s=time_budget,
            tell=tell,
            strategy=strategy,
            given=edited,
            search=SearchOptions(stop=stop),
            trials=trials,
        )
    tell.ticker.close()
    progress(f"planned in {time.monotonic() - started:.1f} s")
    show(plan, output, as_json, stop)


class Telling:
    """Shows how far a search is, and lets it be stopped from its first plan on."""

    def __init__(self, interrupts: Interrupts) -> None:
        self.ticker = Ticker()
        self.priced = 0
        self._interrupts = interrupts

    def __call__(self, what: str, priced: int, best_s: float) -> None:
        from autopar.formatting import duration

        self._interrupts.begun, self.priced = True, priced
        self.ticker(f"{what}: {priced} plans priced, best {duration(best_s)}")


def show(plan: Plan, output: Path | None, as_json: bool, stop: threading.Event) -> None:
    """Writes the plan, and shows it, also where it cannot be written; ends with exit code 130 where the search was
    interrupted."""
    try:
        if output is not None:
            plan.save(output)
    finally:
        result(plan.model_dump_json(indent=1) if as_json else plan.explain())
    progress(f"wrote {output}" if output is not None else "the plan was not kept; -o plan.json writes it")
    if stop.is_set():
        progress("the search was interrupted: this is the best plan that it had found")
        raise click.exceptions.Exit(STOPPED)


_OF_A_SEARCH = ("strategy", "fidelity", "late_parameters", "time_budget", "pin", "forbid")


def _edited(context: click.Context, path: str | None) -> Plan | None:
    """Reads `--plan`. Raises `PlanError`, and `UsageError` where options of a search go with it."""
    from click.core import ParameterSource

    from autopar.spec.plan import Plan

    if path is None:
        return None
    given = [n for n in _OF_A_SEARCH if context.get_parameter_source(n) is ParameterSource.COMMANDLINE]
    if given:
        said = given[0].replace("_", "-")
        raise click.UsageError(f"--plan is priced as it is: leave --{said} out, which says what to search for")
    return Plan.load(path)
