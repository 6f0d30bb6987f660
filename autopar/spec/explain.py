"""A plan in words: what was chosen for which parameters, at what predicted cost, and against what.

Plain text without colour, at most `WIDTH` columns, for a terminal, a log or a mail. The same facts as data are
in `autopar.spec.summary`.
"""

from __future__ import annotations

import textwrap

from autopar.formatting import count, duration, mebibytes, number_of, shorten, size, table
from autopar.spec.plan_parts import FIDELITIES, Fidelity, PlanParts, Prediction
from autopar.spec.summary import (
    FIDELITY_MEANING,
    RECOMPUTE_MEANING,
    GroupRow,
    alternative_rows,
    group_rows,
    label_text,
    least_fidelity,
    measured_text,
    parameter_bytes,
    parameters_text,
    provenance_text,
    verdict,
)

WIDTH = 100

_MAX_ALTERNATIVES = 8


def explain(plan: PlanParts, kept: Fidelity | None = None) -> str:
    """The whole plan as a page of plain text. `kept`: what its groups promise, where strategies were asked."""
    return "\n".join([*_header(plan, kept), "", *_predictions(plan), "", *_quality(plan), *_groups(plan)]) + "\n"


def _header(plan: PlanParts, kept: Fidelity | None) -> list[str]:
    # Where no strategy was asked, it may lose something besides, as the label says.
    least: Fidelity = max(plan.fidelity, least_fidelity(plan), key=FIDELITIES.index)
    label = label_text(plan, kept or least)
    model = plan.model.parameters
    trainable = [p for p in model if p.trainable]
    held = sum(parameter_bytes(p) for p in model)
    parts = [f"{count(sum(p.numel for p in model))} elements in {number_of(len(model), 'parameter')}, {size(held)}"]
    if len(trainable) < len(model):
        parts.append(f"{len(model) - len(trainable)} frozen")
    tied = sum(bool(p.ties) for p in model)
    if tied:
        parts.append(f"{tied} tied")
    return [
        f"Plan '{plan.name}'",
        *wrapped("model", f"{plan.model.name}: {', '.join(parts)}"),
        *wrapped("cluster", f"{plan.cluster.summary} ({number_of(plan.cluster.world_size, 'rank')})"),
        *_batches(plan),
        *wrapped("fidelity", f"{plan.fidelity}: {FIDELITY_MEANING[plan.fidelity]}"),
        *(wrapped("", label) if label else []),
        *(wrapped("recompute", RECOMPUTE_MEANING[plan.recompute]) if plan.recompute != "none" else []),
        fact("digest", plan.digest),
    ]


def _batches(plan: PlanParts) -> list[str]:
    """How many samples each rank has, where the cluster's devices say it."""
    said = plan.cluster.cluster.batches if plan.cluster.spec else ""
    return wrapped("batches", f"{said} (samples in each rank's batch)") if said else []


def _predictions(plan: PlanParts) -> list[str]:
    if plan.prediction is None:
        return textwrap.wrap(verdict(plan), WIDTH)
    mine = plan.prediction
    others = alternative_rows(plan)
    shown = others[:_MAX_ALTERNATIVES]
    this = "before it was edited" if plan.was_edited else "this plan"
    rows = [_prediction_row(this, mine, mine), *(_prediction_row(a.label, a.prediction, mine) for a in shown)]
    header = ("", "step", "", "of this", "exposed", "sent/rank", "memory/rank")
    body = table(header, rows, "lrlrrrr")
    lines = ["Predicted, per optimizer step (sent and memory: of the rank with most)", *body[:2]]
    for line, row in zip(body[2:], shown, strict=True):
        lines.append(line)
        lines += textwrap.wrap(row.note, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    if len(others) > _MAX_ALTERNATIVES:
        rest = others[_MAX_ALTERNATIVES:]
        fastest = min(a.prediction.step_time_s for a in rest)
        lines.append(f"  and {sum(len(a.names) for a in rest)} more, the fastest of them {duration(fastest)}")
    said = verdict(plan) if plan.was_edited else f"{verdict(plan)} {provenance_text(plan)}"
    used = [] if plan.memory is None or plan.was_edited else textwrap.wrap(plan.memory.text, WIDTH)
    return [*lines, "", *textwrap.wrap(said, WIDTH), *textwrap.wrap(measured_text(plan), WIDTH), *used]


def _prediction_row(name: str, prediction: Prediction, mine: Prediction) -> tuple[str, ...]:
    return (
        shorten(name, 34),
        duration(prediction.step_time_s),
        f"+- {duration(prediction.relative_error * prediction.step_time_s)}",
        f"{prediction.step_time_s / mine.step_time_s:.2f}x" if mine.step_time_s > 0 else "",
        duration(prediction.exposed_communication_s),
        size(prediction.wire_bytes),
        size(prediction.peak_memory_bytes),
    )


def _quality(plan: PlanParts) -> list[str]:
    """Why a quality budget took the plan, where one did."""
    if plan.quality is None:
        return []
    if plan.was_edited:
        return [*textwrap.wrap("It was edited since a quality budget took it: what it loses is not known.", WIDTH), ""]
    first, *rest = plan.quality.lines
    indented = [
        line for one in rest for line in textwrap.wrap(one, WIDTH, initial_indent="  ", subsequent_indent=" " * 6)
    ]
    return [*textwrap.wrap(first, WIDTH), *indented, ""]


def _groups(plan: PlanParts) -> list[str]:
    rows = group_rows(plan)
    cells = [_group_cells(row) for row in rows]
    header = ("group", "strategy", "params", "MiB", "which")
    left = WIDTH - 2 - sum(max(len(row[i]) for row in (header, *cells)) + 2 for i in range(4))
    named = [(*cell, row.pattern(left)) for cell, row in zip(cells, rows, strict=True)]
    body = table(header, named, "llrrl")
    lines = [f"Groups, in the order in which they are issued: {number_of(len(plan.groups), 'group')}", body[0]]
    for line, row, following in zip(body[1:], rows, [*rows[1:], None], strict=True):
        lines.append(line.rstrip())
        if row.reason and (following is None or following.reason != row.reason):
            lines += textwrap.wrap(row.reason, WIDTH, initial_indent=" " * 8 + "because: ", subsequent_indent=" " * 17)
    frozen = [p for p in plan.model.parameters if not p.trainable]
    if frozen:
        lines.append(f"Not synchronized (frozen): {parameters_text(frozen)}")
    return lines


def _group_cells(row: GroupRow) -> tuple[str, ...]:
    index = str(row.first) if row.num_groups == 1 else f"{row.first}-{row.last}"
    strategy = f"{row.strategy} ({row.options})" if row.options else row.strategy
    return index, shorten(strategy, 42), str(len(set(row.names))), mebibytes(row.num_bytes)


def fact(label: str, text: str) -> str:
    """A line of the page: what it says, and of what."""
    return f"  {label:<9} {text}"


def wrapped(label: str, text: str) -> list[str]:
    """The same, in as many lines as it takes."""
    return textwrap.wrap(text, WIDTH, initial_indent=f"  {label:<9} ", subsequent_indent=" " * 12)
