"""The report: a row for each model, and figures for each family."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.capture.families import family_of
from benchmarks.capture.outcome import Outcome
from benchmarks.capture.reference import EXACT, ROUNDINGS
from benchmarks.capture.team import WORLD_SIZE
from benchmarks.harness import Report, Target

CAPTURED_SHARE = 0.85
_MACHINE = re.compile(rf"{re.escape(str(Path(__file__).parents[2]))}/|\S*/site-packages/")
"""What a path begins with on this machine alone."""
_VERDICTS = {"equal": "equal", "wrong": "WRONG", "crashed": "CRASHED", "refused": "REFUSED", "unusable": "not usable"}
_NOTES = (
    f"Random weights, no dropout, {WORLD_SIZE} ranks with batches of their own, two steps of SGD with momentum, as "
    "`program.step` and as drop-in module, each under three plans: searched with measured compute, partitioned "
    "(parameter servers, or all-reduces), and random strategies for every parameter or slice of it.",
    "Compared with one process of plain PyTorch on the mean of the ranks' losses, in float64 where the model can be "
    f"trained in it: each update and loss within {EXACT:g}, or within {ROUNDINGS:g} times what a rounding of the "
    "parameters in float32 makes of it, as many models compute in float32 inside. 'Not usable': the model itself "
    "fails, or two plain trainings of it differ.",
    "'s' is for all that was done with a model, processes side by side.",
)


def report(found: Sequence[Outcome], required: Mapping[str, int], absent: Mapping[str, str]) -> Report:
    """`required`: of each family, how many models must be tried. `absent`: families whose library is not installed."""
    result = Report(
        name="capture",
        title="Models of libraries: captured or eager, and equal to plain PyTorch",
        columns=("model", "parameters", "dtype", "s", "largest difference", "runs", "verdict"),
        notes=[*_summary(found), *_NOTES],
    )
    for family, library in absent.items():
        result.notes.append(f"{family}: not tried, as {library} is not installed.")
    for o in sorted(found, key=lambda o: (o.kind != "equal", bool(o.eager), family_of(o.name), o.name)):
        error = max((r.error for r in o.runs), default=0.0)
        how = f"; eager: {o.eager}" if o.eager else ""
        words = f"{_VERDICTS[o.kind]}{': ' + o.said if o.said else ''}{how}"
        runs = f"{sum(r.kind == 'equal' for r in o.runs)} of {len(o.runs)}"
        said = _MACHINE.sub("", words)
        result.rows.append((o.name, f"{o.parameters:,}", o.dtype, f"{o.seconds:.0f}", f"{error:.0e}", runs, said))
    usable = [o for o in found if o.kind != "unusable"]
    captured = sum(not o.eager and o.kind == "equal" for o in usable)
    for kind in ("wrong", "crashed", "refused"):
        result.targets.append(Target(f"models that are {kind}", sum(o.kind == kind for o in usable), 0, "at most"))
    share = captured / max(len(usable), 1)
    result.targets.append(Target("captured, of all models", share, CAPTURED_SHARE, "at least"))
    for family, count in required.items():
        tried = sum(family_of(o.name) == family for o in usable)
        result.targets.append(Target(f"{family}: models tried", tried, count, "at least"))
    result.data = {"outcomes": [o.as_dict() for o in found]}
    return result


def _summary(found: Sequence[Outcome]) -> list[str]:
    """How many of each family are captured, eager, or something else."""
    lines = []
    for family in dict.fromkeys(family_of(o.name) for o in found):
        mine = [o for o in found if family_of(o.name) == family]
        captured = sum(o.kind == "equal" and not o.eager for o in mine)
        eager = sum(o.kind == "equal" and bool(o.eager) for o in mine)
        others = {k: sum(o.kind == k for o in mine) for k in ("wrong", "crashed", "refused", "unusable")}
        worse = "".join(f", {n} {_VERDICTS[k]}" for k, n in others.items() if n)
        lines.append(f"{family}: {len(mine)} models, {captured} captured and equal, {eager} eager and equal{worse}.")
    return lines
