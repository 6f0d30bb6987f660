"""Local SGD: every rank trains by itself, and the models are averaged now and then."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from autopar.spec.plan import Fidelity
from benchmarks.peers.base import Options, Peer, Step, trainer, tuned_optimizer
from benchmarks.zoo.workload import Workload

PERIOD = 4
FIRST_STEP = 4


class LocalSgd(Peer):
    """Post-local SGD (Lin et al. 2020), as `torch.distributed.algorithms` has it."""

    name = "local_sgd"
    about = (
        f"DDP with post_localSGD_hook and PeriodicModelAverager: models are averaged every {PERIOD} steps, gradients "
        "within a host at every step"
    )
    fidelity: Fidelity = "local"
    period = PERIOD
    warm_up_steps = FIRST_STEP

    def build(self, workload: Workload, rank: int, world_size: int, options: Options) -> Step:
        from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        on_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        within = on_host if 1 < on_host < world_size and world_size % on_host == 0 else 1
        subgroup = dist.new_subgroups(within)[0] if within > 1 else None  # type: ignore[no-untyped-call]
        model = workload.model()
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        state = PostLocalSGDState(  # type: ignore[no-untyped-call]
            None, subgroup, FIRST_STEP, post_local_gradient_allreduce=within > 1
        )
        ddp.register_comm_hook(state, post_localSGD_hook)
        averager = PeriodicModelAverager(period=PERIOD, warmup_steps=FIRST_STEP)
        return trainer(workload, ddp, PostLocalSGDOptimizer(tuned_optimizer(workload, model), averager))
