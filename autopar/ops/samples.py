"""Samples of all ranks, of which each has another number: laid out for exchanges of one size, and taken apart again.

`counts`: each rank's samples.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from autopar.errors import SignatureError
from autopar.ops.base import Site


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


def sample_count(site: Site, node: str) -> Any:
    """This rank's samples, the rows of a node's value, for all to know; negative where more micro-batches follow."""
    samples = site.rows(node)
    count = samples if site.is_last else -samples if isinstance(samples, int) else site.call(operator.neg, (samples,))
    return site.call(torch.full, ((1,), count), {"dtype": torch.int64, "device": site.device})


def hand_back(site: Site, node: str, values: Any, like: str, width: int) -> Any:
    """Puts flat `values`, which may be padded, in the place of a node of the graph: as many rows as `like` has."""
    rows = site.rows(like)
    elements = rows * width if isinstance(rows, int) else site.call(operator.mul, (rows, width))
    own = site.call(torch.narrow, (values, 0, 0, elements))
    value = site.call(torch.reshape, (own, (rows, width)))
    site.replace(node, value)
    return value


def uneven_micro_batches(what: str) -> SignatureError:
    """What every rank is told where `what` is shared out and ranks take different numbers of micro-batches."""
    return SignatureError(
        f"some ranks took the last of their micro-batches, others have more to come: {what} shared out needs every "
        "rank for each, so all must take equally many"
    )
