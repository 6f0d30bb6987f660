"""What changes from one plan to another, as data and in words."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

from autopar.formatting import duration, number_of, size, table
from autopar.spec.plan import ParameterSlice, ParameterSpec, Plan, Prediction
from autopar.spec.summary import parameters_text, strategy_text, verdict


@dataclass(frozen=True)
class Change:
    """Parameters whose synchronization changes in the same way; `None` where only their groups do."""

    parameters: tuple[ParameterSpec, ...]
    before: str | None
    after: str | None


@dataclass
class Difference:
    """What changes from plan `a` to plan `b`."""

    same_program: bool
    """Both execute the same: what else differs is names, predictions and reasons."""
    facts: list[str]
    """Where the models, clusters and fidelities differ, in words."""
    changes: list[Change] = field(default_factory=list)


def difference(a: Plan, b: Plan) -> Difference:
    """Compares two plans."""
    found = Difference(a.digest == b.digest, _facts(a, b))
    if found.same_program:
        return found
    changed: dict[tuple[str | None, str | None], list[ParameterSpec]] = {}
    before, after = _held(a), _held(b)
    for spec in a.model.parameters:
        if spec.name not in before or spec.name not in after:
            continue
        how, how_now = _how(a, before[spec.name]), _how(b, after[spec.name])
        if how != how_now:
            changed.setdefault((how, how_now), []).append(spec)
        elif _neighbours(a, before[spec.name]) != _neighbours(b, after[spec.name]):
            changed.setdefault((None, None), []).append(spec)
    regrouped = changed.pop((None, None), [])
    found.changes = [Change(tuple(specs), *pair) for pair, specs in changed.items()]
    if regrouped:
        found.changes.append(Change(tuple(regrouped), None, None))
    return found


def diff(a: Plan, b: Plan) -> str:
    """What changes from plan `a` to plan `b`: predictions, and the parameters that are synchronized otherwise."""
    found = difference(a, b)
    lines = [f"from  {_title(a)}", f"to    {_title(b)}", *found.facts]
    if a.prediction and b.prediction:
        lines += ["", *_predictions(a.prediction, b.prediction)]
    for which, plan in (("first", a), ("second", b)):
        if plan.was_edited:
            lines += textwrap.wrap(f"The {which} plan: {verdict(plan)}", 100)
    if found.same_program:
        return "\n".join([*lines, "", "Both execute the same program."]) + "\n"
    lines += ["", f"Groups: {len(a.groups)} -> {len(b.groups)}"]
    for change in found.changes:
        lines.append(f"  {parameters_text(change.parameters)}")
        if change.before is None:
            lines.append("      as before, in other groups")
        else:
            lines += [f"      {change.before}", f"      -> {change.after}"]
    if not found.changes and a.model.digest == b.model.digest and len(a.groups) == len(b.groups):
        lines.append("  the same groups, in another order or laid out otherwise")
    return "\n".join(lines) + "\n"


def _title(plan: Plan) -> str:
    return f"'{plan.name}' for {plan.model.name} ({number_of(len(plan.groups), 'group')}, digest {plan.digest})"


def _facts(a: Plan, b: Plan) -> list[str]:
    lines = [f"model: {line}" for line in a.model.difference(b.model, "the first", "the second")]
    if len(lines) > 5:
        lines = [*lines[:5], f"model: {len(lines) - 5} more differences"]
    if a.cluster.digest != b.cluster.digest:
        lines.append(f"cluster: {a.cluster.summary} -> {b.cluster.summary}")
    if a.fidelity != b.fidelity:
        lines.append(f"fidelity: {a.fidelity} -> {b.fidelity}")
    if a.recompute != b.recompute:
        lines.append(f"recompute: {a.recompute} -> {b.recompute}")
    return lines


def _predictions(a: Prediction, b: Prediction) -> list[str]:
    times = [
        ("step", a.step_time_s, b.step_time_s),
        ("exposed communication", a.exposed_communication_s, b.exposed_communication_s),
    ]
    sizes = [("sent/rank", a.wire_bytes, b.wire_bytes), ("memory/rank", a.peak_memory_bytes, b.peak_memory_bytes)]
    rows = [(label, duration(x), duration(y), _ratio(x, y)) for label, x, y in times]
    rows += [(label, size(x), size(y), _ratio(x, y)) for label, x, y in sizes]
    return table(("Predicted", "from", "to", "ratio"), rows, "lrrr", indent="")


def _ratio(a: float, b: float) -> str:
    return f"{b / a:.2f}x" if a else ""


def _held(plan: Plan) -> dict[str, list[tuple[int, ParameterSlice]]]:
    """The groups that hold each trainable parameter, with the part of it that they hold."""
    found: dict[str, list[tuple[int, ParameterSlice]]] = {}
    for index, group in enumerate(plan.groups):
        for piece in group.members:
            found.setdefault(piece.name, []).append((index, piece))
    return {name: sorted(held, key=lambda h: h[1].start or 0) for name, held in found.items()}


def _how(plan: Plan, held: list[tuple[int, ParameterSlice]]) -> str:
    words = []
    for index, piece in held:
        group = plan.groups[index]
        part = "" if piece.whole else f"[{piece.start}:{piece.stop}] "
        words.append(part + strategy_text(group.strategy, group.settings))
    along = f" along dimension {held[0][1].dim}" if len(held) > 1 else ""
    return f"{len(held)} slices{along}: {'; '.join(words)}" if len(held) > 1 else words[0]


def _neighbours(plan: Plan, held: list[tuple[int, ParameterSlice]]) -> list[set[str]]:
    return [{str(m) for m in plan.groups[index].members} for index, _ in held]
