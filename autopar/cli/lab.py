"""`autopar lab`: emulate a cluster on this machine, and run on it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from autopar.cli.console import json_option, progress, result, result_json, result_table, standard_options

if TYPE_CHECKING:
    from autopar.lab.keeper import StandingHost


F = TypeVar("F", bound=Callable[..., Any])


@click.group("lab")
def command() -> None:
    """Emulate a cluster on this machine: hosts as network namespaces, links with the cluster's rates.

    Needs root on Linux, with iproute2. docs/lab.md says what is emulated, and what is not.
    """


def _scale_option(function: F) -> F:
    return click.option(
        "--scale",
        type=click.FloatRange(min=0, min_open=True),
        default=1.0,
        show_default=True,
        help="Times this, every rate.",
    )(function)


@command.command("up")
@click.argument("cluster")
@click.option("--name", help="What to call the lab. Default: the file's name without its ending.")
@_scale_option
@json_option
@standard_options
def up(cluster: str, name: str | None, scale: float, as_json: bool) -> None:
    """Bring up the cluster described in the file CLUSTER. It stands until `autopar lab down`."""
    from autopar.errors import SpecError
    from autopar.lab import keeper
    from autopar.spec.cluster import ClusterSpec

    spec = ClusterSpec.load(cluster)
    name = name or Path(cluster).stem
    if any(other.name == name for other in keeper.standing()):
        raise SpecError(f"a lab '{name}' is up: take it down with `autopar lab down {name}`, or give a --name")
    hosts = keeper.start(name, spec, scale)
    if as_json:
        from dataclasses import asdict

        result_json({"name": name, "hosts": [asdict(host) for host in hosts]})
        return
    progress(f"lab '{name}' is up: {spec.summary}{_scaled(scale)}; `autopar lab down {name}` removes it")
    result_table(("host", "ranks", "address", "out", "in", "enter with"), [_row(host) for host in hosts], "llllll")


@command.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("cluster")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
@_scale_option
@click.option("--loopback", is_flag=True, help="No namespaces and no rates: works without root.")
@click.option("--all-ranks", is_flag=True, help="Show what all ranks print, not only rank 0.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0), metavar="SECONDS", help="End it then, with 124.")
@standard_options
def run(
    cluster: str,
    argv: tuple[str, ...],
    scale: float,
    loopback: bool,
    all_ranks: bool,
    timeout_s: float | None,
) -> None:
    """Bring up the cluster described in the file CLUSTER, run COMMAND once a rank, and remove it.

    Each rank has the environment that torchrun would set. Options come before CLUSTER. The exit code is that of the
    first rank that fails, 128 + n where signal n ended it.
    """
    from autopar.cli.lab_output import run_ranks
    from autopar.lab.cluster import Lab
    from autopar.lab.cluster import loopback as loopback_lab
    from autopar.lab.namespaces import LabUnavailable, unavailable_reason
    from autopar.spec.cluster import ClusterSpec

    spec = ClusterSpec.load(cluster)
    line = _checked(argv[1:] if argv[:1] == ("--",) else argv)
    reason = None if loopback else unavailable_reason()
    if reason is not None:
        raise LabUnavailable(f"{reason}; with --loopback the ranks run on this machine, over links without a rate")
    with loopback_lab(spec) if loopback else Lab.of(spec, scale=scale) as lab:
        progress(f"{spec.summary}: {lab.note}")
        environment = {} if "OMP_NUM_THREADS" not in os.environ else {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"]}
        code = run_ranks(lab, line, environment, all_ranks, timeout_s)
    click.get_current_context().exit(code)


@command.command("down")
@click.argument("name", required=False)
@click.option("--all", "everything", is_flag=True, help="All labs that stand, and what killed processes left behind.")
@standard_options
def down(name: str | None, everything: bool) -> None:
    """Remove the lab NAME with all that runs in it; without a NAME, the only one."""
    from autopar.errors import SpecError, did_you_mean
    from autopar.lab import keeper

    if name is not None and everything:
        raise click.UsageError("give either a NAME or --all, not both")
    labs = keeper.standing()
    names = [lab.name for lab in labs]
    if name is not None:
        if name not in names:
            raise SpecError(f"no lab '{name}' is up{did_you_mean(name, names) or '; ' + _listed(names)}")
        labs = [lab for lab in labs if lab.name == name]
    elif not everything and len(labs) != 1:
        raise SpecError(f"{_listed(names)}; say which one, or --all" if labs else _listed(names))
    for lab in labs:
        keeper.stop(lab)
        result(f"lab '{lab.name}' is removed")
    if everything:
        from autopar.lab.namespaces import cleanup_stale

        stale = cleanup_stale()
        result(
            "\n".join(f"namespace '{left}' is removed, its owner was gone" for left in stale) or "nothing else was left"
        )


def _listed(names: list[str]) -> str:
    return f"labs that are up: {', '.join(names)}" if names else "no lab is up"


def _scaled(scale: float) -> str:
    return "" if scale == 1 else f", every rate times {scale:g}"


def _row(host: StandingHost) -> tuple[str, ...]:
    from autopar.spec.units import NETWORK_RATE, rounded

    out, into = (
        rounded(bps / 8, NETWORK_RATE) if bps is not None else "unlimited"
        for bps in (host.sends_bps, host.receives_bps)
    )
    ranks = ", ".join(map(str, host.ranks)) or "serves"
    return host.name, ranks, host.address, out, into, f"ip netns exec {host.namespace} bash"


def _checked(argv: tuple[str, ...]) -> tuple[str, ...]:
    """The command of the ranks, where there is such a program."""
    from autopar.errors import SpecError

    if not argv:
        raise click.UsageError("say what to run: autopar lab run cluster.yaml -- python train.py")
    if shutil.which(argv[0]) is None:
        hint = f"; write `-- python {argv[0]}`" if argv[0].endswith(".py") else ""
        raise SpecError(f"there is no program '{argv[0]}'{hint}")
    return argv
