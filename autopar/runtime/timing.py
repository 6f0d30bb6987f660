"""What a model's passes and an optimizer's updates take here: on all ranks of a job at once, as they will train.

Where ranks share cores, one that computes alone is faster than it will ever be in training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from autopar.backends.collectives import may_fail
from autopar.ir.batch import Batch
from autopar.ir.build import named_parameters
from autopar.ir.outline import Outline
from autopar.ir.training_graph import TrainingGraph
from autopar.runtime.compiled import Settings
from autopar.runtime.job.process_group import Group
from autopar.runtime.job.same_call import led_by_rank_0
from autopar.runtime.optimizers.update_rate import update_s_per_byte
from autopar.runtime.profile import known_seconds, node_seconds
from autopar.spec.plan import Recompute

_UPDATES = "updates"
"""What rank 0 asks for beside the passes of a graph, which it names by what is computed again."""


class Timing:
    """Times one model and one optimizer, by this rank alone or by all ranks of a job at once; each thing once."""

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        settings: Settings,
        optimizer: Optimizer | None,
        graph_of: Callable[[Recompute], TrainingGraph],
    ) -> None:
        """`optimizer`: whose updates are timed. `graph_of`: the graph of the model's passes, by what they compute
        again."""
        self.group = Group(0, 1)
        """The ranks that time at once."""
        self._model, self._batch, self._optimizer = model, batch, optimizer
        self._loss_fn, self._compiler = settings.loss_fn, settings.compiler
        self._graph_of = graph_of
        self._seconds: dict[Recompute, dict[str, float]] = {}
        self._update_s: float | None = None
        self._updates_are_timed = False
        self._ask: Callable[[str], None] = self._time

    def seconds(self, graph: TrainingGraph) -> dict[str, float]:
        """Of each node of one of the model's graphs. Of a model that is outlined, what its layers took as it was."""
        if isinstance(graph.joint, Outline):
            return graph.joint.seconds
        level = graph.recompute
        if level not in self._seconds:
            known = None if self._compiler else known_seconds(graph, self._device, self.group.world_size)
            if known is None:
                self._ask(level)
            else:
                self._seconds[level] = known
        return self._seconds[level]

    def update_s(self) -> float | None:
        """Seconds that an update takes for each byte of parameters, where that can be measured."""
        if self._optimizer is not None and not self._updates_are_timed:
            self._ask(_UPDATES)
        return self._update_s

    def lead(self, make: Callable[[], str]) -> str:
        """What `make` returns on rank 0, on every rank. Rank 0 alone calls `make`; passes and updates that `make` wants
        timed are run by all ranks at once."""

        def led(ask: Callable[[str], None]) -> str:
            self._ask = ask
            try:
                return make()
            finally:
                self._ask = self._time

        return led_by_rank_0(self.group, led, self._time)

    def _time(self, what: str) -> None:
        with self.group.guard("timing the model"):
            if what == _UPDATES:
                assert self._optimizer is not None
                self._meet()
                self._update_s, self._updates_are_timed = update_s_per_byte(self._optimizer), True
                return
            level = cast(Recompute, what)
            of = (self._graph_of(level), self._model, self._batch, self._loss_fn, self._compiler)
            self._seconds[level] = node_seconds(*of, ranks=self.group.world_size, meet=self._meet)

    @property
    def _device(self) -> torch.device:
        return next(iter(named_parameters(self._model, self._loss_fn).values())).device

    def _meet(self) -> None:
        """Waits for all ranks."""
        if self.group.pg is not None:
            with may_fail():
                dist.all_reduce(torch.zeros(1, device=self._device), group=self.group.pg)
