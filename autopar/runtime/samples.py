"""Samples of all ranks, of which each has another number: laid out for exchanges of one size, and taken apart again.

`counts`: each rank's samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.runtime.resident import uneven_micro_batches


def agreed(counts: torch.Tensor, what: str) -> list[int]:
    """Each rank's samples, from what all have said: as many, or, where the step has further micro-batches to come, as
    many below zero. Raises where some have and others have not; `what` begins that sentence."""
    if counts.min() < 0 < counts.max():
        raise uneven_micro_batches(what)
    found: list[int] = counts.abs().tolist()
    return found


def apart(flats: torch.Tensor, counts: Sequence[int], width: int, first: int = 0) -> torch.Tensor:
    """[samples of all ranks, width], from what ranks have sent: [ranks, at least so many elements each], from `first`
    on."""
    flat = [f[first : first + c * width].view(c, width) for f, c in zip(flats, counts, strict=True)]
    return torch.cat(flat)


def padded(values: torch.Tensor, counts: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """[samples of all ranks, width] as one flat value, in which all ranks' parts are as long as the longest."""
    longest = max(counts)
    if set(counts) == {longest}:
        return values.to(dtype).view(-1)
    flat = values.new_zeros(len(counts), longest, values.shape[1], dtype=dtype)
    for into, part in zip(flat, torch.split(values, list(counts)), strict=True):
        into[: len(part)] = part
    return flat.view(-1)
