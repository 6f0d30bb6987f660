"""Collectives as the rewritten graph calls them: issued at once, completed by `wait`.

All are issued from one thread, in graph order. PyTorch's functional collectives are used where they exist; the
others are asynchronous `torch.distributed` calls whose work is registered, so that one `wait` serves all.

Each is executed by the library that the process group has for the value's device (`gloo`, `nccl`). The functional
all-gather of torch 2.13 corrupts the heap where several are under way ("double free", a fault in malloc, within seconds
of small messages), so it is not used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from autopar.backends.base import Backend
from autopar.backends.gloo import GLOO
from autopar.backends.nccl import NCCL
from autopar.backends.server_reduce import ServerSum, mesh_named

_functional = torch.ops._c10d_functional
_STRIDED = "gloo sums strided memory wrongly, without an error: values are made contiguous before they are sent"


class CommunicationFailure(RuntimeError):
    """A collective that failed, before it is known which rank is to blame; `Group.guard` finds out."""


class _Calls:
    so_far = 0
    issued = 0
    updates = 0


def calls_so_far() -> int:
    """How often this rank has communicated: another number once it has done so again."""
    return _Calls.so_far


def progress() -> tuple[int, int]:
    """How many collectives this rank has issued, and how many updates of its replicas it has begun and ended. Between
    two places of a step, ranks that have come equally far have counted equally many of both. Waits do not count: a
    rank waits for parameters, or for answers, whenever it needs them."""
    return _Calls.issued, _Calls.updates


def note_update() -> None:
    """Counts the beginning, or the end, of an update that every rank makes of its own replica."""
    _Calls.updates += 1


@contextlib.contextmanager
def may_fail(issues: bool = True) -> Iterator[None]:
    """Marks what fails within as a failure of communication, which no other error is then taken for. `issues`: whether
    a collective is issued within, rather than waited for."""
    _Calls.so_far += 1
    _Calls.issued += issues
    try:
        yield
    except RuntimeError as e:  # torch has no narrower class for what gloo raises
        raise CommunicationFailure(str(e)) from e


@may_fail()
def all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """The sum over ranks, in place."""
    assert x.is_contiguous(), _STRIDED
    with _below_autograd():
        return _functional.all_reduce_.default(x, "sum", group)  # type: ignore[no-any-return]


@may_fail(issues=False)
def wait(x: torch.Tensor) -> torch.Tensor:
    """Blocks until the collective that writes `x` is complete."""
    with _below_autograd():
        return _functional.wait_tensor.default(x)  # type: ignore[no-any-return]


@may_fail()
def reduce(x: torch.Tensor, owner: int, group: str) -> torch.Tensor:
    """The sum over ranks, in place, valid on rank `owner` of the group."""
    backend, pg = library(x, group)
    return registered(*backend.reduce(x, owner, pg))


def all_reduce_copy(x: torch.Tensor, group: str) -> torch.Tensor:
    """Starts the sum of a value that stays as it is here."""
    return all_reduce(x.clone(), group)


@may_fail()
def broadcast(x: torch.Tensor, owner: int, group: str) -> torch.Tensor:
    """Rank `owner`'s value, in place."""
    backend, pg = library(x, group)
    return registered(*backend.broadcast(x, owner, pg))


@may_fail()
def reduce_scatter(x: torch.Tensor, splits: Sequence[int], rank: int, group: str) -> torch.Tensor:
    """Sends part r of `x` to rank r. The result, once waited for, is what `sum_parts` takes: what came from each rank,
    [ranks, elements], or its sum, where it was added up on its way."""
    backend, pg = library(x, group)
    return registered(*backend.reduce_scatter(x, splits, rank, pg))


def reduce_scatter_equal(x: torch.Tensor, world_size: int, rank: int, group: str) -> torch.Tensor:
    """The same, in parts of one size."""
    return reduce_scatter(x, [x.numel() // world_size] * world_size, rank, group)


def sum_parts(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum, in `dtype`, of what `reduce_scatter` received, in rank order."""
    return x.to(dtype) if x.dim() == 1 else x.sum(0, dtype=dtype)


@may_fail()
def all_gather(x: torch.Tensor, splits: Sequence[int], rank: int, group: str) -> torch.Tensor:
    """Every rank's part, one after the other."""
    if not any(splits):
        return x
    backend, pg = library(x.reshape(-1), group)
    return registered(*backend.all_gather(x.reshape(-1), splits, rank, pg))


def all_gather_equal(x: torch.Tensor, world_size: int, group: str) -> torch.Tensor:
    """Every rank's value, flat, one after the other; all are as long as this rank's."""
    pg = _resolve_process_group(group)  # type: ignore[arg-type]
    return all_gather(x, [x.numel()] * world_size, pg.rank(), group)


@may_fail()
def all_to_all(
    x: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: str, large: bool = False
) -> torch.Tensor:
    """Sends the r-th part of `x`, `sent[r]` elements long, to rank r; what comes from rank r is `received[r]` long.
    `large` is the same on all ranks."""
    backend, pg = library(x, group)
    return registered(*backend.all_to_all(x, sent, received, pg, large))


@may_fail()
def server_reduce(x: torch.Tensor, adds_up: Sequence[int], mesh: str) -> torch.Tensor:
    """The sum over ranks, in place, with the help of servers. `adds_up`: elements that each rank and each server of
    the mesh adds up."""
    assert x.is_contiguous(), _STRIDED
    return registered(x, ServerSum(x, adds_up, mesh_named(mesh)).begin())


def library(x: torch.Tensor, group: str) -> tuple[Backend, Any]:
    """What carries a value of this device in a process group, and the group."""
    assert x.is_contiguous(), _STRIDED
    pg = _resolve_process_group(group)  # type: ignore[arg-type]
    return _backend_named(str(dist.get_backend_config(pg)), x.device.type), pg


@cache
def _backend_named(name: str, device: str) -> Backend:
    """By what a process group says of itself: a library, or one for each type of device, as in `cpu:gloo,cuda:nccl`."""
    of_devices = dict(part.split(":") for part in name.split(",") if ":" in part)
    return NCCL if of_devices.get(device, name) == NCCL.name else GLOO


def _below_autograd() -> contextlib.AbstractContextManager[Any]:
    """Where no gradient is asked for, skips what PyTorch's functional collectives do for gradients, in Python. On one
    rank that took 25 of the 40 us of an all-reduce and its wait. [Empirical, torch 2.13]"""
    if torch.is_grad_enabled():
        return contextlib.nullcontext()
    return torch._C._AutoDispatchBelowAutograd()


def registered(x: torch.Tensor, work: dist.Work | None) -> torch.Tensor:
    """A value that is being received: `wait` blocks until the work is done."""
    assert work is not None, "an asynchronous collective returns its work"
    torch._C._distributed_c10d._register_work(x, work)
    return x


def rank_in(group: str) -> int:
    """This process's rank in a process group."""
    return int(_resolve_process_group(group).rank())  # type: ignore[arg-type]
