"""What a communication library is to autopar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
    """The library's name, and that of its channel in the timeline: `gloo`."""
    call_s: float
    """Seconds until a collective begins, once all ranks have issued it."""
    hop_s: float
    """Seconds for each round of a collective, beside the latency of the links."""
    issue_s: float
    """Seconds on a rank's compute stream to issue a collective."""
    fraction: dict[str, float]
    """By the name of a collective, the fraction of the links' bandwidth that it reaches."""
    device_taken: float = 0.0
    """The fraction of an accelerator, 0 to 1, that a collective takes from the compute beside it."""
    chains: bool = False
    """Whether reduce and broadcast pass the message along a chain in pieces, so that all its links work at once."""
    sums: bool = False
    """Whether its own reduce-scatter adds up equal parts on their way around a ring, but for narrow numbers, which
    would be rounded each time."""
    host_bytes_per_s: float = float("inf")
    """Bytes a second, sent and received together, that one processor core moves."""
    host_lead: dict[str, float] = field(default_factory=dict)
    """By the name of a collective: bytes a second that one core moves in it, in multiples of `host_bytes_per_s`. A
    collective that is not named moves `host_bytes_per_s`."""
    round_processor_s: float = 0.0
    """Seconds of a rank's processor, beside those of the bytes, for each round of a collective."""
    exchange_processor_s: float = 0.0
    """Seconds of a rank's processor for each exchange that autopar makes of own messages (`rounds`), beside those of
    the exchange's bytes and rounds."""
    host_threads: int = 1
    """Processor cores of a host that one collective can use."""
    at_once: int = 1
    """Collectives of one process group that run at the same time; exchanges in rounds follow one another."""
    two_alternate: bool = False
    """Whether two ranks alone send in one direction at a time, where several of their collectives are in flight."""
    served_call_s: float = 0.0
    """Seconds until a sum with serving hosts begins, beside `call_s`: they are told first what comes."""
    rounds: bool = False
    """Whether large exchanges among CPUs are left to messages of our own (`autopar.backends.exchange`)."""

    def reduce(self, x: torch.Tensor, owner: int, pg: Any) -> Begun:
        """Begins to sum a tensor over ranks, in place; the sum is valid on rank `owner` of the group alone."""
        return x, dist.reduce(x, group_dst=owner, group=pg, async_op=True)

    def broadcast(self, x: torch.Tensor, owner: int, pg: Any) -> Begun:
        """Begins to send rank `owner`'s tensor to all ranks, in place."""
        return x, dist.broadcast(x, group_src=owner, group=pg, async_op=True)

    def reduce_scatter(self, x: torch.Tensor, sizes: Sequence[int], rank: int, pg: Any) -> Begun:
        """Part r of the sum, for rank r: what came from each rank, [ranks, elements], or its sum, [elements]."""
        mine = sizes[rank]
        out = x.new_empty(len(sizes), mine)
        received = [mine] * len(sizes)
        return out, dist.all_to_all_single(out.view(-1), x, received, list(sizes), group=pg, async_op=True)

    def all_gather(self, x: torch.Tensor, sizes: Sequence[int], rank: int, pg: Any) -> Begun:
        """Begins to gather every rank's part of a flat value, in the order of ranks."""
        out = x.new_empty(sum(sizes))
        if len(set(sizes)) == 1:
            return out, compat.all_gather_single(out, x, group=pg, async_op=True)
        sent = x.repeat(len(sizes))
        return out, dist.all_to_all_single(out, sent, list(sizes), [x.numel()] * len(sizes), group=pg, async_op=True)

    def all_to_all(
        self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int], pg: Any, large: bool = False
    ) -> Begun:
        """Begins to exchange parts between all ranks; receives those for this rank, in the order of ranks. `large`:
        what all ranks say alike of their parts; sizes that the batch decides may differ from rank to rank."""
        out = x.new_empty(sum(received))
        return out, dist.all_to_all_single(out, x, list(received), list(sent), group=pg, async_op=True)
