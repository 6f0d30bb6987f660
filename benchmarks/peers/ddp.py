"""DistributedDataParallel, in the ways it can be tuned without changing the result, and its hook that rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import Fidelity
from benchmarks.peers.base import Options, Peer, Step, trainer, tuned_optimizer
from benchmarks.zoo.workload import Workload

if TYPE_CHECKING:
    from benchmarks.peers.case import Case

MIB = 1 << 20
SWEEP_MIB = (25, 4, 1, 100)
"""DDP's own size first, as the one to take where nothing is tried."""


class Ddp(Peer):
    """DDP as its documentation has it."""

    name = "ddp"
    about = "DistributedDataParallel with its defaults: buckets of 25 MiB, a first one of 1 MiB"

    def build(self, workload: Workload, rank: int, world_size: int, options: Options) -> Step:
        model = workload.model()
        if workload.leaves_unused:
            options = {**options, "find_unused_parameters": True}
        return trainer(workload, self.wrap(model, **options), tuned_optimizer(workload, model))

    def wrap(self, model: nn.Module, **options: Any) -> DistributedDataParallel:
        return DistributedDataParallel(model, **options)


class BestBuckets(Ddp):
    """DDP with the bucket size that is the fastest here."""

    name = "ddp_buckets"
    about = (
        f"DDP with the fastest of buckets of {', '.join(map(str, sorted(SWEEP_MIB)))} MiB, tried one after the other "
        "for a few steps, and gradients that are views of the buckets"
    )

    def choices(self, case: Case) -> Sequence[Options]:
        """Sizes beyond that of all gradients are the same: one bucket."""
        beyond = next((s for s in sorted(SWEEP_MIB) if s * MIB >= case.gradient_bytes), max(SWEEP_MIB))
        return [{"bucket_cap_mb": s} for s in SWEEP_MIB if s <= beyond]

    def wrap(self, model: nn.Module, **options: Any) -> DistributedDataParallel:
        return super().wrap(model, gradient_as_bucket_view=True, **options)


class StaticGraph(Ddp):
    """DDP that is told that its graph does not change."""

    name = "ddp_static_graph"
    about = "DDP with static_graph and gradient_as_bucket_view"

    def wrap(self, model: nn.Module, **options: Any) -> DistributedDataParallel:
        return super().wrap(model, static_graph=True, gradient_as_bucket_view=True, **options)


class Float16(Ddp):
    """DDP that sends gradients as float16. Its bfloat16 hook refuses to run on CPU."""

    name = "ddp_fp16"
    about = "DDP with its fp16_compress_hook and gradient_as_bucket_view"
    fidelity: Fidelity = "rounded"

    def wrap(self, model: nn.Module, **options: Any) -> DistributedDataParallel:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        ddp = super().wrap(model, gradient_as_bucket_view=True, **options)
        ddp.register_comm_hook(None, fp16_compress_hook)
        return ddp


class SparseEmbeddings(Ddp):
    """DDP over embeddings with sparse gradients: it sends indices and rows."""

    name = "ddp_sparse"
    about = "DDP over embeddings with sparse=True, whose rows it sends, and dense gradients in its default buckets"

    def applies(self, workload: Workload, cluster: ClusterSpec) -> str | None:
        if workload.sparse_model is None:
            return (
                "no variant with sparse gradients: its embeddings are tied to a dense layer, it has none, or its "
                "optimizer would do something else with them"
            )
        return None

    def build(self, workload: Workload, rank: int, world_size: int, options: Options) -> Step:
        assert workload.sparse_model is not None
        model = workload.sparse_model()
        tables = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
        sparse = [p for table in tables for p in table.parameters()]
        return trainer(workload, self.wrap(model, **options), tuned_optimizer(workload, model, sparse))
