"""What sharing a global batch out by speed saves: three ranks of which one has a core alone, and two share the other.

    python -m benchmarks.shares [--check]

The ranks' speeds are measured as they all compute at once, and written into a cluster description; `global_batch`
shares the samples out by them. Steps take turns with DistributedDataParallel's on equal batches.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import click
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.search import SearchOptions
from autopar.spec.cluster import ClusterSpec
from benchmarks.harness import Report, Target, Timings, interleave, options, publish
from benchmarks.processes import on_ranks

RANKS, SAMPLES = 3, 48
BLOCK = 4
"""Steps of one contestant in a round."""
AT_BEST = 0.75
"""Of the time of equal batches: 16 samples at half the speed take as long as 32; speeds of 1, 1/2, 1/2 share 48 out as
24, 12, 12."""
MOST = 0.85
COLUMNS = ["", "samples of each rank", "step, ms", "of DDP's"]


def model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, behind in ((3, 48), (48, 96), (96, 96), (96, 96)):
        layers += [nn.Conv2d(before, behind, 3, padding=1), nn.GroupNorm(8, behind), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10))


def batch(samples: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(samples, 3, 32, 32, generator=draw), torch.randint(0, 10, (samples,), generator=draw)


def sgd(of: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(of.parameters(), lr=0.01, momentum=0.9)


def seconds_of_a_step(rank: int) -> float:
    """Of computing an equal share, as all ranks do so at once: the median of ten."""
    own, (x, y), taken = model(), batch(SAMPLES // RANKS, rank), []
    for _ in range(13):
        dist.barrier()
        begun = time.perf_counter()
        torch.autograd.backward(nn.functional.cross_entropy(own(x), y))
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[3:])


def described(seconds: list[float]) -> ClusterSpec:
    """A host for each rank, as fast as it was measured to be beside the first."""
    hosts = [
        f"{{name: host{r}, devices: {{kind: cpu-core{r}, memory: 4 GiB, "
        f"memory_bandwidth: {10 * seconds[0] / s:.3f} GB/s, peak_flops: {50 * seconds[0] / s:.3f} GFLOP/s}}}}"
        for r, s in enumerate(seconds)
    ]
    return ClusterSpec.loads(f"{{hosts: [{', '.join(hosts)}], network: {{bandwidth: 10 Gbit/s}}}}")


def contestants(rank: int, cluster: ClusterSpec) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """What takes turns, by name, and each one's batches in words."""
    equal, loss_fn = batch(SAMPLES // RANKS, rank), nn.functional.cross_entropy
    plan = autopar.plan(
        model(),
        cluster,
        example_inputs=equal,
        loss_fn=loss_fn,
        optimizer=sgd(model()),
        strategy="ddp",
        search=SearchOptions(global_batch=SAMPLES),
    )
    sizes = [place.device.batch or 0 for place in plan.cluster.cluster.ranks]
    of_autopar = {"autopar, equal": [SAMPLES // RANKS] * RANKS, "autopar, shared out": sizes}
    steps: dict[str, Callable[[], object]] = {}
    ddp = DistributedDataParallel(model())
    optimizer = sgd(ddp)

    def plain() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(loss_fn(ddp(equal[0]), equal[1]))
        optimizer.step()

    steps["DDP, equal"] = plain
    for name, each in of_autopar.items():
        own, data = model(), batch(each[rank], rank)
        program = autopar.optimize(
            own, cluster, optimizer=sgd(own), example_inputs=data, loss_fn=loss_fn, strategy="ddp"
        )
        steps[name] = lambda program=program, data=data: program.step(data)  # type: ignore[misc]
    shown = {"DDP, equal": of_autopar["autopar, equal"], **of_autopar}
    return steps, {name: ", ".join(map(str, each)) for name, each in shown.items()}


def run(rank: int, ranks: int, cores: list[int], rounds: int, file: str) -> None:
    """All contestants in this rank; rank 0 writes their times."""
    warnings.simplefilter("ignore", autopar.AutoparWarning)
    os.sched_setaffinity(0, {cores[min(rank, 1)]})
    of_all = torch.zeros(ranks, dtype=torch.float64)
    of_all[rank] = seconds_of_a_step(rank)
    dist.all_reduce(of_all)
    each: list[float] = of_all.tolist()
    steps, batches = contestants(rank, described(each))

    def block(step: Callable[[], object]) -> Callable[[], None]:
        def blocked() -> None:
            for _ in range(BLOCK):
                step()
            dist.barrier()

        return blocked

    timings = interleave({name: block(step) for name, step in steps.items()}, rounds)
    if rank == 0:
        Path(file).write_text(json.dumps({"seconds": timings.seconds, "batches": batches, "alone_s": each}))


@click.command(help=__doc__)
@click.option("--rounds", default=9, show_default=True)
@options
def main(rounds: int, check: bool, json_file: str | None, save: bool) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise click.ClickException("two cores are needed, of which one is for the first rank alone")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "times.json")
        on_ranks(RANKS, run, cores[:2], rounds, str(file))
        found = json.loads(file.read_text())
    timings = Timings({name: tuple(each) for name, each in found["seconds"].items()})
    report = Report(
        "shares", "A global batch shared out by speed", ["", "samples of each rank", "step, ms", "of DDP's"]
    )
    for name in timings.seconds:
        of_ddp = timings.ratio(name, "DDP, equal")
        report.rows.append(
            [name, found["batches"][name], f"{1e3 * timings.time(name).median / BLOCK:.1f}", f"{of_ddp:.3f}"]
        )
    alone = ", ".join(f"{1e3 * s:.0f}" for s in found["alone_s"])
    report.notes = [
        f"{SAMPLES} samples on {RANKS} ranks of one thread: the first has a core alone, the others share one. Their "
        f"passes over equal batches take {alone} ms. At best, sharing out takes {AT_BEST:.2f} of that. Times are "
        "medians of rounds in which all run in turn; ratios are medians (quartiles) of those within a round."
    ]
    report.targets = [Target("shared out, of DDP", timings.ratio("autopar, shared out", "DDP, equal").median, MOST)]
    report.data = found
    sys.exit(publish(report, command="python -m benchmarks.shares", check=check, json_file=json_file, save=save))


if __name__ == "__main__":
    main()
