"""A plan as rows: its groups and the plans it was compared with. The explanation, `--json` and the report show them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from autopar.formatting import duration, name_pattern, number_of, size
from autopar.spec.plan_parts import (
    FIDELITIES,
    Alternative,
    Fidelity,
    OptionValue,
    ParameterSlice,
    ParameterSpec,
    PlanParts,
    Prediction,
    Recompute,
    RunnerUp,
    SyncGroup,
)

RECOMPUTE_MEANING: Mapping[Recompute, str] = {
    "none": "all activations are kept for the backward pass",
    "selective": "what takes little time is computed again in the backward pass, for memory is short",
    "full": "most of the forward pass is computed again in the backward pass, for memory is short",
}
FIDELITY_MEANING: dict[Fidelity, str] = {
    "exact": "the single-process result on the global batch, up to the order of additions",
    "rounded": "an exact algorithm with a narrower number format on the wire",
    "compressed": "lossy, with error feedback: sent + residual = gradient",
    "stale": "updates of other ranks may arrive late, by a stated bound",
    "local": "another algorithm: replicas are averaged from time to time",
}

_PROVENANCE_MEANING = {
    "measured": "The prediction rests on measurements of this cluster and model",
    "looked up": "The prediction rests on tables of devices and networks",
    "guessed": "The prediction rests in part on guesses",
}
_WITHOUT_TRIALS = {
    "measured": "",
    "looked up": "; nothing was measured on this cluster",
    "guessed": ": take its times as an order of magnitude",
}

NARROWED = "wire"
"""The option that says in which number format a strategy sends; `same` is the gradients' own."""

# Which plan a reader compares with first.
BASELINE = "ddp"

_SAME = 0.005
"""Plans whose predicted times differ by less than this part take the same time."""

# Up to here every group has its own row; in longer plans alike neighbours share one.
MAX_SINGLE_GROUPS = 8


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A sync group, or several adjacent ones that differ in nothing a reader needs."""

    first: int
    last: int
    strategy: str
    options: str
    names: tuple[str, ...]
    """Of its parameters; where it holds one slice alone, of that slice."""
    sliced: bool
    """Whether it holds only parts of some of them, under their plain names."""
    num_bytes: int
    reason: str
    """Of all of them; where they differ, of the largest, and the reason begins with which that is. Empty where it was
    given for another plan."""
    runner_up: RunnerUp | None = None
    """Of the largest of them; `None` where it was not priced, or for another plan."""

    def pattern(self, width: int) -> str:
        """Which parameters, as a short pattern."""
        if not self.sliced:
            return name_pattern(self.names, width)
        return "parts of " + name_pattern(self.names, width - len("parts of "))

    @property
    def num_groups(self) -> int:
        return self.last - self.first + 1


def parameter_bytes(parameter: ParameterSpec, piece: ParameterSlice | None = None) -> int:
    """Bytes of a parameter, or of a slice of it."""
    shape = parameter.shape if piece is None else piece.shape(parameter)
    return math.prod(shape) * element_bytes(parameter.dtype)


def element_bytes(dtype: str) -> int:
    """Bytes of one element of a dtype, from the number of bits in torch's name for it."""
    bits = re.search(r"\d{1,3}", dtype)
    return max(1, int(bits.group()) // 8) if bits else 1


def group_rows(plan: PlanParts, merge: bool | None = None) -> list[GroupRow]:
    """The groups in issue order. With `merge`, adjacent ones of the same strategy and kind of options share a row; by
    default in plans of more than `MAX_SINGLE_GROUPS` groups."""
    if merge is None:
        merge = len(plan.groups) > MAX_SINGLE_GROUPS
    table = {p.name: p for p in plan.model.parameters}
    rows = []
    for _, indices in groupby(range(len(plan.groups)), key=lambda i: _kind(plan.groups[i]) if merge else i):
        run = list(indices)
        groups = [plan.groups[i] for i in run]
        pieces = [piece for group in groups for piece in group.members]
        sizes = [sum(parameter_bytes(table[m.name], m) for m in g.members) for g in groups]
        rows.append(
            GroupRow(
                first=run[0],
                last=run[-1],
                strategy=groups[0].strategy,
                options=options_text([group.settings for group in groups]),
                names=tuple(str(piece) if len(pieces) == 1 else piece.name for piece in pieces),
                sliced=len(pieces) > 1 and not _hold_all(pieces, table),
                num_bytes=sum(parameter_bytes(table[piece.name], piece) for piece in pieces),
                reason="" if plan.was_edited else _reason(run, groups, sizes),
                runner_up=None if plan.was_edited else groups[sizes.index(max(sizes))].runner_up,
            )
        )
    return rows


def options_text(options: Sequence[Mapping[str, OptionValue]]) -> str:
    """Options in words; where several groups differ in one, its range: `owner=0..3, wire=float16`.

    `same` and empty lists are left out: by convention they stand for what a strategy does anyway.
    """
    words = []
    for key in options[0]:
        values = list(dict.fromkeys(o[key] for o in options))
        if values in (["same"], [()]):
            continue
        if len(values) == 1:
            words.append(f"{key}={_option_value(values[0])}")
        else:
            low, high = min(values, key=_as_number), max(values, key=_as_number)
            words.append(f"{key}={low}..{high}")
    return ", ".join(words)


def strategy_text(strategy: str, options: Mapping[str, OptionValue]) -> str:
    """A strategy with its options, in words: `all_reduce (wire=float16)`."""
    text = options_text([options])
    return f"{strategy} ({text})" if text else strategy


def cost_text(runner_up: RunnerUp) -> str:
    """What a step would take longer with the runner-up: `+1.80 ms`."""
    sign = "-" if runner_up.cost_s < 0 else "+"
    return f"{sign}{duration(abs(runner_up.cost_s))}"


def parameters_text(parameters: Sequence[ParameterSpec]) -> str:
    """Several parameters in words: `3 parameters, 1.2 MiB: h.0.*`."""
    held = sum(parameter_bytes(p) for p in parameters)
    names = name_pattern([p.name for p in parameters], 60)
    return f"{number_of(len(parameters), 'parameter')}, {size(held)}: {names}"


@dataclass(frozen=True, slots=True)
class AlternativeRow:
    """Other plans that were priced, and for which everything that is predicted is the same."""

    names: tuple[str, ...]
    prediction: Prediction
    note: str

    @property
    def label(self) -> str:
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} and {len(self.names) - 1} alike"


