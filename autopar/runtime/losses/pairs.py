"""Two samples put together where every rank's batch has one, so that a loss that compares samples shows itself.

A batch of one sample cannot be taken apart: a loss across samples compares it with itself, and one that is a sum is its
mean as well. So one rank lends its sample to the others, once, and each looks at both.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from autopar.backends.collectives import may_fail
from autopar.ir.batch import Batch, flatten
from autopar.ir.listed import joined
from autopar.runtime.job.process_group import Group
from autopar.runtime.losses.findings import Finding

_MOST_BYTES = 2**26
"""Larger samples are not lent: networks of 50 Mbit/s take 10 s for these."""

OF_OTHER_KINDS = (
    "each rank's batch has one sample, and those of two ranks cannot be put together, as their sizes differ"
)


@dataclass(frozen=True)
class Pair:
    """A batch's sample and another one."""

    lent: tuple[torch.Tensor, ...]
    """The other one's tensors."""
    both: Batch
    """The other one and the batch's, in this order."""


@dataclass(frozen=True)
class Lent:
    """Another sample."""

    tensors: tuple[torch.Tensor, ...]
    kind: str
    """The kind of batch that it is one of, as `kind_of` returns it."""
    dim: int = 0
    """The dimension in which samples lie side by side."""

    @classmethod
    def of(cls, batch: Batch, dim: int = 0) -> Lent:
        """A batch of one sample. It keeps copies, as a loader may write the next batch over it."""
        return cls(batch.copied(), kind_of(batch, dim), dim)

    def beside(self, batch: Batch, device: torch.device) -> Pair | None:
        """It and a batch's sample, on a device; `None` where they cannot be put together."""
        if kind_of(batch, self.dim) != self.kind:
            return None
        other, own = (tuple(t.to(device) for t in each) for each in (self.tensors, batch.tensors))
        try:
            if batch.listed is not None:
                return Pair(other, flatten(joined(batch.rebuild(other), batch.rebuild(own))))
            rows = zip(other, own, strict=True)
            both = tuple(torch.cat([a, b], self.dim) if _is_row(b, self.dim) else b for a, b in rows)
        except RuntimeError:  # tensors beside the list, of other shapes; or in a layout in which tensors are not joined
            return None
        return Pair(other, replace(batch, tensors=both, given=()))


def kind_of(batch: Batch, dim: int = 0) -> str:
    """What two batches of one sample have in common where they can be put together; empty where this one cannot be. A
    batch that lists its samples can be, whatever their sizes."""
    size = sum(t.numel() * t.element_size() for t in batch.tensors)
    few = batch.size == 1 if not dim else batch.listed is None and any(_is_row(t, dim) for t in batch.tensors)
    if not few or batch.unseen or size > _MOST_BYTES:
        return ""
    signature = batch.signature if batch.listed is None else batch.signature.of_any_size
    return hashlib.sha256(repr((dim, signature)).encode()).hexdigest()[:16]


def lender(found: Sequence[Finding]) -> int | None:
    """The rank that lends its sample, by what each has found; `None` where that shows nothing."""
    here = [(rank, f) for rank, f in enumerate(found) if f.samples]
    if len(here) < 2 or len({f.kind for _, f in here}) > 1 or not here[0][1].kind:
        return None
    return here[0][0]


def all_of_other_kinds(found: Sequence[Finding]) -> bool:
    """Whether all ranks' batches have one sample, and they cannot be put together, by what each has found."""
    here = [f for f in found if f.samples]
    return len(here) > 1 and all(f.kind for f in here) and len({f.kind for f in here}) > 1


def lend(own: Batch, rank: int, group: Group, device: torch.device) -> tuple[torch.Tensor, ...] | None:
    """That rank's sample, on every rank, each tensor as a plain one; `None` where they cannot be sent. By all ranks
    together. `device`: where collectives take tensors."""
    mine = _written(own.tensors) if group.rank == rank else b""
    size = torch.tensor(len(mine), device=device)
    with group.guard("comparing samples of two ranks"), may_fail():
        dist.broadcast(size, group_src=rank, group=group.pg)
        if not size:
            return None
        content = torch.frombuffer(bytearray(mine or bytes(int(size))), dtype=torch.uint8).to(device)
        dist.broadcast(content, group_src=rank, group=group.pg)
    return tuple(torch.load(io.BytesIO(content.cpu().numpy().tobytes()), weights_only=True))


def _written(tensors: Sequence[torch.Tensor]) -> bytes:
    """Tensors as bytes; none where a tensor cannot be written, which the other ranks, who wait for it, must be told."""
    file = io.BytesIO()
    plain = (t if type(t) is torch.Tensor else t.as_subclass(torch.Tensor) for t in tensors)
    try:
        torch.save([t.detach().cpu() for t in plain], file)
    except Exception:
        return b""
    return file.getvalue()


def _is_row(t: torch.Tensor, dim: int) -> bool:
    return t.dim() > dim and t.shape[dim] == 1
