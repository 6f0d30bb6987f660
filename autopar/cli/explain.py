"""`autopar explain`: a plan in words."""

from __future__ import annotations

from typing import Any

import click

from autopar.cli.console import json_option, result, result_json, standard_options


@click.command("explain")
@click.argument("plan")
@click.option("--parameter", metavar="NAME", help="Only what happens to this parameter.")
@click.option("--diff", "other", metavar="OTHER", help="What changes from PLAN to this plan.")
@json_option
@standard_options
def command(plan: str, parameter: str | None, other: str | None, as_json: bool) -> None:
    """Say in words what the plan in file PLAN does, at what predicted cost, and why."""
    if parameter is not None and other is not None:
        raise click.UsageError("give either --parameter or --diff, not both")
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
    elif as_json:
        result_json(_whole(loaded))
    else:
        result(loaded.explain())


def _whole(plan: Any) -> dict[str, Any]:
    from autopar.spec.summary import group_rows, ordered_alternatives, verdict

    return {
        "plan": plan.name,
        "digest": plan.digest,
        "model": plan.model.name,
        "cluster": plan.cluster.summary,
        "world_size": plan.cluster.world_size,
        "fidelity": plan.fidelity,
        "verdict": verdict(plan),
        "prediction": plan.prediction.model_dump() if plan.prediction else None,
        "alternatives": [a.model_dump() for a in ordered_alternatives(plan)],
        "groups": [
            {"group": row.first, "strategy": row.strategy, "bytes": row.num_bytes, "reason": row.reason}
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
