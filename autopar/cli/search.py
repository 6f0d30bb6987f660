"""`autopar search`: look for a plan for longer than `autopar plan` does, with a journal that can be resumed."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from autopar.cli.console import check_apart, progress, writable, writable_path
from autopar.cli.constraints import part
from autopar.cli.described import is_local, load_cluster
from autopar.cli.interrupt import Interrupts
from autopar.cli.model_argument import model_file
from autopar.cli.plan import Telling, show
from autopar.cli.planning import Asked, planning_options
from autopar.cli.trial_ranks import Where, measuring, under_torchrun

TIME_BUDGET_S = 60.0
EVALUATIONS = 5000
JOURNAL_SUFFIX = ".journal.jsonl"
TRIALS_SUFFIX = ".trials.jsonl"
TRIALS_LOG = (
    "Append every trial to this file, and learn from those of this cluster that it holds. Default: that of -o, with "
    f"{TRIALS_SUFFIX} behind its name."
)
AGAIN = 0.25
"""Part of the search's time and evaluations that each further one may take, once trials have taught something."""


def _searcher(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Checks the name when one is given: what lists them takes long to import."""
    if value is not None:
        from autopar.search import SEARCHERS

        if value not in SEARCHERS:
            raise click.BadParameter(
                f"no searcher is called '{value}'; there are {', '.join(SEARCHERS)}", context, parameter
            )
    return value


def _check_budget(
    budget: float | None, evidence: Path | None, steps: int | None, trials: int | None, asked: Asked
) -> None:
    """Raises `UsageError` where the budget lacks something, or something else already decides what it is to decide."""
    if budget is None:
        if evidence is not None:
            raise click.UsageError("--evidence says what plans lose, and not how much they may: pass --budget 1%, say")
        return
    from autopar.quality.budget import LEAST_STEPS

    if not budget:
        raise click.UsageError("--budget 0% allows no loss: that is --fidelity exact, without a budget")
    if steps is None or steps < LEAST_STEPS:
        raise click.UsageError(
            f"--budget needs --steps N, of the whole training, {LEAST_STEPS} at least: a part of them is exact"
        )
    if trials is not None or asked.fidelity != "exact":
        other = "--trials" if trials is not None else f"--fidelity {asked.fidelity}"
        raise click.UsageError(f"--budget decides by itself what may be lost, and how fast it is: leave {other} out")
    if asked.optimizer == "none":
        raise click.UsageError("--budget needs the optimizer: methods that lose something keep what they have not sent")


def _beside(output: Path, suffix: str) -> Path:
    """The file beside that of -o, checked as that is."""
    return writable_path(output.with_name(output.stem + suffix), click.get_current_context())


@click.command("search")
@click.argument("model")
@click.option("--cluster", metavar="FILE|local:N", required=True, help="Cluster description, or N local ranks.")
@click.option(
    "--searcher",
    metavar="NAME",
    callback=_searcher,
    help="combined (default), local, dynamic, stretches, greedy, evolutionary, annealing, random, or exhaustive for up "
    "to 8 parameters.",
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
@click.option(
    "--trials", type=click.IntRange(min=1), metavar="N", help="Run at most N plans for real, and learn from them."
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="How many steps the training will have: run plans only while that is expected to pay.",
)
@click.option(
    "--budget",
    metavar="PERCENT",
    callback=lambda context, parameter, value: None if value is None else part(context, parameter, value),
    help="The part of what exact training gains by your metric that a plan may lose over --steps N steps: methods that "
    "lose something are taken where --evidence shows that they keep to it.",
)
@click.option(
    "--evidence",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A plan that optimize(..., budget=...) chose for this model, with what its probes and pilots found.",
)
@click.option("--lab", is_flag=True, help="Run them on the cluster emulated on this machine, as root.")
@click.option(
    "--launch",
    metavar="COMMAND",
    help="Run them on ranks that this starts: 'srun -N 4 --ntasks-per-node 8', 'mpirun -np 4'.",
)
@click.option(
    "--trials-folder",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="For --launch: a folder that all hosts see. Default: that of -o.",
)
@click.option("--trials-log", metavar="FILE", callback=writable, help=TRIALS_LOG)
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
    trials: int | None,
    steps: int | None,
    budget: float | None,
    evidence: Path | None,
    lab: bool,
    launch: str | None,
    trials_folder: Path | None,
    trials_log: Path | None,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Search a plan for MODEL on a cluster, and keep a journal of all that is priced.

    The same seed and evaluations give the same plan. A search that was killed goes on with --resume, and ends as it
    would have ended. Ctrl-C ends it with the best plan so far, and exit code 130.

    With --trials or --steps, the best plans are run for real, in turns, and the search goes on with what they taught:
    on the ranks of torchrun's job where it starts this command, on ranks that --launch starts, on the emulated
    cluster with --lab, or on this machine with --cluster local:N. The plan says whether it rests on trials or on its
    prediction.

    With --budget 1% --steps N, plans that lose something are ranked by their time over all N steps, and the fastest is
    taken that the evidence vouches for. Without --evidence, it says what has to be run.
    """
    spec, asked = load_cluster(cluster), Asked.of(options)
    if journal is None and output is not None:
        journal = _beside(output, JOURNAL_SUFFIX)
    if resume and journal is None:
        raise click.UsageError("--resume needs the journal: --journal FILE, or the -o FILE that it stands beside")
    if resume and asked.measure_compute:
        raise click.UsageError(
            "--resume takes prices from the journal, and --measure-compute would measure other ones: leave one out"
        )
    _check_budget(budget, evidence, steps, trials, asked)
    from autopar.search import Budget, SearchOptions
    from autopar.search.searchers import DEFAULT

    wanted = trials is not None or (steps is not None and budget is None)
    if wanted and asked.global_batch is not None:
        raise click.UsageError(
            "trials (--trials, or --steps without --budget) run the example's batch on every rank, and --global-batch "
            "shares out others: leave one out"
        )
    if wanted and trials_log is None and output is not None:
        trials_log = _beside(output, TRIALS_SUFFIX)
    read = {
        "MODEL": model_file(model),
        "--cluster": cluster,
        "--calibration": asked.calibration,
        "--evidence": evidence,
    }
    check_apart(read, {"-o": output, "--journal": journal, "--trials-log": trials_log})
    if time_budget is None:
        time_budget = TIME_BUDGET_S if evaluations is None else float("inf")
    stop, all_failed = threading.Event(), threading.Event()
    how = SearchOptions(searcher or DEFAULT, evaluations or EVALUATIONS, journal, resume, stop=stop)
    if wanted and under_torchrun() and os.environ["RANK"] != "0":
        from autopar.trials.far import attend_job

        return attend_job()
    if output is not None:
        trials_folder = trials_folder or output.resolve().parent
    where = Where(is_local(cluster), lab, launch, trials_folder)
    if budget is not None:
        from autopar.quality.on_evidence import OnEvidence

        assert steps is not None, "_check_budget has seen to it"
        spent = Budget(AGAIN * time_budget, max(1, int(AGAIN * how.evaluations)), stop)
        how = replace(how, chooses=OnEvidence(budget, steps, evidence, spent, seed))
    if resume and journal is not None and not journal.exists():
        progress(f"there is no journal {journal} to resume: the search begins anew")
    with Interrupts(stop) as interrupts, contextlib.ExitStack() as stack:
        started, tell = time.monotonic(), Telling(interrupts)
        if wanted:
            measure = stack.enter_context(measuring(model, spec, asked, where))
            again = Budget(AGAIN * time_budget, max(1, int(AGAIN * how.evaluations)), stop)
            from autopar.trials import Trials

            finalists = Trials(measure, trials, steps, trials_log, again, how.searcher, tell, seed, stop, all_failed)
            how = replace(how, finalists=finalists)
        plan = asked.plan(
            model,
            spec,
            time_budget_s=time_budget,
            tell=tell,
            seed=seed,
            search=how,
            trials=trials_log,
        )
    tell.ticker.close()
    if wanted and plan.measured is None:
        why = "all trials failed" if all_failed.is_set() else "no trial was expected to pay"
        progress(f"the plan rests on its prediction: {why}")
    if wanted and trials_log is not None and trials_log.exists():
        progress(f"the trials are kept in {trials_log}")
    progress(f"{tell.priced} plans priced in {time.monotonic() - started:.1f} s")
    if journal is not None:
        progress(f"the journal is {journal}")
    show(plan, output, as_json, stop)