def ordered_alternatives(plan: PlanParts) -> list[Alternative]:
    """The other plans that were priced: the baseline first, then the fastest first."""
    return sorted(plan.alternatives, key=lambda a: (a.name != BASELINE, a.prediction.step_time_s))


def alternative_rows(plan: PlanParts, apart: Collection[str] = ()) -> list[AlternativeRow]:
    """`ordered_alternatives` without the plan itself; those with one and the same prediction share a row, except
    those named in `apart`."""
    alike: dict[tuple[Prediction, str, str], list[str]] = {}
    for a in ordered_alternatives(plan):
        if (a.name, a.prediction) != (plan.name, plan.prediction):
            alike.setdefault((a.prediction, a.note, a.name if a.name in apart else ""), []).append(a.name)
    return [AlternativeRow(tuple(names), prediction, note) for (prediction, note, _), names in alike.items()]


def interval(prediction: Prediction) -> tuple[float, float]:
    """The stated interval of the step time, in seconds."""
    half = prediction.relative_error * prediction.step_time_s
    return max(0.0, prediction.step_time_s - half), prediction.step_time_s + half


def least_fidelity(plan: PlanParts) -> Fidelity:
    """The label that a plan must have at least, by when its groups synchronize and the formats that they send in. A
    strategy that loses something by itself is not known here."""
    found: set[Fidelity] = {"exact"}
    for group in plan.groups:
        narrow = group.options.get(NARROWED, "same") != "same"
        found.add("local" if group.every > 1 else "stale" if group.delay else "rounded" if narrow else "exact")
    return max(found, key=FIDELITIES.index)


def label_text(plan: PlanParts, kept: Fidelity) -> str:
    """What a plan's label says otherwise than its groups keep; empty where they agree."""
    if FIDELITIES.index(kept) > FIDELITIES.index(plan.fidelity):
        return (
            f"but its groups are '{kept}': {FIDELITY_MEANING[kept]}. It will not run under this label: `autopar plan "
            "MODEL --plan FILE -o FILE` writes the right one"
        )
    return "" if kept == plan.fidelity else f"and its groups keep more: they are '{kept}'"


def verdict(plan: PlanParts) -> str:
    """A few sentences: how the plan compares with the baseline, whether the error bars allow saying so, and what it was
    not compared with."""
    said = _compared(plan)
    if plan.left_out and not plan.was_edited:
        said += f" The search had no time to price {', '.join(plan.left_out)}."
    return said


