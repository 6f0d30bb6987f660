"""FSDP2: parameters, gradients and optimizer state are sharded, block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from benchmarks.peers.base import Options, Peer, Step, trainer, tuned_optimizer
from benchmarks.zoo.workload import Workload

if TYPE_CHECKING:
    from benchmarks.peers.case import Case

LEAST_ELEMENTS = 1_000_000
"""Of a block in a model without a list of blocks."""
FUSED_ON_SHARDS = (torch.optim.Adam, torch.optim.AdamW)
"""DTensor knows no other fused optimizer (torch 2.13)."""


class Fsdp2(Peer):
    """`fully_shard` on every block, then on the model, as its documentation has it."""

    name = "fsdp2"
    about = (
        "fully_shard of every block, then of the model; the faster of keeping parameters between the forward and the "
        "backward pass and of gathering them twice"
    )

    def choices(self, case: Case) -> Sequence[Options]:
        return ({"reshard_after_forward": False}, {"reshard_after_forward": True})

    def build(self, workload: Workload, rank: int, world_size: int, options: Options) -> Step:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = workload.model()
        mesh = init_device_mesh("cpu", (world_size,))
        for block in blocks(model):
            fully_shard(block, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
        return trainer(workload, model, tuned_optimizer(workload, model, fusible=FUSED_ON_SHARDS))


def blocks(model: nn.Module) -> list[nn.Module]:
    """What is sharded by itself: the entries of the model's lists of blocks, or where it has none, its modules from
    the leaves up that have a million parameters not yet in a block. No parameter that two blocks would share."""
    lists = list(_outermost_lists(model))
    if lists:
        return [block for blocks_ in lists for block in blocks_]
    found: list[nn.Module] = []
    _gather(model, found)
    return [block for block in found if block is not model]


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) > 1 and any(True for _ in child.parameters()):
            yield child
        else:
            yield from _outermost_lists(child)


def _gather(module: nn.Module, found: list[nn.Module]) -> int:
    """Adds the blocks in `module` to `found`; returns how many elements are left over."""
    left = sum(p.numel() for p in module.parameters(recurse=False)) + sum(_gather(c, found) for c in module.children())
    if left < LEAST_ELEMENTS or isinstance(module, nn.ModuleList):  # a list has no forward pass to gather before
        return left
    found.append(module)
    return 0
