"""The work of a linear layer whose outputs are shared out: what each rank computes for all ranks' samples.

Rank r of n keeps outputs r, r+n, r+2n, ...: rows of the weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from autopar.ir.training_graph import Layer
from autopar.runtime.products import Product
from autopar.runtime.rows import Message
from autopar.runtime.samples import agreed, apart, padded


class LayerShard(nn.Module):
    """A rank's share of a layer. The methods are the works that `column_parallel_linear` names, in their order."""

    def __init__(self, layer: Layer, weight: torch.Tensor, rank: int, world_size: int) -> None:
        super().__init__()
        self.layer = layer
        self.weight = weight
        self.rank = rank
        self.own = [len(range(r, layer.outputs, world_size)) for r in range(world_size)]
        """Outputs of each rank."""

    def agreed(self, counts: torch.Tensor) -> list[int]:
        """Each rank's samples."""
        return agreed(counts, "a layer whose outputs are")

    def given(self, given: torch.Tensor, counts: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """What the layer is given here, flat, and as long as that of the largest batch."""
        flat = given.new_zeros(max(counts) * self.layer.width, dtype=dtype)
        flat[: given.numel()].view_as(given).copy_(given)
        return flat

    def everyone(self, gathered: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """What the layer is given by all ranks: [samples of all ranks, width]."""
        flats = gathered.view(len(counts), -1).to(self.weight.dtype)
        if set(counts) == {max(counts)}:
            return flats.view(-1, self.layer.width)
        return apart(flats, counts, self.layer.width)

    def found(self, everyone: torch.Tensor, counts: Sequence[int], dtype: torch.dtype) -> Message:
        """To each rank, its samples' outputs among those kept here."""
        outputs = everyone @ self.weight.t()
        return outputs.to(dtype).view(-1), self._of_own_outputs(counts), self._of_own_samples(counts)

    def product(self, found: torch.Tensor, counts: Sequence[int], bias: torch.Tensor | None) -> torch.Tensor:
        """All outputs of this rank's samples."""
        samples, n = counts[self.rank], len(counts)
        product = self.weight.new_empty(samples, self.layer.outputs)
        for r, part in enumerate(torch.split(found, self._of_own_samples(counts))):
            product[:, r::n] = part.view(samples, self.own[r])
        return product if bias is None else product.add_(bias)

    def errors(self, error: torch.Tensor, counts: Sequence[int], dtype: torch.dtype) -> Message:
        """To each rank, the errors of its outputs."""
        flat = torch.cat([error[:, r :: len(counts)].reshape(-1) for r in range(len(counts))])
        return flat.to(dtype), self._of_own_samples(counts), self._of_own_outputs(counts)

    def own_errors(self, errors: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Of the outputs kept here: [samples of all ranks, own outputs]."""
        return errors.view(sum(counts), self.own[self.rank]).to(self.weight.dtype)

    def returned(self, errors: torch.Tensor, counts: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Every rank's part of the gradient of what its layer is given, as long as that of the largest batch."""
        return padded(errors @ self.weight, counts, dtype)

    def gradient(self, errors: torch.Tensor, everyone: torch.Tensor) -> Product:
        """Of the rows kept here."""
        return Product(errors, everyone)

    def _of_own_outputs(self, counts: Sequence[int]) -> list[int]:
        return [c * self.own[self.rank] for c in counts]

    def _of_own_samples(self, counts: Sequence[int]) -> list[int]:
        return [counts[self.rank] * own for own in self.own]
