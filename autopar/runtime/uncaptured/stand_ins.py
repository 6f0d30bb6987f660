"""Batches of a captured program that cannot be captured: the model runs eagerly on them, on this rank alone.

Their gradients go through the plan's operations behind the model's backward pass, in the order of collectives that all
ranks have agreed on. So nobody has to be asked: other ranks may run a graph in the same step, or not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from autopar.errors import AutoparError, AutoparWarning, CaptureError, PlanError
from autopar.ir.batch import Batch, call_model
from autopar.ir.batch_weight import BatchWeight, SampleRate, UnreadWeight
from autopar.ir.build import autocast_format
from autopar.ir.stand_in import counting, stand_in
from autopar.ir.training_graph import TrainingGraph
from autopar.runtime.captures import Captures
from autopar.runtime.compiled import Compiled, Settings
from autopar.runtime.job.process_group import Group
from autopar.runtime.model.buffers import SharedBuffers
from autopar.runtime.model.eager import owners_of, without_trace
from autopar.runtime.uncaptured.model import EagerModel
from autopar.strategies.lowering import StepProgram

MOST_TRIED = 4
"""Batches that differ in sizes alone, each of which could not be captured, before further sizes are not tried: each
takes seconds."""
_Kind = tuple[str | None, bool]
"""The number format of the autocast, and whether the model's output is returned: orders of collectives may differ."""
_NEVER = "Pass capture='never' to autopar.optimize, with which the model runs eagerly from the start"


@dataclass(frozen=True)
class Wanted:
    """A batch that a program is to run on."""

    key: Hashable
    kind: Hashable
    """What batches have in common that differ in sizes alone."""
    batch: Batch
    outputs: bool
    """Whether the model's output is wanted, too."""
    gathers: bool
    """Whether ranks take each other's samples."""


