"""Runs the graphs of a step: over one batch, or over several micro-batches as over one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from autopar.backends import collectives
from autopar.errors import SignatureError
from autopar.ir.batch import Batch
from autopar.ops.parts import added
from autopar.runtime.compiled import Compiled
from autopar.runtime.job.process_group import Group
from autopar.runtime.loss_scale import LossScale
from autopar.runtime.losses.meaning import LossMeaning
from autopar.runtime.model.buffers import SharedBuffers
from autopar.runtime.model.outputs import fill
from autopar.runtime.optimizers.same_settings import SameSettings
from autopar.runtime.replay import as_captured
from autopar.runtime.step_writer import batch_share, loss_share
from autopar.runtime.writer import NARROW


class StepRuns:
    """Runs what was written of a program's steps, and weighs their batches against all ranks'."""

    def __init__(
        self,
        group: Group,
        device: torch.device,
        buffers: Mapping[str, torch.Tensor],
        meaning: LossMeaning,
        same_settings: SameSettings,
        shared: SharedBuffers,
        arguments: Callable[[Compiled, tuple[torch.Tensor, ...]], list[torch.Tensor]],
        written: Callable[[Compiled, str], torch.fx.GraphModule],
        scale: LossScale | None = None,
    ) -> None:
        """`arguments`: of a capture's graphs, less the tangents, from a batch's tensors. `written`: one of a capture's
        graphs, by its name."""
        self._group = group
        self._device = device
        self._buffers = buffers
        self._meaning = meaning
        self._same_settings = same_settings
        self._shared = shared
        self._arguments = arguments
        self._written = written
        self._scale = scale
        self._outputs: list[Any] = []

    def take_outputs(self) -> list[Any]:
        """The model's output for each batch of the step that was run last, where it was asked for; kept no longer."""
        found, self._outputs = self._outputs, []
        return found

    def one(self, compiled: Compiled, batch: Batch, original: Any) -> torch.Tensor:
        arguments, step = self._arguments(compiled, batch.tensors), self._written(compiled, "step")
        self._outputs = []
        if self._group.world_size == 1:
            with _running(compiled):
                found = step(*arguments, self._seed(compiled, 1.0))
            return self._kept(compiled, found).detach()
        weight = total = self._meaning.weigh(compiled.weight, batch, original)
        if self._meaning.is_sum:  # a share of 1
            weight, total = torch.full_like(weight, self._group.world_size), torch.ones_like(weight)
        self._compare([compiled], [batch])
        with _running(compiled):
            found = step(*arguments, weight, self._same_settings.with_number(total))
        return self._kept(compiled, found).to(compiled.loss_dtype)

    def many(self, compiled: list[Compiled], batches: list[Batch], originals: list[Any]) -> torch.Tensor:
        """All but the last micro-batch add to local gradients; the last one's step synchronizes and updates."""
        if compiled[-1].loss_dtype in NARROW:
            raise SignatureError(
                "micro-batches are weighted through the loss, which this model computes in 16 bits, too few for that: "
                "compute it from float32 values, as in cross_entropy(logits.float(), target)"
            )
        self._outputs = []
        shares = self.shares(compiled, batches, originals)
        earlier: dict[str, Any] = {}
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        for c, b, share in zip(compiled[:-1], batches[:-1], shares[:-1], strict=True):
            loss += loss_share(self._accumulate(c, b, float(share), earlier), share)
        last = compiled[-1]
        ordered = [earlier[p.name] for p in last.graph.parameters]
        earlier.clear()
        share = shares[-1]
        arguments, step = self._arguments(last, batches[-1].tensors), self._written(last, "last micro-batch")
        with _running(last):
            found = step(*arguments, self._seed(last, float(share)), *ordered, share, loss)
        found = self._kept(last, found)
        if self._group.name is None:
            found = loss + loss_share(found, share)
        return found.to(last.loss_dtype)

    def _compare(self, compiled: Sequence[Compiled], batches: Sequence[Batch]) -> None:
        """Has ranks compare in which units their batches count, as they sum how much these do, and which buffers their
        graphs read and write."""
        units, here = self._meaning.units([c.weight for c in compiled], batches)
        self._same_settings.compare("units", units, here, self._meaning.agree_again)
        shared = [self._shared.run(c.shared_buffers, c.read_buffers) for c in compiled][-1]
        self._same_settings.compare("buffers", shared, shared, self._shared.agree)

    def _seed(self, c: Compiled, share: float) -> torch.Tensor:
        """What the backward pass of a batch with this share of the global batch starts from."""
        return c.tangent(share * (1.0 if self._scale is None else self._scale.factor), self._device)

    def _kept(self, c: Compiled, found: Any) -> torch.Tensor:
        """The loss that a step's graph has returned; keeps the output that it may have returned, too."""
        if c.eager is not None:
            self._outputs += c.eager.take_outputs()
        if not c.joint.has_outputs:
            return found  # type: ignore[no-any-return]
        loss, outputs = found
        self._outputs.append(fill(c.output, iter(outputs)))
        return loss  # type: ignore[no-any-return]

    def _accumulate(self, c: Compiled, batch: Batch, seed: float, into: dict[str, Any]) -> torch.Tensor:
        """Adds a micro-batch's gradients, or the parts that they are made of, to `into`; returns its loss."""
        passes = self._written(c, "earlier micro-batch")
        tangent = self._seed(c, seed)
        with _running(c):
            loss, outputs, buffers, gradients = passes(*self._arguments(c, batch.tensors), tangent)
        if c.eager is not None:
            self._outputs += c.eager.take_outputs()
        if c.joint.has_outputs:
            self._outputs.append(fill(c.output, iter(outputs)))
        for (name, _), value in zip(c.joint.mutations, buffers, strict=True):
            self._buffers[name].copy_(value)
        for name, gradient in gradients.items():
            if isinstance(gradient, tuple):
                into[name] = added(into[name], gradient) if name in into else gradient
            elif name in into:
                into[name].add_(gradient)
            else:  # a copy, for two parameters may have one and the same gradient tensor
                into[name] = gradient.clone(memory_format=torch.contiguous_format)
        return loss  # type: ignore[no-any-return]

    def shares(self, compiled: list[Compiled], batches: list[Batch], originals: list[Any]) -> torch.Tensor:
        """The share of each of this rank's micro-batches in the global batch, float64, by how much they count."""
        each = zip(compiled, batches, originals, strict=True)
        weights = torch.stack([self._meaning.weigh(c.weight, b, o) for c, b, o in each])
        total = torch.ones_like(weights[0]) if self._meaning.is_sum else weights.sum()
        if self._group.name is not None:  # of a loss that is a sum, too: other ranks may have one micro-batch
            self._compare(compiled, batches)
            total = self._same_settings.with_number(total)
            total = self._same_settings(collectives.wait(collectives.all_reduce(total, self._group.name)))
        if self._meaning.is_sum:
            return torch.ones_like(weights)
        return batch_share(weights, total, torch.float64, self._group.world_size * len(weights))


def _running(c: Compiled) -> AbstractContextManager[None]:
    """Around a graph, as it was captured; a model that runs eagerly is in the caller's autocast."""
    return nullcontext() if c.eager is not None else as_captured()
