"""`autopar serve`: add gradients up on a host without devices."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import click

from autopar.cli.console import is_verbose, progress, quiet_libraries, standard_options

_POLL_S, _GRACE_S = 0.1, 5.0


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
    address = address.strip("[]")  # an IPv6 address's
    if not address or not port.isascii() or not port.isdigit() or len(port) > 5 or not 0 < int(port) < 65536:
        said = f"expected ADDRESS:PORT, as in 10.0.0.1:29500, with a port of 1 to 65535, got '{master}'"
        raise click.BadParameter(said, param_hint="ADDRESS")
    if not is_verbose():  # torch writes forty lines where a store has gone, which is how a job ends
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    with quiet_libraries(), _asked_to_end() as asked:
        import torch.distributed as dist
        from torch._C._distributed_c10d import TCPStore

        from autopar.errors import CollectiveError
        from autopar.runtime.job.servers import Serving
        from autopar.runtime.job.store import InThread

        name = name or socket.gethostname()
        timeout = timedelta(seconds=timeout_s)
        connecting = InThread(
            lambda: TCPStore(address, int(port), is_master=False, timeout=timeout, wait_for_workers=False), "connecting"
        )
        begun, allowed_s = time.monotonic(), timeout_s + _GRACE_S
        while not connecting.is_done(_POLL_S) and time.monotonic() - begun < allowed_s:
            if asked.is_set():
                progress("ended, as it was asked to, before the job has begun")
                return
        try:
            if not connecting.is_done():
                raise dist.DistNetworkError("it does not answer")
            store = connecting.result()
        except dist.DistError as e:
            raise CollectiveError(
                f"no job at {master} within {timeout_s:g} s: start it with torchrun, or check address and port"
            ) from e
        progress(f"host '{name}' serves the job at {master}")
        serving = Serving(store, name, progress)
        running = InThread(lambda: serving.run(asked), "serving")
        while not running.is_done(_POLL_S) and not asked.is_set():
            pass
        if running.is_done():
            running.result()
        why = "as it was asked to" if asked.is_set() else "with the job"
        progress(f"ended, {why}, after {serving.programs} program{'' if serving.programs == 1 else 's'}")
        if not running.is_done(_POLL_S):
            # Threads that wait for ranks cannot be told to stop, and abort the process when the interpreter ends.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


@contextlib.contextmanager
def _asked_to_end() -> Iterator[threading.Event]:
    """Set by Ctrl-C and by SIGTERM, both of which end a server well."""
    asked = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, frame: asked.set()) for number in numbers]
    try:
        yield asked
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
