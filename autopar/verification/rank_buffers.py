"""The buffers that each rank has, as docs/semantics.md defines them, kept by the single process.

What the forward pass writes and nothing reads (running statistics, counters) is each rank's own: what its own batches
make of it. What it reads and writes (moving averages, code books) is rank 0's on all ranks after each step.

Which ones are read is seen by running the model with the values that it has just written: a loss or a gradient that
changes has read them. So the reference rests on no graph of autopar's. Where this shows nothing, since the values
happen not to matter, the ranks are believed that a buffer is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from autopar.runtime.model.eager import loss_of, without_trace
from autopar.verification.job import Built

State = dict[str, torch.Tensor]


class RankBuffers:
    """Every rank's buffers, and which of them are rank 0's."""

    def __init__(self, built: Built, world_size: int) -> None:
        self._of = built
        start = self.now({})
        self.of_rank: list[State] = [start] * world_size
        self.shared: set[str] = set()
        self.written: set[str] = set()

    def now(self, before: Mapping[str, torch.Tensor]) -> State:
        """Copies of the buffers; of those that are as they were before, what was there before."""
        return {
            n: before[n] if n in before and same(before[n], b) else b.detach().clone()
            for n, b in self._of.buffers().items()
        }

    def put(self, rank: int) -> None:
        """Gives the model the buffers of a rank."""
        self._put(self.of_rank[rank])

    def taken(self, rank: int) -> None:
        """The model has the buffers that the rank's batches lead to."""
        self.of_rank = [self.now(own) if r == rank else own for r, own in enumerate(self.of_rank)]

    def changed(self, since: Mapping[str, torch.Tensor]) -> set[str]:
        """Which of the model's buffers are not as they were."""
        return {n for n, b in self._of.buffers().items() if n not in since or not same(since[n], b)}

    def learn(self, before: State, after: State, batch: Any, told: Collection[str]) -> bool:
        """Finds out which of the buffers that differ are read, unless that is known; whether some are that were not
        known to be."""
        new = {n for n in after if n in before and not same(before[n], after[n])} - self.written
        if not new or len(self.of_rank) == 1:
            return False
        self.written |= new
        found = new & set(told)
        usual = self._outcome(before, batch)
        if not _alike(usual, self._outcome(before | {n: after[n] for n in new}, batch)):
            found |= {n for n in new if not _alike(usual, self._outcome(before | {n: after[n]}, batch))} or new
        self.shared |= found
        return bool(found)

    def share(self) -> None:
        """All ranks take rank 0's of what is read and written."""
        first = self.of_rank[0]
        self.of_rank = [own | {n: first[n] for n in self.shared} for own in self.of_rank]

    def _outcome(self, values: State, batch: Any) -> list[torch.Tensor] | None:
        """Loss and gradients with other buffers; `None` where the model does not run on them."""
        with without_trace(self._of.owners), torch.enable_grad():
            self._put(values)
            try:
                loss = loss_of(self._of.model, self._of.loss_fn, batch).reshape(())
                found = torch.autograd.grad(loss, self._of.trainable(), allow_unused=True)
            except (RuntimeError, IndexError, ValueError):
                return None
        return [loss.detach(), *(g for g in found if g is not None)]

    def _put(self, values: State) -> None:
        with torch.no_grad():
            for name, buffer in self._of.buffers().items():
                value = values.get(name)
                if value is None or same(buffer, value):
                    continue
                if buffer.shape == value.shape and buffer.dtype == value.dtype and 0 not in buffer.stride():
                    buffer.copy_(value)
                else:
                    self._replace(name, value.clone())

    def _replace(self, name: str, value: torch.Tensor) -> None:
        start = max((s for s in self._of.owners if name.startswith(s)), key=len)
        path, _, last = name.removeprefix(start).rpartition(".")
        self._of.owners[start].get_submodule(path)._buffers[last] = value


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two buffers are equal, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _alike(a: list[torch.Tensor] | None, b: list[torch.Tensor] | None) -> bool:
    return a is not None and b is not None and len(a) == len(b) and all(map(same, a, b))
