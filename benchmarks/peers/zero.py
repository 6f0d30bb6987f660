"""ZeRO: the optimizer's state, sharded over the ranks. PyTorch's ZeroRedundancyOptimizer, and DeepSpeed's."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from autopar.spec.cluster import ClusterSpec
from benchmarks.peers.base import Options, Peer, Step, trainer, tuned_optimizer
from benchmarks.zoo.workload import Workload

if TYPE_CHECKING:
    from benchmarks.peers.case import Case


class ZeroRedundancy(Peer):
    """DDP, each rank updating its share of the parameters and sending them to all."""

    name = "zero_redundancy"
    about = "DDP with ZeroRedundancyOptimizer, parameters and gradients as views of buckets"

    def build(self, workload: Workload, rank: int, world_size: int, options: Options) -> Step:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = workload.model()
        like = tuned_optimizer(workload, model)
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        taken = inspect.signature(type(like)).parameters  # defaults also hold what the class sets by itself
        defaults = {key: value for key, value in like.defaults.items() if key in taken}
        optimizer = ZeroRedundancyOptimizer(like.param_groups, type(like), parameters_as_bucket_view=True, **defaults)
        return trainer(workload, ddp, optimizer)


class DeepSpeedZero(Peer):
    """DeepSpeed's engine, with the stage of ZeRO that is the fastest here."""

    name = "deepspeed_zero"
    about = "DeepSpeed's ZeRO in float32 on its CPU accelerator; the fastest of stages 1, 2 and 3"

    def applies(self, workload: Workload, cluster: ClusterSpec) -> str | None:
        if importlib.util.find_spec("deepspeed") is None:
            return "DeepSpeed is not installed: DS_BUILD_OPS=0 pip install deepspeed"
        return None

    def choices(self, case: Case) -> Sequence[Options]:
        return tuple({"stage": stage} for stage in (1, 2, 3))

    def build(self, workload: Workload, rank: int, world_size: int, options: Options) -> Step:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        deepspeed = importlib.import_module("deepspeed")
        model = workload.model()
        config = {
            "train_micro_batch_size_per_gpu": 1,  # it counts samples by this figure; nothing else depends on it
            # Its stage 3 would put a linear layer of its own into torch, for everybody else in the process as well.
            "zero_optimization": options | {"memory_efficient_linear": False},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # off: by default it clips to a norm of 1
        }
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=tuned_optimizer(workload, model), config=config, dist_init_required=False
        )

        def step(batch: Any) -> torch.Tensor:
            loss = workload.loss(engine, batch)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return step
