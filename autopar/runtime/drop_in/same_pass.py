"""Whether ranks are in the same call of the same backward pass of a drop-in module, and share the same buffers.

A captured module sends what its graph computes, call by call. Ranks that call it unequally often in a backward pass
would pair one's call with another's: a number in the message that begins each says which one it is. On GPUs nobody
looks, as the host would wait for the backward pass.
"""

from __future__ import annotations

import json

import torch

from autopar.errors import PlanMismatchError
from autopar.runtime.drop_in.other_gradients import OtherGradients
from autopar.runtime.job.process_group import Group, Rendezvous
from autopar.runtime.model.buffers import SharedBuffers
from autopar.runtime.optimizers.same_settings import digest


class SamePass:
    """Compares, by a number that is summed over the ranks."""

    def __init__(self, group: Group, shared: SharedBuffers, others: OtherGradients) -> None:
        self._group = group
        self._shared = shared
        self._others = others
        self._mine = "", ""

    def number(self) -> int:
        """Of the message that is about to be sent."""
        self._mine = self._shared.run(()), self._others.place()
        return digest(" in ".join(self._mine))

    def compare(self, total: torch.Tensor) -> None:
        """Has ranks agree which buffers they share, where `total`, the sum of their numbers, shows that they know of
        different ones. Raises `PlanMismatchError`, on all of them, where they are in different calls."""
        if total.device.type != "cpu" or float(total) == digest(" in ".join(self._mine)) * self._group.world_size:
            return
        texts = Rendezvous(self._group).exchange("a backward pass of the drop-in module", json.dumps(self._mine))
        everyone = [json.loads(text) for text in texts]
        for rank, (_, place) in enumerate(everyone):
            if place != self._mine[1]:
                raise PlanMismatchError(
                    f"rank {self._group.rank} is in {self._mine[1]} of the module, rank {rank} in {place}: ranks must "
                    "call a captured module equally often in a backward pass. Where they cannot, pass capture='never', "
                    "with which gradients are synchronized once for each backward pass"
                )
        self._shared.agree([shared for shared, _ in everyone])
