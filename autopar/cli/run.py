"""`autopar run`: start a training script under torchrun with a plan."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from autopar.cli.console import progress, result, standard_options
from autopar.spec.plan_variable import PLAN_VARIABLE

if TYPE_CHECKING:
    from autopar.spec.cluster import ClusterFingerprint

DEFAULT_PORT = 29500


@click.command(
    "run",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "--nproc-per-node",
    type=click.IntRange(min=1),
    help="Ranks on this host. Default: as many devices as the plan's cluster has on it, where that has --nnodes hosts "
    "with devices: --node-rank counts them in the order of its description. Else the plan's, shared evenly.",
)
@click.option("--nnodes", type=click.IntRange(min=1), default=1, show_default=True, help="Hosts.")
@click.option("--node-rank", type=click.IntRange(min=0), help="Which of the hosts this is, from 0.")
@click.option("--master", metavar="HOST[:PORT]", help="Host of node rank 0.")
@click.option("--dry-run", is_flag=True, help="Only print the command.")
@standard_options
@click.argument("plan")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(
    plan: str,
    script: str,
    args: tuple[str, ...],
    nproc_per_node: int | None,
    nnodes: int,
    node_rank: int | None,
    master: str | None,
    dry_run: bool,
) -> None:
    """Start SCRIPT under torchrun, with as many ranks as PLAN was made for.

    autopar.optimize, called in SCRIPT, takes the plan from the environment variable AUTOPAR_PLAN. Options come before
    PLAN; what stands behind SCRIPT is passed on to it. The exit code is torchrun's.
    """
    from autopar.errors import SpecError
    from autopar.spec.plan import Plan

    loaded = Plan.load(plan)
    if not Path(script).is_file():
        raise SpecError(f"there is no script '{script}' (looked in {Path.cwd()})")
    world_size = loaded.cluster.world_size
    if nproc_per_node is None:
        nproc_per_node = _devices_of(loaded.cluster, nnodes, node_rank)
    if nproc_per_node is None:
        if world_size % nnodes:
            raise SpecError(
                f"the plan is for {world_size} ranks, which do not share evenly over {nnodes} hosts: "
                "say with --nproc-per-node how many this host has"
            )
        nproc_per_node = world_size // nnodes
    if nnodes == 1:
        loaded.check_world_size(nproc_per_node)
    elif nproc_per_node >= world_size:
        raise SpecError(
            f"--nproc-per-node {nproc_per_node} leaves no rank of the plan's {world_size} for the other hosts"
        )
    line = torchrun_command(script, args, nproc_per_node, nnodes, node_rank, master)
    extra = {PLAN_VARIABLE: str(Path(plan).resolve())}
    if "OMP_NUM_THREADS" not in os.environ:
        from autopar.spec.detect import threads_of_rank

        extra["OMP_NUM_THREADS"] = threads_of_rank(nproc_per_node)
    shown = " ".join([*(f"{name}={shlex.quote(value)}" for name, value in extra.items()), shlex.join(line)])
    if dry_run:
        result(shown)
        return
    progress(f"plan '{loaded.name}' for {loaded.cluster.summary}: {nproc_per_node} of {world_size} ranks on this host")
    progress(shown)
    code = run_to_end(line, {**os.environ, **extra})
    click.get_current_context().exit(code)


def _devices_of(cluster: ClusterFingerprint, nnodes: int, node_rank: int | None) -> int | None:
    """How many devices a host has, of those that have any; `None` where it is not known which host of the cluster it
    is, or the cluster has another number of them."""
    hosts = [host for host in cluster.cluster.all_hosts if host.devices] if cluster.spec else []
    if node_rank is None or not node_rank < nnodes == len(hosts):
        return None
    return len(hosts[node_rank].devices)


def torchrun_command(
    script: str,
    args: Sequence[str],
    nproc_per_node: int,
    nnodes: int = 1,
    node_rank: int | None = None,
    master: str | None = None,
) -> list[str]:
    """The torchrun command line; raises `SpecError` where the options for several hosts do not fit together."""
    from autopar.errors import SpecError

    line = [sys.executable, "-m", "torch.distributed.run"]
    if nnodes == 1:
        if node_rank not in (None, 0) or master is not None:
            raise SpecError("--node-rank and --master are for several hosts: give --nnodes too")
        line.append("--standalone")
    else:
        if node_rank is None or master is None:
            raise SpecError(f"--nnodes {nnodes} needs --node-rank (which host this is) and --master (host of rank 0)")
        if node_rank >= nnodes:
            raise SpecError(f"--node-rank is {node_rank}, with {nnodes} hosts it goes from 0 to {nnodes - 1}")
        matched = re.fullmatch(r"(\[[^\]]+\]|[^:]+)(?::(\d+))?", master)
        if matched is None:
            raise SpecError(f"--master is '{master}', expected HOST or HOST:PORT")
        line += [f"--nnodes={nnodes}", f"--node-rank={node_rank}", f"--master-addr={matched[1].strip('[]')}"]
        line.append(f"--master-port={matched[2] or DEFAULT_PORT}")
    return [*line, f"--nproc-per-node={nproc_per_node}", script, *args]


def run_to_end(line: Sequence[str], environment: dict[str, str]) -> int:
    """Runs a command until it ends; returns its exit code, 130 where it was interrupted, 128 + n for signal n.

    SIGTERM is passed on. Ctrl-C reaches the command by itself, as it is in the same process group; here it is only
    remembered, so that the ranks are waited for.
    """
    interrupted = False

    def remember(signum: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True

    # Set before the start: a signal that comes in between is not lost. The child restores the default, or would
    # inherit nothing but an ignored signal anyway: handlers do not survive exec.
    before = signal.signal(signal.SIGINT, remember)
    try:
        process = subprocess.Popen(line, env=environment)
        terminate_before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            code = process.wait()
        finally:
            signal.signal(signal.SIGTERM, terminate_before)
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted:
        return 130
    return 128 - code if code < 0 else code
