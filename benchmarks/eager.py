"""Models that cannot be captured, under a searched exact plan, beside DDP with its best bucket size.

    python -m benchmarks.eager [--check] [--save] [--only MODEL/CLUSTER]

Each runs eagerly on hosts of the lab, with links of two rates, one thread a rank. `benchmarks.peers` does the
comparison: `ddp_buckets` tries its bucket sizes, is told to find unused parameters where the model has any, and both
have the same fused optimizer; steps are taken in turns.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import torch

from autopar.lab import Lab, unavailable_reason
from autopar.runtime.uncaptured.model import loss_and_output
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import Plan
from benchmarks.harness import Report, Spread, Target, options, publish
from benchmarks.peers.case import Case, Effort
from benchmarks.peers.measure import Contest
from benchmarks.peers.outcome import TOLERANCE, CaseOutcome, geometric_mean, relative
from benchmarks.peers.ranks import Ranks
from benchmarks.suite.clusters import even
from benchmarks.zoo.uncaptured import UNCAPTURED

CLUSTERS = {"2x1g": even(2, 1000), "3x200m": even(3, 200)}
PEER = "ddp_buckets"
WORST, MEAN = 1.00, 0.90
"""Of the best DDP's time: at most, in each model over its clusters, and in the geometric mean."""
EFFORT = Effort(rounds=12, slow_rounds=12, rounds_s=40.0, block_s=1.5, block_steps=10, search_time_s=3.0)
NOTES = (
    "Ratios are medians (quartiles) over rounds in which both take a block of steps in turn, in the same processes, "
    "one thread each; below 1 autopar is faster. DDP is the fastest of its bucket sizes, with gradients as views of "
    "the buckets, and find_unused_parameters=True for the models in which parameters go unused (experts, early exit). "
    "Both have a fused AdamW.",
    "The floor is what autopar sends, over the link's rate: no step that sends as much takes less.",
    "Plans may leave parameters on their way into the next forward pass (optimize(late_parameters=True)): each is "
    "waited for as it is first used. The first step of each block is not timed, of either system, as it finds "
    "parameters that have arrived during the other's turn.",
    "'Predicted' is what the plan says over what its steps took. Its compute is timed on one rank while as many others "
    "compute as the lab has hosts, which share the machine's cores, as they do where optimize() looks at a model.",
)


@contextmanager
def beside_others(workload: str, count: int) -> Iterator[None]:
    """While it is open, as many other processes compute steps of the workload."""
    spawned = get_context("spawn")
    stop, begun = spawned.Event(), [spawned.Event() for _ in range(count)]
    others = [spawned.Process(target=_compute, args=(workload, one, stop), daemon=True) for one in begun]
    for process in others:
        process.start()
    try:
        if not all(one.wait(timeout=120.0) for one in begun):
            raise click.ClickException(f"{workload}: a process that is to compute beside has not begun")
        yield
    finally:
        stop.set()
        for process in others:
            process.join(timeout=30.0)


def _compute(workload: str, begun: Event, stop: Event) -> None:
    torch.set_num_threads(1)
    of = UNCAPTURED[workload]
    model, step = of.model(), 0
    while not stop.is_set():
        loss_and_output(model, of.loss_fn, of.batch(step, 0))[0].backward()  # type: ignore[no-untyped-call]
        model.zero_grad()
        step += 1
        if step == 2:  # the first steps take longer
            begun.set()


def measure(
    workload: str, cluster_name: str, cluster: ClusterSpec, ranks: Ranks, note: str, late: bool
) -> tuple[CaseOutcome, float]:
    """Both systems in turn; and the step time that the plan predicts, in seconds."""
    start = time.monotonic()

    def say(what: str) -> None:
        click.echo(f"[{time.monotonic() - start:4.0f} s] {workload}/{cluster_name}: {what}", err=True)

    with TemporaryDirectory(prefix="autopar-") as folder:
        case = Case(
            UNCAPTURED[workload], cluster_name, cluster, Path(folder), EFFORT.search_time_s, late_parameters=late
        )
        with beside_others(workload, cluster.world_size - 1):
            case.look()
        outcome = Contest(case, ranks, EFFORT, say).run((PEER,), note, True)
        if any(e.name == PEER for e in outcome.entries) and len(outcome.entries) == 2:
            plan = Plan.load(next(e for e in outcome.entries if e.ours).system.options["plan"])
            say(f"plan '{plan.name}', {len(plan.groups)} groups: {', '.join({g.strategy: 0 for g in plan.groups})}")
            return outcome, plan.prediction.step_time_s if plan.prediction is not None else math.nan
    raise click.ClickException(f"{workload}/{cluster_name}: {outcome.absent}")


