"""What the report's tables hold, as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopar.formatting import count, duration, mebibytes, name_pattern, size
from autopar.report.parameter import parameter_rows
from autopar.spec.plan import Plan, Prediction
from autopar.spec.quality import percent
from autopar.spec.summary import (
    BASELINE,
    alternative_rows,
    cost_text,
    group_rows,
    options_text,
    ordered_alternatives,
    parameter_bytes,
    strategy_text,
)

if TYPE_CHECKING:
    from autopar.cost_models.base import Estimate


@dataclass(frozen=True)
class Compared:
    """A plan in the comparison: what is predicted of it, and what was measured, where either is known."""

    name: str
    prediction: Prediction | None
    measured_s: float | None
    of_this: str
    """Its predicted step time as a multiple of this plan's."""
    note: str

    @property
    def half_interval_s(self) -> float:
        return self.prediction.relative_error * self.prediction.step_time_s if self.prediction else 0.0

    @property
    def cells(self) -> dict[str, str]:
        """Its figures as text."""
        p, measured = self.prediction, self.measured_s
        off = p.step_time_s / measured - 1 if p and measured else None
        return {
            "predicted": duration(p.step_time_s) if p else "",
            "interval": f"\u00b1 {duration(self.half_interval_s)}" if p else "",
            "measured": duration(measured) if measured is not None else "",
            "off": f"{off:+.0%}" if off is not None else "",
            "exposed": duration(p.exposed_communication_s) if p else "",
            "sent": size(p.wire_bytes) if p else "",
            "memory": size(p.peak_memory_bytes) if p else "",
        }


def compared(plan: Plan, measured: Mapping[str, float]) -> list[Compared]:
    """This plan, the alternatives, and what else was measured. Alternatives that are alike share a row."""
    mine = plan.prediction
    found = []
    if mine is not None:
        note = "before it was edited" if plan.was_edited else ""
        found.append(Compared(plan.name, mine, measured.get(plan.name), "1.00x", note))
    listed = {plan.name} if mine is not None else set()
    for row in alternative_rows(plan, apart=measured.keys()):
        listed.update(row.names)
        alike = f"alike: {', '.join(row.names[1:])}" if len(row.names) > 1 else ""
        ratio = f"{row.prediction.step_time_s / mine.step_time_s:.2f}x" if mine and mine.step_time_s > 0 else ""
        note = "; ".join(text for text in (row.note, alike) if text)
        found.append(Compared(row.names[0], row.prediction, measured.get(row.names[0]), ratio, note))
    found += [Compared(name, None, s, "", "") for name, s in measured.items() if name not in listed]
    return found


def measured_verdict(plan: Plan, measured: Mapping[str, float]) -> str:
    """The measured counterpart of `verdict`; empty where the plan was not measured."""
    mine = measured.get(plan.name)
    if not mine:
        return ""
    others = [name for name in (BASELINE, *measured) if name in measured and name != plan.name]
    if not others:
        return f"Measured {duration(mine)}."
    other = measured[others[0]]
    return f"Measured {duration(mine)} against {duration(other)} of {others[0]}: {other / mine:.2f}x as fast."


def facts(plan: Plan) -> list[tuple[str, str, str]]:
    """The figures at the top: what, value, remark."""
    p = plan.own_prediction
    if p is None:
        return []
    facts = [("step", duration(p.step_time_s), f"\u00b1 {duration(p.relative_error * p.step_time_s)}")]
    others = ordered_alternatives(plan)
    if others and p.step_time_s > 0:
        first = others[0]
        ratio = first.prediction.step_time_s / p.step_time_s
        facts.append((f"{first.name} / this plan", f"{ratio:.2f}x", duration(first.prediction.step_time_s)))
    share = p.exposed_communication_s / p.step_time_s if p.step_time_s > 0 else 0.0
    facts.append(("exposed communication", duration(p.exposed_communication_s), f"{share:.0%} of the step"))
    facts.append(("sent per step", size(p.wire_bytes), "by the rank that sends most"))
    facts.append(("peak memory", size(p.peak_memory_bytes), "on the rank that needs most"))
    return facts


def groups(plan: Plan) -> list[dict[str, str]]:
    return [
        {
            "index": str(row.first) if row.num_groups == 1 else f"{row.first}\u2013{row.last}",
            "strategy": row.strategy,
            "options": row.options,
            "parameters": str(len(set(row.names))),
            "mib": mebibytes(row.num_bytes),
            "names": row.pattern(60),
            "reason": row.reason,
            "runner_up": strategy_text(row.runner_up.strategy, row.runner_up.options) if row.runner_up else "",
            "runner_up_cost": cost_text(row.runner_up) if row.runner_up else "",
        }
        for row in group_rows(plan)
    ]


def parameters(plan: Plan) -> list[dict[str, Any]]:
    return [
        {
            "name": str(row.piece),
            "ties": ", ".join(row.parameter.ties),
            "shape": " \u00d7 ".join(map(str, row.piece.shape(row.parameter))) or "scalar",
            "dtype": row.parameter.dtype,
            "bytes": row.num_bytes,
            "mib": mebibytes(row.num_bytes),
            "strategy": row.strategy or "none",
            "group": row.group,
            "options": options_text([row.options]),
            "reason": row.reason,
        }
        for row in parameter_rows(plan)
    ]


def ranks(estimate: Estimate | None) -> list[tuple[str, str, str, str]]:
    """Sent, received and peak memory by rank; ranks that are alike share a row."""
    if estimate is None:
        return []
    alike: dict[tuple[int, int, int], list[int]] = {}
    figures = zip(estimate.sent_bytes, estimate.received_bytes, estimate.peak_memory_bytes, strict=True)
    for rank, key in enumerate(figures):
        alike.setdefault(key, []).append(rank)
    return [
        (name_pattern([str(r) for r in ranks], 40), size(sent), size(received), size(peak))
        for (sent, received, peak), ranks in alike.items()
    ]


def disagreement(plan: Plan, estimate: Estimate | None) -> str:
    """What to say where the estimate is not the one that the plan records; empty where the two agree."""
    recorded = plan.own_prediction
    if recorded is None or estimate is None:
        return ""
    if abs(estimate.step_time_s - recorded.step_time_s) <= 0.01 * recorded.step_time_s:
        return ""
    trials = "without its trials (--trials FILE), or " if plan.is_taught else ""
    return (
        f"Simulated anew, the step takes {duration(estimate.step_time_s)}; when the plan was made it was "
        f"{duration(recorded.step_time_s)}: {trials}with another optimizer or batch, or another version of the cost "
        "model. What follows is the new simulation."
    )


def model_size(plan: Plan) -> str:
    """`10.4 M elements, 39.6 MiB`."""
    held = sum(parameter_bytes(p) for p in plan.model.parameters)
    return f"{count(sum(p.numel for p in plan.model.parameters))} elements, {size(held)}"


def quality(plan: Plan) -> dict[str, Any] | None:
    """Why a quality budget took the plan: a sentence or two, and a row for each plan that was looked at; `None` where
    none did, or the plan was edited since."""
    choice = plan.quality
    if choice is None or plan.was_edited:
        return None
    first, *rest = choice.lines
    return {
        "said": ". ".join([first, *rest[len(choice.considered) :]]).replace("..", "."),
        "rows": [
            {
                "name": one.name,
                "step": duration(one.step_time_s),
                "expected": percent(one.expected) if one.tried else "",
                "bound": percent(one.bound) if one.tried else "",
                "lost": "" if one.metric is None else percent(one.lost),
                "verdict": one.verdict,
                "chosen": one.name == plan.name,
            }
            for one in choice.considered
        ],
    }
