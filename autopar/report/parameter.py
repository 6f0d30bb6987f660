"""One parameter of a plan: what it is, how it is synchronized, with which others, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import PlanError, did_you_mean
from autopar.formatting import name_pattern, number_of, size
from autopar.spec.explain import fact, wrapped
from autopar.spec.plan import OptionValue, ParameterSlice, ParameterSpec, Plan
from autopar.spec.summary import parameter_bytes, strategy_text


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """A parameter, or a slice of one, and how it is synchronized."""

    parameter: ParameterSpec
    piece: ParameterSlice
    num_bytes: int
    group: int | None
    """Index of its sync group; `None` where the parameter is frozen."""
    strategy: str
    options: Mapping[str, OptionValue]
    reason: str
    """Empty where it was given for another plan."""


def parameter_rows(plan: Plan) -> list[ParameterRow]:
    """Every parameter of the plan, or its slices, in the model's order; frozen ones too."""
    table = {p.name: p for p in plan.model.parameters}
    held: dict[str, list[ParameterRow]] = {name: [] for name in table}
    for index, group in enumerate(plan.groups):
        for piece in group.members:
            spec = table[piece.name]
            reason = "" if plan.was_edited else group.reason
            row = ParameterRow(spec, piece, parameter_bytes(spec, piece), index, group.strategy, group.settings, reason)
            held[piece.name].append(row)
    rows: list[ParameterRow] = []
    for name, spec in table.items():
        frozen = ParameterRow(spec, ParameterSlice(name=name), parameter_bytes(spec), None, "", {}, "frozen")
        rows += held[name] or [frozen]
    return rows


def explain_parameter(plan: Plan, name: str) -> str:
    """One parameter: what it is, how it is synchronized, with which others, and why.

    A tied parameter is found under each of its names. Raises `PlanError`, with the nearest name, where the plan has
    no such parameter.
    """
    spec = find_parameter(plan, name)
    state = "trainable" if spec.trainable else "frozen"
    lines = [
        f"{name}" if name == spec.name else f"{name} (tied: planned as {spec.name})",
        fact("shape", f"{_shape(spec.shape)} {spec.dtype}, {size(parameter_bytes(spec))}, {state}"),
    ]
    if spec.ties:
        lines += wrapped("tied to", ", ".join(spec.ties))
    rows = [row for row in parameter_rows(plan) if row.parameter.name == spec.name and row.group is not None]
    if not rows:
        lines.append(fact("group", "none: a frozen parameter has no gradient to synchronize"))
    for row in rows:
        lines += _parameter_group(plan, row, alone=len(rows) == 1)
    if rows and plan.was_edited:
        lines += wrapped("edited", "since the plan was priced: the reasons that it records are those of another one")
    return "\n".join(lines) + "\n"


def find_parameter(plan: Plan, name: str) -> ParameterSpec:
    """The plan's entry for a parameter, by its name or by a name that it is tied to; `PlanError` where none is."""
    names = {alias: p for p in plan.model.parameters for alias in p.ties}
    names |= {p.name: p for p in plan.model.parameters}
    if name not in names:
        raise PlanError(
            f"the plan has no parameter '{name}'{did_you_mean(name, names)} "
            f"It has {len(plan.model.parameters)}, as named by `model.named_parameters()`."
        )
    return names[name]


def _parameter_group(plan: Plan, row: ParameterRow, alone: bool) -> list[str]:
    assert row.group is not None
    group = plan.groups[row.group]
    table_of = {p.name: p for p in plan.model.parameters}
    total = sum(parameter_bytes(table_of[m.name], m) for m in group.members)
    lines = []
    if not alone:
        lines.append(fact("slice", f"{row.piece}, {size(row.num_bytes)}"))
    lines.append(fact("group", f"{row.group} of 0..{len(plan.groups) - 1} in issue order"))
    lines += wrapped("strategy", strategy_text(row.strategy, row.options))
    others = [m.name for m in group.members if m.name != row.parameter.name]
    if others:
        with_text = f"{number_of(len(others), 'other')} ({name_pattern(others, 56)}), {size(total)} in all"
        lines += wrapped("with", with_text)
    else:
        lines.append(fact("with", "no other parameter"))
    if row.reason:
        lines += wrapped("because", row.reason)
    return lines


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) if shape else "scalar"
