"""This rank's rows of a group's parameters: gathered with those of other ranks, and given their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from autopar.runtime.fragments import pack, rows_of_rank
from autopar.runtime.resident import uneven_micro_batches


class ParameterShards(nn.Module):
    """Rank r has rows r, r+n, r+2n, ... of each. Flat values have the rows of rank 0 of all members, then those of
    rank 1, and so on."""

    def __init__(
        self,
        shards: Sequence[torch.Tensor],
        shapes: Sequence[tuple[int, ...]],
        strides: Sequence[tuple[int, ...]],
        rank: int,
        world_size: int,
    ) -> None:
        """`shapes`, `strides`: of the whole parameters, as the graph was traced with them."""
        super().__init__()
        self._shards, self._layouts = list(shards), list(zip(shapes, strides, strict=True))
        self._rank, self._world_size = rank, world_size

    def own(self, members: Sequence[int], is_last: bool | None) -> torch.Tensor:
        """What this rank has of some members, to be gathered; behind it, where that is to be agreed upon, whether the
        batch is the last one of its step."""
        shards = [self._shards[i] for i in members]
        if is_last is not None:
            shards.append(shards[0].new_full((1,), float(is_last)))
        return shards[0].view(-1) if len(shards) == 1 else pack(shards, shards[0].dtype)

    def whole(self, flat: torch.Tensor, members: Sequence[int], agrees: bool) -> list[torch.Tensor]:
        """These members, from what all ranks have. Raises `SignatureError` where ranks are to agree, and do not."""
        found = [flat.new_empty_strided(*self._layouts[i]) for i in members]
        last = flat.new_empty(self._world_size)
        views = self._rows([*found, last] if agrees else found)
        torch._foreach_copy_(views, _split(flat, views))
        if agrees and bool((last != last[0]).any()):  # complex numbers have no order
            raise uneven_micro_batches("a parameter whose rows are")
        return found

    def pack(self, gradients: Sequence[torch.Tensor], dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
        """The whole gradients of all members, to be summed to the owners of their rows."""
        return pack(self._rows(gradients), dtype, scale)

    def gradient(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The gradients of this rank's rows of each member."""
        return _split(flat, self._shards)

    def _rows(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The rows of each rank of each tensor, as flat values have them."""
        n = self._world_size
        return [t[rows_of_rank(rank, n)] for rank in range(n) for t in tensors]


def _split(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The elements of a flat value, as tensors of these shapes."""
    parts = torch.split(flat, [t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]
