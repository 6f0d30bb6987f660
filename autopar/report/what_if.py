"""A plan under changed circumstances, in words and as rows; `autopar.search.sensitivity` works it out."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from autopar.formatting import duration, table
from autopar.spec.explain import WIDTH
from autopar.spec.plan import Plan

if TYPE_CHECKING:
    from autopar.search.sensitivity import Outcome, Sensitivity

MOST_DIFFERENCE = 0.01
"""Part of the recorded step time by which a new price may differ from it before that is said."""


def what_if_text(plan: Plan, found: Sensitivity) -> str:
    """A page of plain text: a line for each circumstance, and what becomes of the decision there."""
    rows = what_if_rows(found)
    cells = [(r["circumstance"], r["step"], r["best"], r["best_step"]) for r in rows]
    lines = table(("", "this plan", "best other plan", "its step"), cells, "lrlr")
    page = ["What changes the decision, per optimizer step", lines[0]]
    for line, row in zip(lines[1:], rows, strict=True):
        page.append(line)
        page += textwrap.wrap(row["verdict"], WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    said = [f"{_circumstances(found, a)}: {a}." for a in dict.fromkeys(o.assumption for o in found.outcomes) if a]
    remark = what_if_remark(plan, found)
    page += [line for text in (*said, remark) if text for line in ("", *textwrap.wrap(text, WIDTH))]
    return "\n".join(page) + "\n"


def what_if_rows(found: Sensitivity) -> list[dict[str, Any]]:
    """The circumstances as text, a row each."""
    return [
        {
            "circumstance": outcome.circumstance or outcome.name,
            "step": "" if outcome.step_time_s is None else duration(outcome.step_time_s),
            "best": outcome.best,
            "best_step": "" if outcome.best_step_time_s is None else duration(outcome.best_step_time_s),
            "verdict": outcome.verdict,
            "changes": outcome.changes,
            "assumption": outcome.assumption,
        }
        for outcome in found.outcomes
    ]


def what_if_data(plan: Plan, found: Sensitivity) -> dict[str, Any]:
    """The circumstances as data for `--json`: times in seconds, sizes in bytes."""
    return {
        "plan": plan.name,
        "digest": found.digest,
        "remark": what_if_remark(plan, found) or None,
        "what_if": [_data(outcome) for outcome in found.outcomes],
    }


def what_if_remark(plan: Plan, found: Sensitivity) -> str:
    """What to say where what trials taught is missing from the new prices, or where the plan's is not the one that it
    records; empty where neither is so."""
    if found.is_untaught:
        return (
            "The plan was made with what trials on this cluster taught, of which these prices know nothing: they do "
            "not say which plan is the best. --trials FILE, with the file that `autopar search` kept the trials in, "
            "and the plan's --calibration, if it had one, price it as it was."
        )
    recorded, anew = plan.own_prediction, found.outcomes[0].step_time_s
    if recorded is None or anew is None or abs(anew - recorded.step_time_s) <= MOST_DIFFERENCE * recorded.step_time_s:
        return ""
    return (
        f"Priced anew, the step takes {duration(anew)} as it is; when the plan was made it was "
        f"{duration(recorded.step_time_s)}: with another optimizer, batch, calibration or version of the cost model, "
        "or with measured compute. All rows are priced anew."
    )


def _data(outcome: Outcome) -> dict[str, Any]:
    return {
        "name": outcome.name,
        "circumstance": outcome.circumstance or None,
        "left_out": outcome.left_out or None,
        "step_time_s": outcome.step_time_s,
        "overflow_bytes": outcome.overflow_bytes,
        "best": outcome.best or None,
        "best_step_time_s": outcome.best_step_time_s,
        "lead": outcome.lead,
        "written": outcome.written or None,
        "written_step_time_s": outcome.written_step_time_s,
        "changes": outcome.changes,
        "verdict": outcome.verdict,
        "assumption": outcome.assumption or None,
    }


def _circumstances(found: Sensitivity, assumption: str) -> str:
    names = [outcome.name for outcome in found.outcomes if outcome.assumption == assumption]
    return ", ".join(names)