def examine(report: Report, outcome: CaseOutcome, predicted_s: float, cluster: ClusterSpec) -> float:
    """Adds a case's row and its figures; returns the ratio."""
    assert cluster.network.bandwidth is not None, "the lab's clusters say their rate"
    ours = next(e.system for e in outcome.entries if e.ours)
    theirs = next(e.system for e in outcome.entries if not e.ours)
    ratio, difference = relative(ours, theirs), outcome.loss_difference(ours)
    took_s = Spread.of(ours.step_s.values()).median
    sent_bytes = [s.sent_bytes or math.nan for s in (ours, theirs)]
    floor_s = sent_bytes[0] / cluster.network.bandwidth.value
    report.rows.append(
        (
            outcome.workload,
            outcome.cluster,
            f"{1e3 * took_s:.0f}",
            f"{1e3 * theirs.median_step_s:.0f}",
            f"{ratio:.3f}",
            f"{floor_s / theirs.median_step_s:.2f}",
            *(f"{n / 1e6:.1f}" for n in sent_bytes),
            f"{theirs.options.get('bucket_cap_mb', '')}",
            f"{predicted_s / took_s:.2f}",
            f"{difference:.1e}",
        )
    )
    report.targets.append(Target(f"{outcome.name}: difference of losses", difference, TOLERANCE["exact"]))
    report.data[outcome.name] = {
        "ours_s": list(ours.step_s.values()),
        "ddp_s": list(theirs.step_s.values()),
        "predicted_s": predicted_s,
        "floor_s": floor_s,
        "machine": outcome.machine,
    }
    return ratio.median


def finish(report: Report, ratios: dict[str, list[float]]) -> None:
    """Adds the targets over all cases. `ratios`: of each model, in each cluster."""
    for name, found in ratios.items():
        mean = geometric_mean(found)
        report.targets.append(Target(f"{name}: autopar's step in DDP's, geometric mean over its clusters", mean, WORST))
    everything = [r for found in ratios.values() for r in found]
    report.targets.append(Target("autopar's step in DDP's, geometric mean", geometric_mean(everything), MEAN))


def chosen(only: Sequence[str]) -> list[tuple[str, str]]:
    """The cases that `only` names, cluster by cluster; raises `click.UsageError` where it names none."""
    every = [(c, w) for c in CLUSTERS for w in UNCAPTURED]
    found = [(c, w) for c, w in every if not only or {w, c, f"{w}/{c}"} & set(only)]
    if not found:
        known = f"models {', '.join(UNCAPTURED)}; clusters {', '.join(CLUSTERS)}"
        raise click.UsageError(f"--only {', '.join(only)} names no case; there are {known}")
    return found


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", multiple=True, metavar="MODEL/CLUSTER", help="This case alone; also a MODEL, or a CLUSTER.")
@click.option("--late/--no-late", default=True, help="Allow late parameters, as optimize(late_parameters=True) does.")
@options
def main(only: tuple[str, ...], late: bool, check: bool, json_file: str | None, save: bool) -> None:
    """Compares models that run eagerly with DDP, in the lab."""
    cases, reason = chosen(only), unavailable_reason()
    if reason is not None:
        raise click.ClickException(f"no lab: {reason}")
    report = Report(
        name="eager",
        title="Models that cannot be captured, beside DDP with its best bucket size",
        columns=(
            "model",
            "cluster",
            "autopar ms",
            "DDP ms",
            "autopar in DDP's",
            "floor in DDP's",
            "MB sent a rank",
            "MB, DDP",
            "MiB a bucket of DDP's",
            "predicted, of what was measured",
            "loss difference",
        ),
        notes=list(NOTES),
    )
    ratios: dict[str, list[float]] = {}
    for cluster_name in dict.fromkeys(c for c, _ in cases):
        cluster = CLUSTERS[cluster_name]()
        with ExitStack() as stack:
            lab = stack.enter_context(Lab.of(cluster))
            ranks = stack.enter_context(Ranks(lab.ranks))
            for workload in (w for c, w in cases if c == cluster_name):
                outcome, predicted_s = measure(workload, cluster_name, cluster, ranks, lab.note, late)
                ratios.setdefault(workload, []).append(examine(report, outcome, predicted_s, cluster))
                click.echo("  ".join(report.rows[-1]), err=True)
    finish(report, ratios)
    if not late:
        report.notes.append("Without late_parameters.")
    command = " ".join(
        ["python -m benchmarks.eager", *(f"--only '{o}'" for o in only), *([] if late else ["--no-late"])]
    )
    sys.exit(publish(report, command=command, check=check, json_file=json_file, save=save))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
