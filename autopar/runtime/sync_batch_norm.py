"""Batch normalization over the global batch: statistics are summed over all ranks, however many samples each has."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from autopar.backends.across import register_channel, sum_over_ranks
from autopar.errors import CaptureError, SignatureError
from autopar.ir.joint import JointGraph
from autopar.runtime.compiled import Compiled
from autopar.runtime.job.process_group import Group
from autopar.runtime.writer import NARROW

COMMUNICATOR = 100
"""Of the sums within a model: none of a plan's, so that neither waits for the other."""


class SyncedBatchNorm(_BatchNorm):
    """Normalizes over the batches of all ranks in training mode, and as ever in evaluation mode."""

    autopar_group: str = ""
    """The process group of the ranks, by its name."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`input`: [samples, channels, ...]; as many samples on each rank as it has."""
        if not self.training:  # without running statistics, over this rank's own batch
            held, alone = (self.running_mean, self.running_var, self.weight, self.bias), self.running_mean is None
            return F.batch_norm(input, *held, training=alone, eps=self.eps)
        dims = [0, *range(2, input.dim())]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        wide = input if input.dtype in (torch.float32, torch.float64) else input.float()
        count = wide.new_full((1,), input.numel() // input.shape[1])
        sums = sum_over_ranks(torch.cat([wide.sum(dims), count]), self.autopar_group)
        total = sums[-1:].detach()
        mean = sums[:-1] / total
        centered = wide - mean.view(shape)
        variance = sum_over_ranks(centered.square().sum(dims), self.autopar_group) / total
        if self.track_running_stats:
            self._update(mean.detach(), variance.detach() * total / (total - 1))
        found: torch.Tensor = centered * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            found = found * self.weight.view(shape)
        if self.bias is not None:
            found = found + self.bias.view(shape)
        return found.to(input.dtype)

    def _update(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        for held, value in ((self.running_mean, mean), (self.running_var, variance)):
            if self.momentum is None:
                held.copy_(held + (value - held) / self.num_batches_tracked)
            else:
                held.copy_((1 - self.momentum) * held + self.momentum * value)


def own_channel(group: Group) -> str:
    """Under what name sums within a model run among these ranks: in a process group made as the first is run."""
    ranks = weakref.ref(group)

    def make() -> str | None:
        of = ranks()
        return None if of is None else of.channel((), COMMUNICATOR)

    register_channel(str(group.name), make)
    return str(group.name)


def check_loss_dtype(compiled: Compiled) -> None:
    """Raises `SignatureError` where ranks exchange values within a model, and its loss is too narrow for that."""
    if compiled.joint.sums_over_ranks and compiled.loss_dtype in NARROW:
        raise SignatureError(
            "ranks exchange values within the model, whose loss is in 16 bits, too few to hold a rank's share of the "
            "global batch: compute the loss from float32 values, as in cross_entropy(logits.float(), target)"
        )


def check_captured(is_joined: bool, eager: bool) -> None:
    """Raises `CaptureError` for a drop-in module that normalizes over all ranks and runs eagerly."""
    if is_joined and eager:
        raise CaptureError(
            "batch normalization over all ranks needs a graph in a drop-in module: run eagerly, its backward pass "
            "begins at each rank's own loss, whatever that counts. Pass the optimizer to autopar.optimize and call "
            "program.step, or mend what stands in the way of a graph"
        )


def check_tangents(joint: JointGraph) -> None:
    """The same of a drop-in module, whose outputs' gradients hold a rank's share of the global batch."""
    tangents = zip(joint.inputs, joint.module.graph.find_nodes(op="placeholder"), strict=True)
    if joint.sums_over_ranks and any(n.meta["val"].dtype in NARROW for (kind, _), n in tangents if kind == "tangent"):
        raise SignatureError(
            "ranks exchange values within the module, one of whose outputs is in 16 bits, too few to hold a rank's "
            "share of the global batch in its gradient: return it as float32, as in logits.float()"
        )


def synchronize_batch_norm(model: nn.Module, group: Group, everywhere: bool) -> bool:
    """Has batch normalization in a model normalize over all ranks, for good; whether there is any. `everywhere`: also
    where it is not PyTorch's `SyncBatchNorm` already. Raises `CaptureError` where one is of a group of its own."""
    kinds = _BatchNorm if everywhere else nn.SyncBatchNorm
    found = [m for m in model.modules() if isinstance(m, kinds) and not isinstance(m, _InstanceNorm)]
    if not found or group.world_size == 1:
        return False
    name = own_channel(group)
    for module in found:
        own = getattr(module, "process_group", None)
        if own is not None and own is not dist.group.WORLD:
            raise CaptureError(
                "the model's SyncBatchNorm is over a process group of its own, which a step of all ranks does not "
                "have: convert the model without one, or pass sync_batch_norm=True with plain batch normalization"
            )
        if type(module).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward, SyncedBatchNorm.forward):
            raise CaptureError(
                f"sync_batch_norm: {type(module).__name__} has a forward() of its own, which would be lost: sum over "
                "ranks there, or take PyTorch's batch normalization"
            )
        module.__class__ = SyncedBatchNorm
        vars(module)["autopar_group"] = name
    return True
