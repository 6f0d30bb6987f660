"""Asks all ranks yes-or-no questions, and tells each rank which of them any rank has answered with yes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from autopar.backends.collectives import may_fail
from autopar.runtime.job.process_group import Group


class Anywhere:
    """Several questions, to which all ranks send each other their answers. All ranks make this object together, which
    begins the exchange.

    Each rank sends its answers to all others at once. An all-reduce goes around a ring, and each of its rounds waits
    for the one before, behind whatever else is on the links. For 60 answers on 3 gloo ranks an all-reduce takes 2 to
    3 ms, this exchange 0.5 ms. [Empirical, torch 2.13]
    """

    def __init__(self, mine: Sequence[bool], group: Group, device: torch.device) -> None:
        """`mine`: this rank's answers. All ranks answer the same number of questions."""
        own = torch.tensor(mine, dtype=torch.uint8, device=device)
        self._all, self._work = own.unsqueeze(0), None
        if group.pg is not None:
            self._sent = own.repeat(group.world_size)
            self._all = torch.empty(group.world_size, len(mine), dtype=torch.uint8, device=device)
            with may_fail():
                self._work = dist.all_to_all_single(self._all.view(-1), self._sent, group=group.pg, async_op=True)

    @property
    def are_there(self) -> bool:
        """Whether `answers` returns at once."""
        return self._work is None or self._work.is_completed()

    def answers(self) -> list[bool]:
        """Waits for all ranks; returns, for each question, whether any rank has answered yes."""
        if self._work is not None:
            with may_fail(issues=False):
                self._work.wait()
        found: list[bool] = self._all.any(0).tolist()
        return found
