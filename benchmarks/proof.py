"""What the proof on the first step costs, in eager steps, and what looking at guards costs in each step.

    python -m benchmarks.proof [--check] [--quick] [--only NAME]

The first step with `check="first"` is timed beside the first one with `check="never"`, each of a program that was made
for it, in turn with eager steps that are warm; the proof's cost is the difference. Every model is trained by
`program.step` and as drop-in module, on one rank and on two gloo ranks of this machine.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from benchmarks.harness import Report, Spread, Target, options, publish
from benchmarks.processes import on_ranks
from benchmarks.proof_worker import MODELS, WAYS, measure
from benchmarks.zoo import Entry, find

MOST_STEPS = 4.0
"""Eager steps that the proof may take, once."""
MOST_GUARDS_US = 100.0
"""Microseconds in each step of a model of 12 layers."""
GUARDED = "bert, 12 layers"
ROUNDS, QUICK_ROUNDS = 5, 1
RANKS = (1, 2)
COLUMNS = (
    "model",
    "ranks",
    "used as",
    "eager step, ms",
    "first step, s",
    "unproved, s",
    "proof, in eager steps",
    "of CPU time",
    "guards, us",
    "tensors and hooks, us",
)


def figures(entry: Entry, ranks: int, way: str, rounds: int) -> dict[str, Any]:
    """What the ranks' processes have measured; of those that differ, rank 0's."""
    with tempfile.TemporaryDirectory(prefix="autopar-proof-") as folder:
        file = Path(folder) / "figures"
        on_ranks(ranks, measure, entry.name, way, rounds, str(file))
        told: dict[str, Any] = json.loads(file.read_text())
    return told


def in_eager_steps(told: dict[str, Any], clock: str) -> Spread:
    """The first step less the one without a proof, round by round, in the round's eager steps."""
    seconds = told[clock]
    rounds = zip(seconds["first"], seconds["never"], seconds["eager"], strict=True)
    return Spread.of((first - never) / eager for first, never, eager in rounds)


def examine(report: Report, entry: Entry, ranks: int, way: str, rounds: int) -> None:
    """Measures one model, and adds its row, targets and figures to the report."""
    click.echo(f"{entry.name}: {way}, {ranks} rank(s)", err=True)
    told = figures(entry, ranks, way, rounds)
    proof, wall = in_eager_steps(told, "cpu_s"), told["elapsed_s"]
    eager, first, never = (Spread.of(wall[name]).median for name in ("eager", "first", "never"))
    times = f"{1e3 * eager:.1f}", f"{first:.2f}", f"{never:.2f}"
    proofs = f"{in_eager_steps(told, 'elapsed_s').median:.2f}", f"{proof:.2f}"
    guards = f"{told['guards_us']:.0f}", f"{told['tensors_us']:.0f}"
    report.rows.append((entry.name, str(ranks), way, *times, *proofs, *guards))
    where = f"{entry.name}, {way}, {ranks} rank(s)"
    report.targets.append(
        Target(f"{where}: proof, in eager steps of CPU time (median of {rounds})", proof.median, MOST_STEPS)
    )
    if entry.name == GUARDED:
        report.targets.append(Target(f"{where}: guards, each step", told["guards_us"], MOST_GUARDS_US, unit="us"))
    report.data[where] = told


@click.command(context_settings={"show_default": True})
@click.option("--quick", is_flag=True, help="One round: to see that it runs, not to be quoted.")
@click.option("--only", multiple=True, metavar="NAME", help="Measure this model alone; may be repeated.")
@click.option("--rounds", type=click.IntRange(1), help=f"Rounds that count.  [default: {ROUNDS}, quick {QUICK_ROUNDS}]")
@options
def main(
    quick: bool, only: tuple[str, ...], rounds: int | None, check: bool, json_file: str | None, save: bool
) -> None:
    """Measures the proof on the first step, and guards."""
    try:
        entries = [find(MODELS, name) for name in only] or list(MODELS)
    except KeyError as e:
        raise click.UsageError(e.args[0]) from e
    report = Report("proof", "The proof on the first step, in eager steps, and guards", COLUMNS)
    report.notes = [
        "A step is zero_grad, forward, backward and AdamW (fused), in float32, in train mode with a dropout of 0.1, on "
        "one thread; with a plan of plain all-reduces. In each round a program is made and takes its first step with "
        '`check="first"`, and another with `check="never"`, in an order that alternates, beside eager steps; what '
        "both take for the first time (lowering, looking at the loss) cancels. Shown are medians (quartiles) over "
        "rounds, behind one that does not count. CPU time, which the target is for, leaves out what ranks wait, for "
        "each other or for a core.",
        "Guards are what Python held at capture; tensors and hooks are looked at beside them, of every module. Both "
        "are medians over 200 looks between steps.",
    ]
    for entry in entries:
        for ranks in RANKS:
            for way in WAYS:
                examine(report, entry, ranks, way, rounds or (QUICK_ROUNDS if quick else ROUNDS))
    sys.exit(publish(report, command="python -m benchmarks.proof", check=check, json_file=json_file, save=save))


if __name__ == "__main__":
    main()
