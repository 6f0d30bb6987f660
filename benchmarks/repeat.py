"""Repeats trials: does the same trial give the same step time again, or say that it was noisy?

    python -m benchmarks.repeat [--rounds 3] [--check] [--json FILE] [--save]

Trials with real and with virtual compute are run on the same living ranks, all of them in turn, `rounds` times over. A
pair is a trial and its next repeat; it agrees where the medians differ by less than 5 %.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import click

from benchmarks.harness import Report, Target, options, publish

if TYPE_CHECKING:
    from autopar.lab.trial import TrialResult, TrialSpec

WITHIN, SHARE = 0.05, 0.9
CASES = (
    ("small-mlp", "ddp"),
    ("small-mlp", "PSLoadBalancing"),
    ("small-decoder", "all_reduce_1MiB"),
    ("small-decoder", "zero1"),
    ("small-bag", "UnevenPartitionedPS"),
)
"""Workloads and plans; each with virtual compute, on the first cluster below, and on the second with real compute."""
VIRTUAL_CLUSTER, REAL_CLUSTER = "4xv100-25g", "4x200m"


def specs() -> dict[str, TrialSpec]:
    """What is repeated, by name."""
    from benchmarks.trials.making.cells import Cell, Draw
    from benchmarks.trials.making.clusters import clusters
    from benchmarks.zoo.captured import Captured
    from benchmarks.zoo.small import SMALL

    cases, found = clusters(), {}
    known = {name: Captured.of(SMALL[name]) for name in dict.fromkeys(name for name, _ in CASES)}
    for workload, plan in CASES:
        cells = (
            Cell(known[workload], cases[VIRTUAL_CLUSTER], "virtual"),
            Cell(known[workload], cases[REAL_CLUSTER], "real"),
        )
        for cell in cells:
            spec = cell.spec(Draw(plan, cell.plans.built(plan), cell.fastest, None))
            found[f"{workload}, {plan}, {cell.compute}"] = spec
    return found


def measure(rounds: int) -> dict[str, list[TrialResult]]:
    """The results of each trial, round by round."""
    from autopar.lab import Lab
    from autopar.lab.pool import Pool
    from autopar.lab.trial import VirtualCompute
    from autopar.spec.cluster import ClusterSpec

    trials = specs()
    found: dict[str, list[TrialResult]] = {name: [] for name in trials}
    first = ClusterSpec.model_validate(next(iter(trials.values())).plan.cluster.spec)
    with Lab.of(first) as lab, Pool(lab) as pool:
        for _ in range(rounds):
            for name, spec in trials.items():
                dilation = spec.compute.dilation if isinstance(spec.compute, VirtualCompute) else 1.0
                lab.set_rates(ClusterSpec.model_validate(spec.plan.cluster.spec), scale=1 / dilation)
                found[name].append(pool.trial(spec))
    return found


def agreement(results: Mapping[str, Sequence[TrialResult]]) -> tuple[int, int, int]:
    """Of the pairs: how many agree, how many others hold a trial that says it was noisy, and how many there are."""
    agree = said = total = 0
    for trials in results.values():
        for a, b in pairwise(trials):
            total += 1
            if a.step_s and b.step_s and abs(b.step_time_s / a.step_time_s - 1) <= WITHIN:
                agree += 1
            elif a.noise or b.noise:
                said += 1
    return agree, said, total


def report(results: Mapping[str, Sequence[TrialResult]]) -> Report:
    """What was found."""
    agree, said, total = agreement(results)
    found = Report("repeat", "The same trial again", ("trial", "step times", "largest difference", "says of itself"))
    for name, trials in results.items():
        times = [t.step_time_s for t in trials if t.step_s]
        shown = ", ".join(f"{1e3 * s:.1f} ms" for s in times)
        apart = max((abs(b / a - 1) for a, b in pairwise(times)), default=float("nan"))
        remarks = "; ".join(dict.fromkeys(t.noise or t.error.partition("\n")[0] for t in trials if t.noise or t.error))
        found.rows.append((name, shown, f"{apart:.1%}", remarks or "nothing"))
    noisy = sum(bool(t.noise) for trials in results.values() for t in trials)
    found.notes.append(
        f"{agree} of {total} pairs agree within {WITHIN:.0%}; of the {total - agree} others, {said} hold a trial that "
        f"says that it was noisy. {noisy} of {sum(map(len, results.values()))} trials say so: other processes or the "
        "hypervisor took processor time, or the steps of a trial differ among themselves."
    )
    found.targets.append(
        Target("pairs that agree, or say that they are noisy", (agree + said) / total, SHARE, "at least")
    )
    found.data = {name: [list(t.step_s) for t in trials] for name, trials in results.items()}
    return found


@click.command(help=__doc__)
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=2), help="How often each trial is run.")
@options
def main(rounds: int, check: bool, json_file: str | None, save: bool) -> None:
    import torch

    from autopar.lab import unavailable_reason

    reason = unavailable_reason()
    if reason is not None:
        raise click.ClickException(f"there is no lab here: {reason}")
    torch.set_num_threads(1)
    command = f"python -m benchmarks.repeat {shlex.join(sys.argv[1:])}".strip()
    sys.exit(publish(report(measure(rounds)), command=command, check=check, json_file=json_file, save=save))


if __name__ == "__main__":
    main()
