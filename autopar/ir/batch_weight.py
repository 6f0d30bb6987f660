"""How much a batch counts in the global loss.

The gradient of several ranks is that of the loss of one process on all their batches together. Where that loss is a
mean over something (samples, tokens that are not ignored, elements), a rank's share is how much of it its batch has.
Where it is a sum over the batch, every rank's counts whole. `BatchWeight` says which, or that one weight cannot say it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from autopar.ir.batch import Batch, shapes_of
from autopar.ir.served import Sizes


@dataclass(frozen=True)
class BatchWeight:
    """How much a batch counts. Exactly one of `constant` and `counted` is set, unless a subclass counts itself."""

    unit: str
    """What is counted, in words."""
    constant: float | None = None
    counted: torch.fx.GraphModule | None = None
    """From tensors to the weight, for what depends on their values."""
    reads: tuple[tuple[str, str | int], ...] = ()
    """What `counted` is given: (`batch`, index of a tensor) or (`buffer`, name)."""
    is_mean: bool = True
    """Whether the loss may be a mean over what is counted."""
    is_sum: bool = False
    """Whether the loss may be a sum over the batch; where `is_mean` holds too, the graph does not tell which."""
    others: tuple[BatchWeight, ...] = ()
    """What else the loss is a mean over, where it is a sum of several means: one weight is right only while these
    counts are to each other as on every other rank."""
    problem: str | None = None
    """Why one weight cannot say what the loss is, where that is seen; the weight is then the number of samples."""
    where: str = ""
    """The line of the user's code that computes the loss, as `file:line`; empty where it is not known."""
    may_be_nothing: frozenset[torch.fx.Node] = field(default=frozenset(), compare=False, repr=False)
    """Nodes of the joint graph that, for a batch of which nothing counts, are 0 and divided by, or NaN."""

    sizes: Sizes | None = field(default=None, compare=False, repr=False)
    """Of a graph that serves batches of several sizes."""
    follows: Any = field(default=None, compare=False, repr=False)
    """In the place of `constant`, what of `sizes` it is."""

    def of(
        self,
        tensors: tuple[torch.Tensor, ...],
        buffers: Mapping[str, torch.Tensor] | None = None,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        """The weight of a batch, a float64 scalar. `buffers`: the model's, by name. `device`: where to count."""
        if self.counted is not None:
            given = [self._read(kind, key, tensors, buffers or {}, device) for kind, key in self.reads]
            return self.counted(*given)  # type: ignore[no-any-return]
        if self.follows is not None and self.sizes is not None:
            return torch.tensor(float(self.sizes.evaluate(self.follows, shapes_of(tensors))), dtype=torch.float64)
        assert self.constant is not None
        return torch.tensor(self.constant, dtype=torch.float64)

    def of_structure(self, batch: Batch) -> BatchWeight:
        """The weight of batches of this one's structure, where a program takes batches of several."""
        return self

    def of_batch(self, batch: Batch, buffers: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
        """The weight of a batch of the structure that was captured."""
        return self.of(batch.tensors, buffers, device)

    def _read(
        self,
        kind: str,
        key: str | int,
        tensors: tuple[torch.Tensor, ...],
        buffers: Mapping[str, torch.Tensor],
        device: torch.device | None,
    ) -> Any:
        if kind == "size":
            assert self.sizes is not None
            return self.sizes.of(shapes_of(tensors))[int(key)]
        tensor = tensors[int(key)] if kind == "batch" else buffers[str(key)]
        return tensor if device is None else tensor.to(device)


@dataclass(frozen=True)
class SampleRate(BatchWeight):
    """A batch counts by its samples, each as much; a batch without tensors counts as one sample."""

    rate: float = 1.0
    """How much each sample counts."""

    def of_batch(self, batch: Batch, buffers: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
        return torch.tensor(self.rate * (1 if batch.size is None else batch.size), dtype=torch.float64)

    def of(
        self,
        tensors: tuple[torch.Tensor, ...],
        buffers: Mapping[str, torch.Tensor] | None = None,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        size = next((len(t) for t in tensors if t.dim()), 1)
        return torch.tensor(self.rate * size, dtype=torch.float64)


@dataclass(frozen=True)
class UnreadWeight(SampleRate):
    """How much a batch counts where no graph shows what its loss is made of."""

    unread: str = ""
    """Why the loss may be a mean over something else, as far as a run has shown, in words."""
