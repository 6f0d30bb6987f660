"""How much a batch counts in the global loss.

The gradient of several ranks is that of the loss of one process on all their batches together. Where that loss is a
mean over something (samples, tokens that are not ignored, elements), a rank's share is how much of it its batch has.
Where it is a sum over the batch, every rank's counts whole. `BatchWeight` says which, or that one weight cannot say it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.fx


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

    def of(
        self,
        tensors: tuple[torch.Tensor, ...],
        buffers: Mapping[str, torch.Tensor] | None = None,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        """The weight of a batch, a float64 scalar. `buffers`: the model's, by name. `device`: where to count."""
        if self.counted is not None:
            given = [tensors[int(k)] if kind == "batch" else (buffers or {})[str(k)] for kind, k in self.reads]
            return self.counted(*(t if device is None else t.to(device) for t in given))  # type: ignore[no-any-return]
        assert self.constant is not None
        return torch.tensor(self.constant, dtype=torch.float64)


@dataclass(frozen=True)
class UnreadWeight(BatchWeight):
    """How much a batch counts where no graph shows what its loss is made of: by its samples, dimension 0 of its first
    tensor that has one; a batch without tensors counts as one sample."""

    def of(
        self,
        tensors: tuple[torch.Tensor, ...],
        buffers: Mapping[str, torch.Tensor] | None = None,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        size = next((len(t) for t in tensors if t.dim()), 1)
        return torch.tensor(float(size), dtype=torch.float64)
