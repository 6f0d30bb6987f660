"""Collectives as the rewritten graph calls them: issued at once, completed by `wait`.

All are issued from one thread, in graph order. PyTorch's functional collectives are used where they exist; the
others are asynchronous `torch.distributed` calls whose work is registered, so that one `wait` serves all.

Bytes on the wire are those declared by `autopar.ir.primitives.wire_bytes`. Some choices follow from what gloo does:
its reduce-scatter moves as much as a whole all-reduce, so the sum is taken after an all-to-all; its all-gather refuses
unequal parts, so those go through an all-to-all as well; neither is fast, so that large ones on CPU go in rounds of our
own, in a ring where parts are alike (`exchange`); and the functional all-gather of torch 2.13 corrupts the heap where
several are under way ("double free", a fault in malloc, within seconds of small messages), so it is not used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from autopar.ir import compat
from autopar.ir.primitives import EXACT_BYTES, alike
from autopar.runtime.exchange import AllGather, AllToAll, ReduceScatter, in_rounds
from autopar.runtime.served_sum import ServedSum
from autopar.runtime.servers import mesh_named

_functional = torch.ops._c10d_functional
_STRIDED = "gloo sums strided memory wrongly, without an error: values are made contiguous before they are sent"


class CommunicationFailure(RuntimeError):
    """A collective that failed, before it is known which rank is to blame; `Group.guard` finds out."""


@contextlib.contextmanager
def may_fail() -> Iterator[None]:
    """Marks what fails within as a failure of communication, which no other error is then taken for."""
    try:
        yield
    except RuntimeError as e:  # torch has no narrower class for what gloo raises
        raise CommunicationFailure(str(e)) from e


@may_fail()
def all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """The sum over ranks, in place."""
    assert x.is_contiguous(), _STRIDED
    return _functional.all_reduce_(x, "sum", group)  # type: ignore[no-any-return]


@may_fail()
def wait(x: torch.Tensor) -> torch.Tensor:
    """Blocks until the collective that writes `x` is complete."""
    return _functional.wait_tensor(x)  # type: ignore[no-any-return]


@may_fail()
def reduce(x: torch.Tensor, owner: int, group: str) -> torch.Tensor:
    """The sum over ranks, in place, valid on rank `owner` of the group."""
    assert x.is_contiguous(), _STRIDED
    pg = _resolve_process_group(group)  # type: ignore[arg-type]
    return _registered(x, dist.reduce(x, group_dst=owner, group=pg, async_op=True))


def all_reduce_copy(x: torch.Tensor, group: str) -> torch.Tensor:
    """Starts the sum of a value that stays as it is here."""
    return all_reduce(x.clone(), group)


@may_fail()
def broadcast(x: torch.Tensor, owner: int, group: str) -> torch.Tensor:
    """Rank `owner`'s value, in place."""
    assert x.is_contiguous(), _STRIDED
    pg = _resolve_process_group(group)  # type: ignore[arg-type]
    return _registered(x, dist.broadcast(x, group_src=owner, group=pg, async_op=True))


@may_fail()
def reduce_scatter(x: torch.Tensor, splits: Sequence[int], rank: int, group: str) -> torch.Tensor:
    """Sends part r of `x` to rank r. The result, once waited for, is what `sum_parts` takes: what came from each rank,
    [ranks, elements], or its sum, where it was added up on its way."""
    assert x.is_contiguous(), _STRIDED
    pg = _resolve_process_group(group)  # type: ignore[arg-type]
    mine = splits[rank]
    if in_rounds(x, splits) and alike(splits) and x.element_size() >= EXACT_BYTES:
        out = x.new_empty(mine)
        return _registered(out, ReduceScatter(torch.split(x, list(splits)), out, rank, pg).begin())
    out = x.new_empty(len(splits), mine)
    if in_rounds(x, splits):
        return _registered(out, AllToAll(torch.split(x, list(splits)), out.unbind(), rank, pg).begin())
    work = dist.all_to_all_single(out.view(-1), x, [mine] * len(splits), list(splits), group=pg, async_op=True)
    return _registered(out, work)


def reduce_scatter_equal(x: torch.Tensor, world_size: int, rank: int, group: str) -> torch.Tensor:
    """The same, in parts of one size."""
    return reduce_scatter(x, [x.numel() // world_size] * world_size, rank, group)


def sum_parts(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum, in `dtype`, of what `reduce_scatter` received, in rank order."""
    return x.to(dtype) if x.dim() == 1 else x.sum(0, dtype=dtype)


@may_fail()
def all_gather(x: torch.Tensor, splits: Sequence[int], rank: int, group: str) -> torch.Tensor:
    """Every rank's part, one after the other."""
    if len(set(splits)) == 1:
        return all_gather_equal(x, len(splits), group)
    pg = _resolve_process_group(group)  # type: ignore[arg-type]
    out = x.new_empty(sum(splits))
    if in_rounds(x, splits) and alike(splits):
        return _registered(out, AllGather(x, torch.split(out, list(splits)), rank, pg).begin())
    if in_rounds(x, splits):
        return _registered(out, AllToAll([x] * len(splits), torch.split(out, list(splits)), rank, pg).begin())
    sent = x.repeat(len(splits))
    work = dist.all_to_all_single(out, sent, list(splits), [x.numel()] * len(splits), group=pg, async_op=True)
    return _registered(out, work)


@may_fail()
def all_gather_equal(x: torch.Tensor, world_size: int, group: str) -> torch.Tensor:
    """Every rank's value, flat, one after the other; all are as long as this rank's."""
    if x.numel() == 0:
        return x
    pg = _resolve_process_group(group)  # type: ignore[arg-type]
    out = x.new_empty(world_size * x.numel())
    if in_rounds(x, [x.numel()] * world_size):
        return _registered(out, AllGather(x.reshape(-1), out.chunk(world_size), pg.rank(), pg).begin())
    return _registered(out, compat.all_gather_single(out, x.reshape(-1), group=pg, async_op=True))


@may_fail()
def all_to_all(x: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> torch.Tensor:
    """Sends the r-th part of `x`, `sent[r]` elements long, to rank r; what comes from rank r is `received[r]` long."""
    assert x.is_contiguous(), _STRIDED
    pg = _resolve_process_group(group)  # type: ignore[arg-type]
    out = x.new_empty(sum(received))
    work = dist.all_to_all_single(out, x, list(received), list(sent), group=pg, async_op=True)
    return _registered(out, work)


def served_sum(x: torch.Tensor, adds_up: Sequence[int], mesh: str) -> torch.Tensor:
    """The sum over ranks, in place, with the help of servers. `adds_up`: elements that each rank and each server of
    the mesh adds up."""
    assert x.is_contiguous(), _STRIDED
    return _registered(x, ServedSum(x, adds_up, mesh_named(mesh), mesh).begin())


def _registered(x: torch.Tensor, work: dist.Work | None) -> torch.Tensor:
    assert work is not None, "an asynchronous collective returns its work"
    torch._C._distributed_c10d._register_work(x, work)
    return x
