"""`autopar serve`: add gradients up on a host without devices."""

from __future__ import annotations

import socket
from datetime import timedelta

import click

from autopar.cli.console import progress, quiet_libraries, standard_options


@click.command("serve")
@click.argument("master", metavar="ADDRESS:PORT")
@click.option("--name", help="The host's name in the cluster's description. Default: what this machine calls itself.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the job to start.",
)
@standard_options
def command(master: str, name: str | None, timeout_s: float) -> None:
    """Add gradients up for the job whose rank 0 is at ADDRESS:PORT, until it ends.

    For hosts that a cluster's description says only serve (`serves: true`). ADDRESS and PORT are those that torchrun
    is given as --master-addr and --master-port. Start it before the ranks, or up to their timeout later.
    """
    address, _, port = master.rpartition(":")
    if not address or not port.isdigit():
        raise click.BadParameter(f"expected ADDRESS:PORT, as in 10.0.0.1:29500, got '{master}'", param_hint="ADDRESS")
    with quiet_libraries():
        import torch.distributed as dist
        from torch._C._distributed_c10d import TCPStore

        from autopar.errors import CollectiveError
        from autopar.runtime.servers import serve

        name = name or socket.gethostname()
        try:
            timeout = timedelta(seconds=timeout_s)
            store = TCPStore(address, int(port), is_master=False, timeout=timeout, wait_for_workers=False)
        except dist.DistError as e:
            raise CollectiveError(
                f"no job at {master} within {timeout_s:g} s: start it with torchrun, or check address and port"
            ) from e
        progress(f"host '{name}' serves the job at {master}")
        serve(store, name, progress)
