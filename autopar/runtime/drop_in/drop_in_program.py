"""What the programs of a drop-in module have in common, whether its model is captured or runs eagerly."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Self

from torch import nn

from autopar.ops.context import Context
from autopar.runtime.base_program import BaseProgram
from autopar.runtime.compiled import Settings
from autopar.runtime.drop_in.kept_gradients import Kept, KeptGradients
from autopar.runtime.job.process_group import Group
from autopar.spec.plan import Plan


class DropInProgram(BaseProgram):
    """Counts backward passes, and keeps gradients back for one that synchronizes them."""

    mode = "module"
    synchronizing = ("backward", "backward after accumulation")

    def __init__(self, model: nn.Module, plan: Plan, group: Group, settings: Settings, context: Context) -> None:
        super().__init__(model, plan, group, settings, context)
        self.synchronizes = True
        """Whether gradients are sent, rather than kept for a later backward pass: of what is called or passed back
        through while it is set."""
        self._keeps = group.world_size > 1 or settings.clip_grad_norm is not None
        """Whether gradients are kept back within `no_sync()`; else what lies in `grad` is nobody's but autograd's."""
        self._kept = KeptGradients(self._parameters)
        self._steps = 0
        """Backward passes that have synchronized gradients."""

    def of_copy(self, model: nn.Module) -> Self:
        """A program of a copy of the model, under the same plan; made by all ranks together. What the copy runs, and
        what it was told of random numbers, is its own. Parameters that were frozen in it since are those of the plan
        all the same."""
        planned, parameters = {m.name for g in self.plan.groups for m in g.members}, dict(model.named_parameters())
        frozen = [p for name, p in parameters.items() if name in planned and not p.requires_grad]
        for p in frozen:
            p.requires_grad_(True)
        try:
            made = type(self)(model, self.plan, self._group, self.settings, self._context)
            if self._outlined is not None:
                made.adopt(self._outlined.graph, self._outlined.batch)
        finally:
            for p in frozen:
                p.requires_grad_(False)
        if self._group.world_size > 1 and not self._random.own:
            made.use_pytorch_generator()
        return made

    @property
    def accumulates(self) -> bool:
        """Whether gradients of earlier backward passes wait on this rank to be synchronized."""
        return self._kept.passes > 0

    def _sends(self, synchronizes: bool) -> bool:
        """Whether a backward pass is not kept back. `synchronizes`: whether its forward pass was to be sent."""
        return not self._keeps or synchronizes or self.synchronizes

    def _synchronizing(self, kept: Kept) -> str:
        """The backward pass that synchronizes gradients, given those that were kept back before it."""
        return self.synchronizing[bool(kept.sums)]

    @property
    def _has_run(self) -> bool:
        return self._steps > 0

    def _guard(self) -> AbstractContextManager[None]:
        """Around what ranks do together in a backward pass: names the rank that is late or gone."""
        return self._group.guard(f"backward pass {self._steps}")