class StandIns:
    """What runs in the place of captures that one program cannot make."""

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        parameters: Mapping[str, nn.Parameter],
        group: Group,
        captures: Captures[Compiled],
        lower: Callable[[TrainingGraph], StepProgram],
        shared: SharedBuffers,
    ) -> None:
        """`captures`: the program's, of which there is at least one. `lower`: lowers a graph as captures are. `shared`:
        the buffers that ranks have agreed to be alike."""
        self._shared = shared
        self._model = model
        self._settings = settings
        self._parameters = parameters
        self._group = group
        self._captures = captures
        self._lower = lower
        self._made: dict[_Kind, Compiled] = {}
        self._eager: EagerModel | None = None
        self._keys: set[Hashable] = set()
        self._tried: dict[Hashable, int] = {}
        """By kind, how many sizes could not be captured."""
        self._said = self._said_missing = self._said_weight = False
        self.per_sample: Callable[[], float | None] = _unknown
        """How much a sample has counted last, in what captured batches are counted in."""

    def __iter__(self) -> Iterator[Compiled]:
        return iter(self._made.values())

    def runs(self, key: Hashable) -> bool:
        """Whether a batch of this signature could not be captured before."""
        return key in self._keys

    def runs_all(self, kind: Hashable) -> bool:
        """Whether batches of this kind are not captured any more, whatever their sizes."""
        return self._tried.get(kind, 0) >= MOST_TRIED

    def of(self, wanted: Wanted, reason: AutoparError | None = None) -> Compiled:
        """What runs the model eagerly on a batch. `reason`: why it cannot be captured, where that was found just now.
        Raises it, with the remedy, where the model cannot run eagerly under this plan."""
        kind = autocast_format(self._model, wanted.batch), wanted.outputs
        if reason is not None:
            self._check_allowed(wanted, reason)
            is_known = kind in self._made
            if not is_known:
                self._made[kind] = self._new(kind, reason)
            if not (is_known and self._captures.values_change):
                self._try(wanted, reason)
            if not self._captures.values_change:  # else each batch has a key of its own, of which there is no end
                self._keys.add(wanted.key)
                tried = MOST_TRIED if self._captures.keep_changing else self._tried.get(wanted.kind, 0) + 1
                self._tried[wanted.kind] = tried
        made = self._made[kind]
        assert made.eager is not None
        made.eager.keeps_output = wanted.outputs
        graph = made.graph if made.joint.weight is None else counting(made.graph, self._weight(wanted))
        return replace(made, graph=graph, batch=wanted.batch, looked=reason is None)

    def _check_allowed(self, wanted: Wanted, reason: AutoparError) -> None:
        if self._settings.capture == "always":
            raise reason
        if wanted.gathers:
            raise _refusal(reason, "samples of all ranks are compared with each other in the order of its graph")

    def _try(self, wanted: Wanted, reason: AutoparError) -> None:
        """Raises `reason`, which says more of what is wrong, where the model does not run on a batch either; else
        warns, once."""
        given = wanted.batch.rebuild(wanted.batch.copied())
        with without_trace(owners_of(self._model, self._settings.loss_fn)), torch.enable_grad():
            try:
                call_model(self._model, given, self._settings.loss_fn is not None)
            except Exception as e:
                raise reason from e
        if not self._said:
            self._said = True
            lost = {w for c in self._captures if c.joint.guards is not None for w in c.joint.guards.lost}
            warnings.warn(_said(reason, sorted(lost)), AutoparWarning, stacklevel=2)

    def _new(self, kind: _Kind, reason: AutoparError) -> Compiled:
        """Stands in for the captures of a kind, which all have one order of collectives."""
        autocast, outputs = kind
        alike = [c for c in self._captures if c.graph.autocast == autocast]
        if not alike:
            raise _refusal(reason, f"no batch was captured before under this autocast ({autocast or 'none'})")
        captured = min(alike, key=lambda c: c.joint.has_outputs is not outputs)
        try:
            graph = stand_in(captured.graph)
            program = self._lower(graph)
        except (CaptureError, PlanError) as e:
            raise _refusal(reason, str(e)) from reason
        if program.sharded_members:
            name = program.sharded_members[0].slice.name
            raise _refusal(reason, f"rows of '{name}' are on other ranks, which graphs gather and sum for each pass")
        trained = {p.name: self._parameters[p.name] for p in graph.parameters}
        if self._eager is None:
            of = self._model, self._settings.loss_fn, trained, frozenset(trained), False, self._group, self._check
            self._eager = EagerModel(*of)
        return Compiled(graph, program, captured.shared_buffers, eager=self._eager, proved=True)

    def _check(self, missing: frozenset[str], buffers: Sequence[str]) -> None:
        """Is told what a step has shown, before anything is sent. Raises `CaptureError` where a graph would do
        something else with it."""
        known = {name for c in self._captures for name, _ in c.joint.mutations} | self._shared.mine
        others = [name for name in buffers if name not in known]
        if others and self._group.world_size > 1:
            raise CaptureError(
                f"the model writes to its buffer '{others[0]}' on a batch that cannot be captured, and does not on "
                f"those that are, so ranks cannot know that it is to be rank 0's. {_NEVER}"
            )
        if not missing or next(iter(self)).joint.weight is None:  # a drop-in module's ranks tell each other
            return
        name = min(missing)
        if self._group.world_size == 1:
            raise CaptureError(
                f"parameter '{name}' gets no gradient from a batch that cannot be captured, and does from those that "
                f"are: the plan updates it in each step, where one process would leave it out. {_NEVER}"
            )
        if not self._said_missing:
            self._said_missing = True
            warnings.warn(
                f"parameter '{name}' gets no gradient from a batch that cannot be captured: zeros are summed with "
                "other ranks' gradients. Where no rank has one, momentum and weight decay move it, where one process "
                f"would leave it as it is. {_NEVER}, and leaves out what no rank uses",
                AutoparWarning,
                stacklevel=2,
            )

    def _weight(self, wanted: Wanted) -> BatchWeight:
        """How much a batch counts: as a capture of such batches shows, where there was one; else by its samples, as
        much as these have counted in the last batch that was captured."""
        alike = self._captures.made_for(wanted.key, wanted.kind, wanted.batch.shapes)
        if alike is not None:
            return alike.weight
        captured = next(iter(self._captures))
        of, rate = captured.weight, self.per_sample()
        if of.constant is not None and captured.graph.batch_size:
            rate = of.constant / captured.graph.batch_size
        if of.unit == "samples" or of.problem is not None or rate is None:
            return UnreadWeight("samples", is_sum=of.is_sum, is_mean=of.is_mean)
        is_known = of.constant is not None and _row_shapes(captured) == [t.shape[1:] for t in wanted.batch.tensors]
        several = self._group.world_size > 1 and self._settings.weight is None
        if several and not is_known and not self._said_weight:
            self._said_weight = True
            warnings.warn(
                f"how much of what the loss is a mean over ({of.unit}) a batch has that cannot be captured is not "
                f"known: each of its samples counts as those of an earlier batch did, {rate:g}. Pass weight= to say it",
                AutoparWarning,
                stacklevel=2,
            )
        return SampleRate(of.unit, is_sum=of.is_sum, is_mean=of.is_mean, rate=rate)


def _row_shapes(c: Compiled) -> list[torch.Size]:
    """Shapes of the samples in the tensors of the batch that was captured."""
    inputs = zip(c.joint.inputs, c.joint.module.graph.find_nodes(op="placeholder"), strict=True)
    shapes = {int(key): n.meta["val"].shape[1:] for (kind, key), n in inputs if kind == "batch"}
    return [shapes[i] for i in sorted(shapes)]


def _unknown() -> None:
    return None


def _refusal(reason: AutoparError, why: str) -> CaptureError:
    return CaptureError(
        f"{str(reason).rstrip('.')}. Nor can the model run eagerly on this batch alone, beside the graphs of others, "
        f"under this plan: {why.rstrip('.')}. {_NEVER}, under a plan that allows it"
    )


def _said(reason: AutoparError, lost: Sequence[str]) -> str:
    unset = ""
    if lost:
        shown = ", ".join(f"'{w}'" for w in lost[:5])
        unset = f" There it finds {shown} as captured steps have left it, which do not change it."
    return (
        f"{str(reason).rstrip('.')}. So the model runs eagerly on such batches, under the same plan: their gradients "
        f"are sent behind their backward pass rather than beside it.{unset} capture='always' raises instead"
    )
