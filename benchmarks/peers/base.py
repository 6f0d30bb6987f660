"""What a peer is: another way to train the same model on the same batches with the same optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import Fidelity
from benchmarks.zoo.workload import Workload

if TYPE_CHECKING:
    from benchmarks.peers.case import Case

Step = Callable[[Any], torch.Tensor]
"""One optimizer step on this rank's batch; returns this rank's loss. The mean over ranks is the comparison's matter."""
Options = dict[str, Any]
"""Plain values: they travel to the ranks as JSON."""


class Peer(ABC):
    """A system that is compared. Subclass it in a file of its own, or beside its like, and list it in `__init__`.

    In the parent: `applies`, then `choices`. In every rank: `build` with one of the choices. Where there are several
    choices, each is tried for a few steps and the fastest is taken, as a careful user would do.
    """

    name: str
    """As the command line and the table name it."""
    about: str
    """What it is, and how it is tuned."""
    fidelity: Fidelity = "exact"
    """What it promises of its losses."""
    period: int = 1
    """After how many steps it does the same again."""
    warm_up_steps: int = 2
    """How many steps it takes until it does what it will do from then on. DDP rebuilds its buckets after the first."""

    def applies(self, workload: Workload, cluster: ClusterSpec) -> str | None:
        """`None` where the peer can train the workload on the cluster, else the reason why not."""
        return None

    def choices(self, case: Case) -> Sequence[Options]:
        """The settings worth trying, the likeliest first; one where there is nothing to be tuned."""
        return ({},)

    def key(self, options: Options) -> str:
        """Systems of one key are one system, run once: plans by different names that say the same."""
        return self.name

    @abstractmethod
    def build(self, workload: Workload, rank: int, world_size: int, options: Options) -> Step:
        """Prepares training from the workload's weights on this rank, in the default process group."""


FUSED_ON_CPU: tuple[type[Optimizer], ...] = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


def tuned_optimizer(
    workload: Workload,
    model: nn.Module,
    sparse_gradients: Iterable[nn.Parameter] = (),
    fusible: tuple[type[Optimizer], ...] = FUSED_ON_CPU,
) -> Optimizer:
    """The workload's optimizer, in PyTorch's fused implementation where that serves: several times faster on CPU.

    autopar takes it by itself; of the others, a careful user asks for it. It cannot take sparse gradients.
    """
    optimizer = workload.optimizer(model)
    sparse = set(sparse_gradients)
    for group in list(optimizer.param_groups):
        apart = [p for p in group["params"] if p in sparse]
        if apart:
            group["params"] = [p for p in group["params"] if p not in sparse]
            optimizer.add_param_group({**group, "params": apart})
        if isinstance(optimizer, fusible) and group["fused"] is None and group["foreach"] is None and group["params"]:
            group["fused"] = True
    return optimizer


def trainer(workload: Workload, model: nn.Module, optimizer: Optimizer) -> Step:
    """The loop's body as PyTorch's tutorials have it, for a model that synchronizes its own gradients."""

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = workload.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step
