"""How the processes of a verification are started, and how they wait for each other."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable

from autopar.errors import VerificationError

IMPORTED_ONCE = [
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch._dynamo.testing",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    "torch._inductor.fx_passes",
    "autopar.api",
    "autopar.verification.first_capture",
]
"""What a rank needs to capture and run a model, which none then imports itself. Names that torch lacks are skipped."""
_PATIENCE_S = 600.0


def start_method() -> str:
    """How processes are started: forked from one that has imported torch and autopar, as that takes each of them
    seconds; where there is no fork, spawned."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    multiprocessing.set_forkserver_preload(IMPORTED_ONCE)
    return "forkserver"


def wait_for(condition: Callable[[], bool]) -> None:
    """Returns once the condition holds; raises `VerificationError` where it does not in ten minutes."""
    end = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            raise VerificationError("a process of the verification did not come forward in time")
        time.sleep(0.005)
