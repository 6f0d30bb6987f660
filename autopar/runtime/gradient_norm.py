"""The norm over all gradients of a step: as clipping has taken it, or from what each rank updates with."""

from __future__ import annotations

import contextlib
from typing import Protocol

import torch

from autopar.backends import collectives
from autopar.ops.fragments import Fragment
from autopar.ops.gradients import Norm, square_sum
from autopar.runtime.compiled import Compiled
from autopar.runtime.job.process_group import Group
from autopar.runtime.looks import Looking
from autopar.strategies.lowering import StepProgram


class StepNorm(Protocol):
    """The norm over the gradients of one step, before they are clipped."""

    @property
    def is_shared(self) -> bool:
        """Whether ranks form it together for whoever asked, so that all of them must ask."""

    def total(self) -> torch.Tensor:
        """The norm, a float64 scalar, once the step was run."""


class GradientNorms:
    """Takes the norm over all gradients in those steps that are asked for it."""

    def __init__(self, clips: bool, group: Group, device: torch.device, looking: Looking) -> None:
        """`clips`: whether each step clips, and has the norm already."""
        self._clips = clips
        self._group = group
        self._device = device
        self._looking = looking

    def of(self, last: Compiled, accumulates: bool) -> StepNorm:
        """The norm of the next step. `last`: what runs of its last micro-batch; `accumulates`: whether of several."""
        if self._clips:
            return _OfClipping(last, "last micro-batch" if accumulates else "step", self._device)
        return _Summed(last.program, self._group, self._device)

    def taken(self, norm: StepNorm | None) -> contextlib.AbstractContextManager[None]:
        """While it is open, a step is run whose norm is taken."""
        return self._looking.besides(norm) if isinstance(norm, _Summed) else contextlib.nullcontext()


class _OfClipping:
    """As a graph has formed it before it clipped."""

    is_shared = False

    def __init__(self, compiled: Compiled, graph: str, device: torch.device) -> None:
        self._compiled = compiled
        self._graph = graph
        self._device = device

    def total(self) -> torch.Tensor:
        modules = self._compiled.graphs[self._graph].children()
        norm = next((m.norm for m in modules if isinstance(m, Norm)), None)
        # Where no group updates in this step, there are no gradients.
        return torch.zeros((), dtype=torch.float64, device=self._device) if norm is None else norm


class _Summed:
    """Adds up the squares of the gradients that a rank updates with, which it is shown one by one."""

    def __init__(self, program: StepProgram, group: Group, device: torch.device) -> None:
        self._group = group
        self._device = device
        updates = [c for c in program.calls if c.op.takes_clip]
        self._sharded = {str(m.slice): c.inputs[0].is_sharded for c in updates for m in c.members}
        self._squares = torch.zeros(2, dtype=torch.float64, device=device)
        """Of what every rank holds, and of what only this one does."""

    @property
    def is_shared(self) -> bool:
        return self._group.name is not None and any(self._sharded.values())

    def __call__(self, fragment: Fragment, gradient: torch.Tensor) -> None:
        self._squares[int(self._sharded[str(fragment.piece)])] += square_sum([gradient], self._device)

    def total(self) -> torch.Tensor:
        replicated, own = self._squares
        if self.is_shared:
            with torch.no_grad(), self._group.guard("the norm of the gradients"):
                own = collectives.wait(collectives.all_reduce(own.clone(), str(self._group.name)))
        return torch.sqrt(replicated + own)
