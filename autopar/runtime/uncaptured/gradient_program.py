"""The program of a drop-in module that runs its model eagerly."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparWarning
from autopar.ir.batch import flatten
from autopar.ir.training_graph import TrainingGraph
from autopar.ops.context import Context
from autopar.runtime.compiled import Compiled, Settings
from autopar.runtime.drop_in.drop_in_program import DropInProgram
from autopar.runtime.drop_in.gradient_program import GradientProgram
from autopar.runtime.drop_in.kept_gradients import Kept
from autopar.runtime.job.process_group import Group
from autopar.runtime.losses.shares import one_weight
from autopar.runtime.proofs.local_proof import SynchronizedOnce
from autopar.runtime.uncaptured.gradients import EagerGradients
from autopar.runtime.uncaptured.model import EagerModel
from autopar.runtime.uncaptured.steps import Run
from autopar.spec.plan import Plan


class EagerGradientProgram(DropInProgram):
    """Has the user's own backward pass, of a model that is called as it is, leave synchronized gradients.

    What it computes is what `GradientProgram` does. A parameter that no rank has a gradient of keeps the `grad` that it
    had, as after DDP with `find_unused_parameters`.
    """

    writers = GradientProgram.writers
    needed = ("backward",)

    def __init__(self, model: nn.Module, plan: Plan, group: Group, settings: Settings, context: Context) -> None:
        super().__init__(model, plan, group, settings, context)
        self._taken = Kept()
        """What was kept back, of the backward pass under way."""
        self._gradients: EagerGradients | None = None
        self._said_written = False

    def adopt(
        self, graph: TrainingGraph, batch: Any, outputs: bool | None = None, sizes: tuple[int, ...] = ()
    ) -> Compiled:
        compiled = super().adopt(graph, batch, outputs, sizes)
        assert compiled.eager is not None
        of = compiled.eager, self._begin, self._end, self._guard
        self._gradients = EagerGradients(*of, ended=self._kept.note)
        return compiled

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's output."""
        assert self._gradients is not None
        self._unchanged.check()
        self.statistics.share()
        _, model = self._parts()
        before = None if self._said_written or self._group.world_size == 1 else model.versions()
        with self._random:
            weight = self._weight(args, kwargs)
            output = self._gradients.forward(weight, self.synchronizes, lambda: self.model(*args, **kwargs))
        if before is not None:
            self._say_written([n for n, version in model.versions().items() if version != before[n]])
        return output

    def _say_written(self, names: list[str]) -> None:
        if names:
            self._said_written = True
            warnings.warn(
                f"the model writes to its parameter '{names[0]}' in its forward pass, as Embedding(max_norm=...) does: "
                "where each rank writes something else, for its own batch, ranks drift apart, as with "
                "DistributedDataParallel. Change the parameter between steps, under torch.no_grad()",
                AutoparWarning,
                stacklevel=2,
            )

    def _weight(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        if self._group.world_size == 1:
            return 1.0
        if self.settings.weight is None:
            size = flatten((args, kwargs), needs_tensor=False).size
            return 1.0 if size is None else float(size)
        return one_weight(self.settings.weight, inspect.signature(self.model.forward).bind(*args, **kwargs).arguments)

    def _begin(self, weight: float, synchronizes: bool) -> Run | None:
        """Begins to synchronize the gradients of a backward pass. `synchronizes`: whether the forward pass was to."""
        c, model = self._parts()
        arguments: list[Any] = [None, c.tangent(1.0, self._device)]
        if not self._sends(synchronizes):
            return None
        if not self._keeps:
            return Run(self.written(c, "backward"), arguments)
        kept = self._taken = self._kept.take(weight, model.parameters)
        numbers = [weight, [weight + kept.weight, 1 + kept.passes]] if self._group.world_size > 1 else []
        arguments += [torch.tensor(x, dtype=torch.float64, device=self._device) for x in numbers]
        for name in kept.sums:
            model.reach(name)
        return Run(self.written(c, self._synchronizing(kept)), [*arguments, *kept.sums_of(model.parameters)])

    def _end(self, own: Mapping[str, torch.Tensor], weight: float, run: Run | None) -> dict[str, torch.Tensor]:
        """Ends a backward pass; returns the synchronized gradients, by name. Without `run`, this rank keeps its own."""
        c, model = self._parts()
        if run is None:
            self._kept.add(own, weight)
            return {}
        run.end()
        found = dict(zip(model.parameters, run.result(), strict=True))
        if self.settings.check == "always" or (self.settings.check == "first" and not self._steps):
            self._compare(c, own, weight, found)
        self._taken = Kept()
        unused = model.unused()
        self._share_buffers(f"backward pass {self._steps}")
        self._steps += 1
        return {n: g for n, g in found.items() if n not in unused}

    def _compare(
        self, c: Compiled, own: Mapping[str, torch.Tensor], weight: float, found: Mapping[str, torch.Tensor]
    ) -> None:
        """Holds synchronized gradients to what the ranks' own add up to. By all ranks together."""
        assert c.eager is not None
        clips = self.settings.clip_grad_norm is not None
        proof = SynchronizedOnce(c.eager.parameters, c.graph, c.program.groups, self._group, clips)
        local = [own.get(n, torch.zeros_like(p)) for n, p in c.eager.parameters.items()]
        kept = self._taken
        expected = proof.expected(local, kept.sums, weight, 1 + kept.passes, weight + kept.weight)
        proof.compare(expected, found.values())

    def _parts(self) -> tuple[Compiled, EagerModel]:
        c = self._outlined
        assert c is not None and c.eager is not None, "a program runs what it has adopted"
        return c, c.eager
