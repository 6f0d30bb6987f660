"""A program as the proof of its first step sees it, from one rank."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.backends.collectives import may_fail
from autopar.ir.training_graph import TrainingGraph
from autopar.ops.base import Call
from autopar.ops.group import Group as SyncGroup
from autopar.runtime.job.process_group import Group
from autopar.runtime.lasting import Lasting
from autopar.runtime.looks import Observers
from autopar.runtime.loss_scale import LossScale
from autopar.runtime.proofs.probes import Probe
from autopar.runtime.uncaptured.model import EagerModel


@dataclass(frozen=True)
class Subject:
    """The program that is looked at."""

    lasting: Lasting
    graph: TrainingGraph
    parameters: Mapping[str, nn.Parameter]
    """Those that are trained, by the plan's names."""
    groups: Sequence[SyncGroup]
    """The plan's groups."""
    probes: Mapping[str, Probe]
    """Of their members, by what they are called."""
    shared_buffers: Container[str]
    """The buffers that are rank 0's after a step."""
    max_norm: float | None
    scale: LossScale | None
    """Of the loss, where it is scaled."""
    arguments: Callable[[Mapping[str, torch.Tensor]], Sequence[torch.Tensor]]
    """Of the joint graph, on the last micro-batch; given the buffers."""
    run: Callable[[], torch.Tensor]
    """The step; returns the global loss."""
    observed: Callable[[Observers, bool], AbstractContextManager[None]]
    """Has observers see gradients while it is open; whether they alone, rather than the user's own as well."""
    calls: Sequence[Call]
    """Of the step."""
    told: set[int]
    """Groups of which was said that they are not looked at."""
    eager: EagerModel | None = None
    """The model, where the program runs it eagerly: what its step shows is then what is expected."""


def summed(mine: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over ranks, in place."""
    return _reduced(mine, group, dist.ReduceOp.SUM)


def largest(mine: torch.Tensor, group: Group) -> torch.Tensor:
    """The largest of all ranks, in place."""
    return _reduced(mine, group, dist.ReduceOp.MAX)


def _reduced(mine: torch.Tensor, group: Group, how: Any) -> torch.Tensor:
    if group.pg is None:
        return mine
    with group.guard("the proof of the first step"), may_fail():
        dist.all_reduce(mine, op=how, group=group.pg)
    return mine
