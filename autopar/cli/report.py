"""`autopar report`: a plan as one HTML file."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autopar.cli.console import (
    calibration_option,
    check_apart,
    detail,
    json_option,
    output_option,
    progress,
    quiet_libraries,
    result,
    result_json,
    standard_options,
    trials_option,
    what_if_option,
    writable,
    writable_path,
)
from autopar.cli.described import load_calibration
from autopar.cli.model_argument import OPTIMIZERS, ModelArgument, model_file, with_model
from autopar.cli.precision import autocast_option, dtype_option

if TYPE_CHECKING:
    from autopar.cost_models.base import Estimate
    from autopar.search.sensitivity import Sensitivity
    from autopar.spec.plan import Plan


@click.command("report")
@click.argument("plan")
@output_option
@click.option("--model", metavar="MODEL", help="The model of the plan: adds the timeline and the figures by rank.")
@click.option("--optimizer", type=click.Choice(OPTIMIZERS), help="With --model: as given to `autopar plan`.")
@dtype_option
@autocast_option
@calibration_option
@trials_option
@what_if_option
@click.option(
    "--trace",
    metavar="FILE",
    callback=writable,
    help="With --model: write the predicted timeline as a Chrome trace too.",
)
@click.option(
    "--measured",
    metavar="NAME=SECONDS",
    multiple=True,
    help="A measured step time of this plan, or of an alternative (ddp=0.41). Can be repeated.",
)
@click.option("--open", "open_page", is_flag=True, help="Open the page in a browser.")
@json_option
@standard_options
def command(
    plan: str,
    output: Path | None,
    model: str | None,
    optimizer: str | None,
    dtype: str | None,
    autocast: str | None,
    calibration: str | None,
    trials: Path | None,
    what_if: bool,
    trace: Path | None,
    measured: tuple[str, ...],
    open_page: bool,
    as_json: bool,
) -> None:
    """Write the plan in file PLAN as one self-contained HTML file, by default report.html beside it."""
    if trace is not None and model is None:
        raise click.UsageError("--trace needs --model: the timeline is simulated from the model's graph")
    if trials is not None and model is None:
        raise click.UsageError("--trials needs --model: they are for pricing anew, from the model's graph")
    if what_if and model is None:
        raise click.UsageError("--what-if needs --model: circumstances are priced from the model's graph")
    times = _measured(measured)
    from autopar.cli.estimate import Fitted, priced
    from autopar.report import build_report, write_trace
    from autopar.spec.plan import Plan

    loaded = Plan.load(plan)
    _check_names(times, loaded)
    beside = Path(plan).resolve().parent / "report.html"
    target = output or writable_path(beside, click.get_current_context())
    read = {"PLAN": plan, "MODEL": model_file(model), "--calibration": calibration, "--trials": trials}
    check_apart(read, {"-o": target, "--trace": trace})
    estimate, found = None, None
    if model is not None:
        progress(f"importing {model} and simulating one step")
        measured_there = load_calibration(calibration)

        def simulated(made: ModelArgument) -> tuple[Estimate, Sensitivity | None]:
            fitted = Fitted.of(loaded, made, optimizer)
            if not what_if:
                return fitted.estimate(measured_there, trials), None
            return fitted.estimate(measured_there, trials), fitted.what_if(measured_there, trials, priced)

        with quiet_libraries():
            estimate, found = with_model(model, None, simulated, dtype, autocast)
    build_report(
        loaded,
        target,
        estimate=estimate,
        measured=times,
        what_if=found,
        commands=[f"autopar run {shlex.quote(plan)} train.py"],
    )
    detail(f"{target.stat().st_size / 2**20:.1f} MiB")
    if trace is not None and estimate is not None:
        write_trace(estimate, trace)
    if as_json:
        result_json({"report": str(target), "trace": None if trace is None else str(trace)})
    else:
        result(f"wrote {target}")
        if trace is not None:
            result(f"wrote {trace}")
    if open_page:
        click.launch(str(target))


def _measured(pairs: tuple[str, ...]) -> dict[str, float]:
    times = {}
    for pair in pairs:
        name, equals, value = pair.rpartition("=")
        try:
            times[name] = float(value)
        except ValueError:
            equals = ""
        if not equals or not name or not 0 < times[name] < float("inf"):
            raise click.UsageError(f"--measured '{pair}': expected NAME=SECONDS, as ddp=0.41")
    return times


def _check_names(times: dict[str, float], plan: Plan) -> None:
    """Refuses times of what is neither the plan, nor one that it was compared with, nor DDP."""
    from autopar.errors import among
    from autopar.spec.summary import BASELINE

    names = list(dict.fromkeys((plan.name, BASELINE, *(a.name for a in plan.alternatives), *plan.left_out)))
    for name in times:
        if name not in names:
            told = among(name, names, "plans that it knows")
            raise click.UsageError(f"--measured '{name}': neither this plan nor an alternative is called so{told}")
