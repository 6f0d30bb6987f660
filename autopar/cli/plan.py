"""`autopar plan`: make a plan for a model and a cluster, offline."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from autopar.cli.console import (
    Ticker,
    calibration_option,
    detail,
    json_option,
    output_option,
    progress,
    quiet_libraries,
    result,
    standard_options,
)
from autopar.cli.constraints import constraint_options
from autopar.cli.model_argument import OPTIMIZERS, ModelArgument, chosen_optimizer, weights_option, with_model
from autopar.cli.precision import autocast_option, dtype_option

if TYPE_CHECKING:
    from autopar.spec.calibration import Calibration
    from autopar.spec.cluster import ClusterSpec
    from autopar.spec.plan import Fidelity, Plan

FIDELITIES = ("exact", "rounded", "compressed", "stale", "local")


@click.command("plan")
@click.argument("model")
@click.option(
    "--cluster", metavar="FILE|local:N", help="Cluster description, or N local ranks. Default: that of --plan."
)
@output_option
@click.option("--strategy", metavar="NAME", help="Take this hand-written plan (ddp, ...) instead of searching.")
@click.option(
    "--plan", "given", metavar="FILE", help="Price this plan, edited by hand, and label it, instead of searching."
)
@click.option(
    "--fidelity",
    type=click.Choice(FIDELITIES),
    default="exact",
    show_default=True,
    help="How far a plan may depart from the single-process result.",
)
@click.option(
    "--late-parameters",
    is_flag=True,
    help="Allow plans that leave updated parameters on their way while the next step begins.",
)
@click.option(
    "--time-budget",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="How long the search may take.",
)
@click.option(
    "--optimizer",
    type=click.Choice(OPTIMIZERS),
    help="Default: the factory's own, else adamw. none: a drop-in module that leaves synchronized gradients.",
)
@constraint_options
@dtype_option
@autocast_option
@calibration_option
@click.option(
    "--measure-compute",
    is_flag=True,
    help="Time the model's passes on this machine, which stands for the cluster's devices of its kind.",
)
@weights_option
@json_option
@standard_options
@click.pass_context
def command(
    context: click.Context,
    model: str,
    cluster: str | None,
    output: Path | None,
    strategy: str | None,
    given: str | None,
    fidelity: str,
    late_parameters: bool,
    time_budget: float,
    optimizer: str | None,
    memory_reserve: float,
    pin: dict[str, str],
    forbid: tuple[str, ...],
    dtype: str | None,
    autocast: str | None,
    calibration: str | None,
    measure_compute: bool,
    weights: bool | None,
    as_json: bool,
) -> None:
    """Make a plan for MODEL on a cluster. Neither the cluster nor a process group is needed.

    The model is made without its weights where its factory allows that. The plan in words goes to stdout; with --json,
    the plan itself. A plan that was edited by hand is priced again, and
    labelled, with --plan edited.json -o edited.json.
    """
    edited = _edited(context, given)
    if cluster is None and edited is None:
        raise click.UsageError("Missing option '--cluster': a cluster description, or local:4 for four local ranks")
    spec = edited.cluster.cluster if cluster is None and edited is not None else load_cluster(cluster or "")
    if measure_compute and weights is False:
        raise click.UsageError("--measure-compute runs the model, which takes its weights: leave --no-weights out")
    measured = load_calibration(calibration)
    progress(f"importing {model}")
    from autopar.api import plan as make_plan
    from autopar.formatting import duration

    def planned(made: ModelArgument) -> Plan:
        chosen = chosen_optimizer(made, optimizer)
        detail(f"optimizer: {type(chosen).__name__ if chosen else 'none'}")
        progress(f"planning {type(made.model).__name__} on {spec.summary}")
        return make_plan(
            made.model,
            spec,
            example_inputs=made.example_inputs,
            loss_fn=made.loss_fn,
            optimizer=chosen,
            mode="module" if chosen is None else "step",
            fidelity=cast("Fidelity", fidelity),
            late_parameters=late_parameters,
            memory_reserve=memory_reserve,
            pin=pin,
            forbid=forbid,
            strategy=strategy,
            calibration=measured,
            measure_compute=measure_compute,
            time_budget_s=time_budget,
            plan=edited,
            progress=lambda what, priced, best_s: ticker(f"{what}: {priced} plans priced, best {duration(best_s)}"),
        )

    started, ticker = time.monotonic(), Ticker()
    with quiet_libraries():
        plan = with_model(model, True if measure_compute else weights, planned, dtype, autocast)
    ticker.close()
    progress(f"planned in {time.monotonic() - started:.1f} s")
    if output is not None:
        plan.save(output)
    result(plan.model_dump_json(indent=1) if as_json else plan.explain())
    progress(f"wrote {output}" if output is not None else "the plan was not kept; -o plan.json writes it")


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


def load_cluster(argument: str) -> ClusterSpec:
    """Reads `--cluster`: a file, or `local:4`. Raises `ClusterSpecError`."""
    from autopar.errors import ClusterSpecError
    from autopar.spec.cluster import ClusterSpec

    if argument == "local" or argument.startswith("local:"):
        digits = argument.removeprefix("local").removeprefix(":")
        if not re.fullmatch(r"[1-9][0-9]{0,4}", digits):
            raise ClusterSpecError(f"--cluster is '{argument}', expected local:N with N ranks from 1 on, as local:4")
        return ClusterSpec.local(int(digits))
    if not Path(argument).exists():
        raise ClusterSpecError(
            f"--cluster: there is no file '{argument}'; give a cluster description, or local:4 for four local ranks"
        )
    return ClusterSpec.load(argument)


def load_calibration(path: str | None) -> Calibration | None:
    """Reads `--calibration`. Raises `SpecError`."""
    from autopar.spec.calibration import Calibration

    return None if path is None else Calibration.load(path)
