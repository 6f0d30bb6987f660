"""`autopar explain`: a plan in words."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from autopar.cli.console import (
    calibration_option,
    json_option,
    progress,
    quiet_libraries,
    result,
    result_json,
    result_table,
    standard_options,
    trials_option,
    what_if_option,
)
from autopar.cli.model_argument import OPTIMIZERS, with_model
from autopar.cli.precision import autocast_option, dtype_option

if TYPE_CHECKING:
    from pathlib import Path

    from autopar.spec.plan import Fidelity, Plan


@click.command("explain")
@click.argument("plan")
@click.option("--parameter", metavar="NAME", help="Only what happens to this parameter.")
@click.option("--diff", "other", metavar="OTHER", help="What changes from PLAN to this plan.")
@click.option("--passes", is_flag=True, help="With --model: what each pass does on the way to the step that runs.")
@what_if_option
@click.option("--model", metavar="MODEL", help="The model of the plan.")
@click.option("--optimizer", type=click.Choice(OPTIMIZERS), help="With --model: as given to `autopar plan`.")
@dtype_option
@autocast_option
@calibration_option
@trials_option
@json_option
@standard_options
def command(
    plan: str,
    parameter: str | None,
    other: str | None,
    passes: bool,
    what_if: bool,
    model: str | None,
    optimizer: str | None,
    dtype: str | None,
    autocast: str | None,
    calibration: str | None,
    trials: Path | None,
    as_json: bool,
) -> None:
    """Say in words what the plan in file PLAN does, at what predicted cost, and why."""
    if (parameter is not None) + (other is not None) + passes + what_if > 1:
        raise click.UsageError("give one of --parameter, --diff, --passes and --what-if")
    if (passes or what_if) != (model is not None):
        raise click.UsageError(
            "--passes and --what-if need --model, whose graph they are about, and --model is for them"
        )
    if calibration is not None and not what_if:
        raise click.UsageError("--calibration is for --what-if: the plan's own prediction is what it records")
    if trials is not None and not what_if:
        raise click.UsageError("--trials is for --what-if: the plan's own prediction is what it records")
    from autopar.report.difference import diff
    from autopar.report.parameter import explain_parameter, find_parameter
    from autopar.spec.plan import Plan

    loaded = Plan.load(plan)
    if other is not None:
        against = Plan.load(other)
        if as_json:
            result_json(_difference(loaded, against))
        else:
            result(diff(loaded, against))
    elif parameter is not None:
        text = explain_parameter(loaded, parameter)
        if as_json:
            name = find_parameter(loaded, parameter).name
            result_json([row for row in _parameters(loaded) if row["parameter"] == name])
        else:
            result(text)
    elif model is not None and what_if:
        _what_if(loaded, model, optimizer, (dtype, autocast), calibration, trials, as_json)
    elif model is not None:
        _passes(loaded, model, optimizer, dtype, autocast, as_json)
    else:
        _say_unknown(loaded, plan)
        if as_json:
            return result_json(_whole(loaded))
        from autopar.spec.explain import explain

        result(explain(loaded, _kept(loaded)))


def _say_unknown(plan: Plan, path: str) -> None:
    """Says which strategies are not known here. That is no mistake where they are the user's own, and only training
    imports the module that registers them."""
    from autopar.errors import did_you_mean
    from autopar.strategies import STRATEGIES

    groups: dict[str, list[int]] = {}
    for index, group in enumerate(plan.groups):
        groups.setdefault(group.strategy, []).append(index)
    for name in (n for n in groups if n not in STRATEGIES):
        at, *more = groups[name]
        others = f" and {len(more)} more" if more else ""
        progress(
            f"{path}: group {at}{others}: strategy '{name}' is not known here{did_you_mean(name, STRATEGIES) or ';'} "
            "what it promises is not looked at. One of your own is known where the module that registers it is imported"
        )


def _kept(plan: Plan) -> Fidelity | None:
    """What the groups of a plan promise; `None` where a strategy, or the cluster, is not known here."""
    from autopar.errors import SpecError
    from autopar.ops.context import Context
    from autopar.strategies.lowering import fidelity_of

    try:
        context = Context(plan.cluster.world_size, late_parameters=True).on(plan.cluster.cluster)
        return fidelity_of(plan.groups, context)
    except SpecError:
        return None


def _passes(
    plan: Any, model: str, optimizer: str | None, dtype: str | None, autocast: str | None, as_json: bool
) -> None:
    from autopar.cli.estimate import lowered
    from autopar.formatting import number_of

    with quiet_libraries():
        graph, program = with_model(model, None, lambda made: lowered(plan, made, optimizer), dtype, autocast)
    sent = sum(call.is_pending for call in program.calls)
    rows = [asdict(done) for done in graph.passes]
    lowering = {"groups": len(program.groups), "operations": len(program.calls), "collectives": sent}
    if as_json:
        result_json({"passes": rows, "lowering": lowering, "nodes": len(graph.compute)})
        return
    header = ("pass", "what it does", "added", "removed", "changed", "moved")
    result_table(header, [[str(value) for value in row.values()] for row in rows], "llrrrr")
    groups = number_of(lowering["groups"], "group")
    result(
        f"lowering: the strategies of {groups} emit {lowering['operations']} operations, {sent} of them collectives, "
        f"placed between {len(graph.compute)} nodes"
    )


def _what_if(
    plan: Plan,
    model: str,
    optimizer: str | None,
    precision: tuple[str | None, str | None],
    calibration: str | None,
    trials: Path | None,
    as_json: bool,
) -> None:
    from autopar.cli.described import load_calibration
    from autopar.cli.estimate import Fitted, priced
    from autopar.report.what_if import what_if_data, what_if_text

    measured = load_calibration(calibration)
    with quiet_libraries():
        found = with_model(
            model, None, lambda made: Fitted.of(plan, made, optimizer).what_if(measured, trials, priced), *precision
        )
    if as_json:
        result_json(what_if_data(plan, found))
    else:
        result(what_if_text(plan, found))


def _whole(plan: Any) -> dict[str, Any]:
    from autopar.spec.summary import group_rows, ordered_alternatives, verdict

    return {
        "plan": plan.name,
        "digest": plan.digest,
        "model": plan.model.name,
        "cluster": plan.cluster.summary,
        "world_size": plan.cluster.world_size,
        "fidelity": plan.fidelity,
        "fidelity_of_groups": _kept(plan),
        "edited_since_priced": None if plan.priced is None else plan.was_edited,
        "verdict": verdict(plan),
        "prediction": plan.prediction.model_dump() if plan.prediction else None,
        "measured": plan.own_measured.model_dump() if plan.own_measured else None,
        "memory": plan.memory.model_dump() if plan.memory else None,
        "alternatives": [a.model_dump() for a in ordered_alternatives(plan)],
        "groups": [
            {
                "group": row.first,
                "strategy": row.strategy,
                "bytes": row.num_bytes,
                "reason": row.reason,
                "runner_up": row.runner_up.model_dump() if row.runner_up else None,
            }
            for row in group_rows(plan, merge=False)
        ],
        "parameters": _parameters(plan),
    }


def _difference(a: Any, b: Any) -> dict[str, Any]:
    from autopar.report.difference import difference

    found = difference(a, b)
    return {
        "from": a.digest,
        "to": b.digest,
        "same_program": found.same_program,
        "facts": found.facts,
        "changes": [
            {"parameters": [p.name for p in c.parameters], "from": c.before, "to": c.after} for c in found.changes
        ],
    }


def _parameters(plan: Any) -> list[dict[str, Any]]:
    from autopar.report.parameter import parameter_rows

    return [
        {
            "parameter": row.parameter.name,
            "slice": None if row.piece.whole else [row.piece.dim, row.piece.start, row.piece.stop],
            "shape": list(row.parameter.shape),
            "dtype": row.parameter.dtype,
            "trainable": row.parameter.trainable,
            "bytes": row.num_bytes,
            "group": row.group,
            "strategy": row.strategy or None,
            "options": dict(row.options),
            "reason": row.reason,
        }
        for row in parameter_rows(plan)
    ]