def _compared(plan: PlanParts) -> str:
    if plan.prediction is None:
        return "This plan carries no prediction: it was not priced by a cost model."
    if plan.was_edited:
        return (
            "What is predicted is of another plan: this one was edited since it was priced. `autopar plan MODEL --plan "
            "FILE -o FILE` prices it again."
        )
    others = ordered_alternatives(plan)
    if not others:
        return "No other plan was priced, so there is nothing to compare with."
    other = others[0]
    if other.name == plan.name:
        return f"This is {other.name} itself: {_beside_the_fastest(plan, others[1:])}."
    if plan.prediction.step_time_s == 0:
        return "Predicted to take no time at all: there is nothing to compare."
    ratio = other.prediction.step_time_s / plan.prediction.step_time_s
    if abs(ratio - 1) < _SAME:
        return f"Predicted to take the same time as {other.name}."
    said = f"Predicted {ratio:.2f}x as fast as {other.name}"
    if ratio < 1:
        said = f"Predicted {_slower(plan, other)}"
    if plan.own_measured is not None:
        return f"{said}."
    mine, theirs = interval(plan.prediction), interval(other.prediction)
    if mine[1] < theirs[0] or theirs[1] < mine[0]:
        return f"{said}; the difference is larger than the stated error."
    return f"{said}; the intervals overlap, so only a measurement can tell."


def _beside_the_fastest(plan: PlanParts, others: Sequence[Alternative]) -> str:
    """How a plan stands beside the fastest of those that could have been taken."""
    assert plan.prediction is not None
    able = [a for a in others if not a.note]
    fastest = min(able, key=lambda a: a.prediction.step_time_s, default=None)
    if fastest is None or fastest.prediction.step_time_s > (1 - _SAME) * plan.prediction.step_time_s:
        return "none of the other plans that were priced is better"
    return f"predicted {_slower(plan, fastest)}"


def _slower(plan: PlanParts, other: Alternative) -> str:
    """That a plan is slower than another one, and that it was taken all the same where trials have decided."""
    assert plan.prediction is not None
    ratio = other.prediction.step_time_s / plan.prediction.step_time_s
    said = f"slower than {other.name}, which takes {ratio:.2f}x the time"
    found = plan.own_measured
    return f"{said}, and taken because of trials" if found is not None and found.rests_on == "trials" else said


def provenance_text(plan: PlanParts) -> str:
    """What the prediction rests on, in a sentence; empty where there is none."""
    if plan.prediction is None:
        return ""
    said = _PROVENANCE_MEANING[plan.prediction.provenance]
    if plan.lessons:
        return f"{said}, and on what {number_of(plan.lessons, 'trial')} on this cluster taught."
    if plan.own_measured is not None:
        return f"{said}; trials were run beside it."
    return f"{said}{_WITHOUT_TRIALS[plan.prediction.provenance]}."


def measured_text(plan: PlanParts) -> str:
    """What trials have found, and whether the plan rests on them; empty where there were none."""
    found = plan.own_measured
    if found is None:
        return ""
    base, base_s = found.baseline, found.baseline_step_time_s
    against = ""
    if base_s is not None:
        times = f"{base_s / found.best_step_time_s:.2f}x as fast"
        against = f" against {duration(base_s)} of {base}" + (f": {times}" if base != plan.name else "")
    best = f"{duration(found.best_step_time_s)}{against}"
    if found.rests_on == "trials":
        said = f"Rests on trials: measured {best}"
    else:
        said = f"Rests on its prediction: faster than all that was measured (at best {best}) by more than its error"
    failed = f", {found.failed} of which failed" if found.failed else ""
    noise = f" The machine was disturbed: {found.disturbed}." if found.disturbed else ""
    return f"{said}; {number_of(found.trials, 'trial')}{failed} on {found.where}.{noise}"


def _kind(group: SyncGroup) -> tuple[object, ...]:
    # Whole numbers (which rank owns a group, say) vary from group to group without being another kind of group.
    options = group.options.items()
    return (
        group.strategy,
        *group.timing.items(),
        *((k, "number" if isinstance(v, int) and not isinstance(v, bool) else v) for k, v in options),
    )


def _hold_all(pieces: Sequence[ParameterSlice], table: Mapping[str, ParameterSpec]) -> bool:
    """Whether the pieces make up whole parameters; a plan holds each element once, so counting is enough."""
    held: dict[str, int] = {}
    for piece in pieces:
        held[piece.name] = held.get(piece.name, 0) + parameter_bytes(table[piece.name], piece)
    return all(n == parameter_bytes(table[name]) for name, n in held.items())


def _reason(indices: Sequence[int], groups: Sequence[SyncGroup], sizes: Sequence[int]) -> str:
    if len({group.reason for group in groups}) == 1:
        return groups[0].reason
    largest = max(range(len(groups)), key=sizes.__getitem__)
    return f"(group {indices[largest]}, the largest) {groups[largest].reason}"


def _option_value(value: OptionValue) -> str:
    if isinstance(value, tuple):
        return ":".join(f"{v:g}" for v in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _as_number(value: OptionValue) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
