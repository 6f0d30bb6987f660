"""`autopar calibrate`: measure a cluster."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autopar.cli.console import (
    json_option,
    output_option,
    progress,
    quiet_libraries,
    result,
    result_table,
    standard_options,
    writable,
)
from autopar.cli.described import is_local, load_cluster

if TYPE_CHECKING:
    from autopar.spec.calibration import Calibration, CollectiveTimes
    from autopar.spec.cluster import ClusterSpec


@click.command("calibrate")
@click.option("--cluster", metavar="FILE|local:N", help="Cluster description. Default: what torchrun's job has.")
@output_option
@click.option(
    "--time-budget",
    type=click.FloatRange(min=0, min_open=True),
    default=180.0,
    show_default=True,
    metavar="SECONDS",
    help="How long it may take: decides how large the messages become.",
)
@click.option(
    "--complete",
    metavar="FILE",
    callback=writable,
    help="Write the cluster's description there, with the rates that it left open. The calibration is of that cluster.",
)
@json_option
@standard_options
def command(cluster: str | None, output: Path | None, time_budget: float, complete: Path | None, as_json: bool) -> None:
    """Measure what a cluster does: collectives, links, devices.

    On the cluster, once a rank: torchrun ... -m autopar calibrate --cluster cluster.yaml -o calibration.json. By
    itself, the cluster is emulated on this machine (`autopar lab`), which needs root, but for local:N. `autopar plan
    --calibration` uses what was measured.
    """
    if cluster is None and "WORLD_SIZE" not in os.environ:
        raise click.UsageError("give a --cluster to emulate, or start it on the cluster with torchrun")
    spec = load_cluster(cluster) if cluster is not None else None
    if spec is not None and spec.world_size > 1 and "WORLD_SIZE" not in os.environ:
        assert cluster is not None
        told = [*(("-o", str(output)) if output else ()), *(("--json",) if as_json else ())]
        told += ["--complete", str(complete)] if complete else []
        click.get_current_context().exit(_emulate(spec, cluster, [*told, "--time-budget", str(time_budget)]))
    with quiet_libraries():
        from autopar.calibration import calibrate

        found = calibrate(spec, time_budget_s=time_budget, progress=lambda what: progress(f"measuring {what}"))
    if os.environ.get("RANK", "0") != "0":
        return
    if complete is not None:
        found = _completed(found, complete)
    if output is not None:
        found.save(output)
    if as_json:
        result(found.model_dump_json(indent=1))
    else:
        _show(found)
    progress(f"wrote {output}" if output else "the calibration was not kept; -o calibration.json writes it")


def _completed(found: Calibration, path: Path) -> Calibration:
    """Writes the completed description; returns the calibration as one of that cluster."""
    from autopar.spec.complete import complete
    from autopar.spec.files import write_file

    completed = complete(found.cluster.cluster, found)
    write_file(path, completed.to_yaml(), "cluster description")
    progress(f"wrote {path}: {completed.summary}")
    return found.model_copy(update={"cluster": completed.fingerprint})


def _emulate(spec: ClusterSpec, cluster: str, told: list[str]) -> int:
    """Starts the same command on every rank of a lab; returns its exit code."""
    from autopar.cli.lab_output import run_ranks
    from autopar.errors import SpecError
    from autopar.lab.cluster import Lab, loopback
    from autopar.lab.namespaces import LabUnavailable, unavailable_reason
    from autopar.spec.topology import Topology

    kinds = sorted({place.device.kind for place in Topology(spec).ranks} - {"cpu"})
    if kinds:
        raise SpecError(f"this machine cannot emulate {', '.join(kinds)}: calibrate on the cluster, with torchrun")
    here = is_local(cluster)
    reason = None if here else unavailable_reason()
    if reason is not None:
        raise LabUnavailable(f"{reason}; on the cluster itself: torchrun ... -m autopar calibrate --cluster {cluster}")
    with loopback(spec) if here else Lab.of(spec) as lab:
        progress(f"{spec.summary}: {'ranks of this machine' if here else lab.note}")
        environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        argv = [sys.executable, "-m", "autopar", "calibrate", "--cluster", cluster, *told]
        return run_ranks(lab, argv, environment, all_ranks=False, timeout_s=None)


def _show(found: Calibration) -> None:
    from autopar.formatting import duration, size
    from autopar.spec.units import FLOP_RATE, NETWORK_RATE, text

    def rate(bytes_per_s: float) -> str:
        return text(float(f"{8 * bytes_per_s:.3g}") / 8, NETWORK_RATE)

    def row(times: CollectiveTimes) -> tuple[str, ...]:
        largest, seconds = times.size_bytes[-1], times.seconds[-1]
        among = f"{len(times.teams)} x {len(times.teams[0])} ranks" if times.teams else "all ranks"
        at = dict(zip(times.size_bytes, times.seconds, strict=True))
        middle = min(at, key=lambda n: abs(n - (1 << 20)))
        return (
            times.kind.replace("_", "-"),
            among,
            duration(times.seconds[0]),
            duration(at[middle]),
            size(largest),
            duration(seconds),
            rate(largest / seconds),
        )

    if found.collectives:
        header = ("collective", "among", size(found.collectives[0].size_bytes[0]), "1 MiB", "largest", "", "rate")
        result_table(header, [row(times) for times in found.collectives], "llrrrrr")
        result("")
    if found.links:
        rows = [(f"{a.sender} to {a.receiver}", rate(a.bytes_per_s), duration(a.latency_s)) for a in found.links]
        result_table(("ranks", "rate", "latency"), rows, "lrr")
        result("")
    columns: tuple[str, ...] = (
        "device",
        *(f"{dtype}" for dtype in found.devices[0].flops_per_s),
        "copies",
        "updates",
        "start",
    )
    devices = [
        (
            d.kind,
            *(text(float(f"{flops:.3g}"), FLOP_RATE) for flops in d.flops_per_s.values()),
            f"{size(d.bytes_per_s)}/s",
            f"{size(d.update_bytes_per_s)}/s",
            duration(d.start_s),
        )
        for d in found.devices
    ]
    result_table(columns, devices, "l" + "r" * (len(columns) - 1))
    if found.two_at_once is not None and found.compute_beside is not None:
        result("")
        result(f"two all-reduces at once take {found.two_at_once:.2f} times as long as one")
        result(f"compute beside an all-reduce takes {found.compute_beside:.2f} times as long as alone")
        waits = next((t.core_wait_s for t in found.collectives if t.kind == "all_reduce"), 0.0)
        if waits:
            result(f"an all-reduce beside compute of all ranks takes {duration(waits)} longer than alone")
    if found.compute_at_once is not None:
        result(f"a rank's compute takes {found.compute_at_once:.2f} times as long while all compute as alone")
