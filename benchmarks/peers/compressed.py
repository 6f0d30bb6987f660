"""PowerSGD: gradients as products of two narrow matrices, with error feedback."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autopar.spec.plan import Fidelity
from benchmarks.peers.ddp import Ddp

RANK = 4
"""Of the matrices; Vogels et al. (2019) find ranks 1 to 4 enough for image and language models."""
FIRST_STEP = 2
"""Compression cannot begin before DDP has rebuilt its buckets. The default of 1000 would never be reached here."""
ONE_BUCKET_MIB = 1 << 20


class PowerSgd(Ddp):
    """DDP with its PowerSGD hook.

    All gradients are in one bucket: on gloo, with two or more, the hook's later collectives are issued in an order
    that differs between ranks, and the job aborts.
    """

    name = "ddp_powersgd"
    about = f"DDP with its powerSGD_hook: rank {RANK}, error feedback, warm start, from step {FIRST_STEP} on"
    fidelity: Fidelity = "compressed"
    warm_up_steps = FIRST_STEP + 2

    def wrap(self, model: nn.Module, **options: Any) -> DistributedDataParallel:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        ddp = super().wrap(model, bucket_cap_mb=ONE_BUCKET_MIB, gradient_as_bucket_view=True, **options)
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=RANK, start_powerSGD_iter=FIRST_STEP
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return ddp
