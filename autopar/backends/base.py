"""What a communication library is to autopar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autopar.ir import compat

Begun = tuple[torch.Tensor, "dist.Work | None"]
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "reduce", "broadcast", "served_sum")


@dataclass(frozen=True)
class Backend:
    """A communication library: what it adds to, and takes from, the network; and how it is called.

    Methods return the value that is being received, and the work whose end it waits for. A subclass overrides those
    that the library has in another way.
    """

    name: str
    """Also the name of its channel in the timeline."""
    call_s: float
    """For a collective to begin, on all ranks."""
    hop_s: float
    """For a round of it, beside the latency of the links."""
    issue_s: float
    """On the compute stream, to hand a collective over."""
    fraction: dict[str, float]
    """Of the bandwidth of links that a collective reaches, by its name."""
    device_taken: float = 0.0
    """Part of an accelerator that a collective takes from the compute beside it."""
    chains: bool = False
    """Whether reduce and broadcast pass the message along a chain in pieces, so that all its links work at once."""
    host_bytes_per_s: float = float("inf")
    """Bytes, sent and received together, that one processor core moves for it."""
    host_threads: int = 1
    """Cores that it can use for one collective."""
    at_once: int = 1
    """Collectives of one process group that it runs at the same time; exchanges in rounds follow one another."""
    served_call_s: float = 0.0
    """For a sum that hosts which serve help to make to begin, beside `call_s`: they are told first what comes."""
    rounds: bool = False
    """Whether large exchanges among CPUs are left to messages of our own (`autopar.backends.exchange`)."""

    def reduce(self, x: torch.Tensor, owner: int, pg: Any) -> Begun:
        """The sum over ranks, in place, valid on rank `owner` of the group."""
        return x, dist.reduce(x, group_dst=owner, group=pg, async_op=True)

    def broadcast(self, x: torch.Tensor, owner: int, pg: Any) -> Begun:
        """Rank `owner`'s value, in place."""
        return x, dist.broadcast(x, group_src=owner, group=pg, async_op=True)

    def reduce_scatter(self, x: torch.Tensor, sizes: Sequence[int], rank: int, pg: Any) -> Begun:
        """Part r of the sum, for rank r: what came from each rank, [ranks, elements], or its sum, [elements]."""
        mine = sizes[rank]
        out = x.new_empty(len(sizes), mine)
        received = [mine] * len(sizes)
        return out, dist.all_to_all_single(out.view(-1), x, received, list(sizes), group=pg, async_op=True)

    def all_gather(self, x: torch.Tensor, sizes: Sequence[int], rank: int, pg: Any) -> Begun:
        """Every rank's part, one after the other."""
        out = x.new_empty(sum(sizes))
        if len(set(sizes)) == 1:
            return out, compat.all_gather_single(out, x, group=pg, async_op=True)
        sent = x.repeat(len(sizes))
        return out, dist.all_to_all_single(out, sent, list(sizes), [x.numel()] * len(sizes), group=pg, async_op=True)

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int], pg: Any) -> Begun:
        """The parts that are meant for this rank, one after the other."""
        out = x.new_empty(sum(received))
        return out, dist.all_to_all_single(out, x, list(received), list(sent), group=pg, async_op=True)
