"""Summation servers: hosts that only serve add the gradients up, and every rank updates its replica.

A rank sends the bucket of S bytes once and receives it once, where a ring takes 2 (n-1)/n S each way: a third less at
four ranks, half at many. What servers cannot carry, ranks add up themselves: with a share s of the bucket on each, a
rank sends and receives (1 + (n-2) s) S, and a server that adds up s does n s S; so every mixture between servers alone
(s = 0) and the ring's bytes (s = 1/n) is one strategy (Jiang et al., "A Unified Architecture for Accelerating
Distributed DNN Training in Heterogeneous GPU/CPU Clusters", OSDI 2020). Servers hold no state: the optimizer stays on
the devices, so any optimizer and any clipping goes.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import PlanError
from autopar.ir.dtypes import WireDtype
from autopar.ops.context import Context
from autopar.ops.group import Group, Member
from autopar.ops.shares import split_by_share
from autopar.strategies.base import Options, Shares, Strategy
from autopar.strategies.emitter import Emitter


class SummationServersOptions(Options):
    adds_up: Shares = ()
    """How much of the bucket each rank adds up, and behind the ranks each host that serves, in any unit; empty for
    what the rates of their links balance."""
    wire: WireDtype = "same"
    """Number format on the wire; anything but `same` rounds the gradients, which the plan must allow."""


class SummationServers(Strategy):
    name = "summation_servers"
    summary = "hosts that serve add the bucket up, with the ranks' help; every rank updates its replica"
    options_type = SummationServersOptions

    def applies(self, member: Member, context: Context) -> str | None:
        if member.parameter.spec.dtype.startswith("complex"):
            return "its numbers are complex, and hosts that serve add up real ones"
        return None if context.servers else "no host of the cluster only serves"

    def options(self, context: Context) -> Sequence[SummationServersOptions]:
        return [SummationServersOptions(wire=w) for w in ("same", "bfloat16") if context.servers]

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        assert isinstance(options, SummationServersOptions)
        context = emit.context
        rates = context.rates or (1.0,) * context.world_size
        shares = options.adds_up or balanced(rates, [server.rate for server in context.servers])
        if len(shares) != context.world_size + len(context.servers):
            raise PlanError(
                f"group {group.index}: {self.name} has {len(shares)} shares in adds_up, for {context.world_size} ranks "
                f"and {len(context.servers)} hosts that serve"
            )
        bucket = emit.pack(group, options.wire)
        summed = emit.server_reduce(bucket, split_by_share(group.elements, shares))
        emit.update(emit.wait(summed), group)


def balanced(rates: Sequence[float], servers: Sequence[float]) -> tuple[float, ...]:
    """How much each rank and each server shall add up, of 1 in all, so that the slowest is done as early as can be.

    `rates` of the ranks, in any unit; `servers`, in units of the fastest of them. A rank has at least the whole bucket
    to send, so no sum takes less than the slowest rank's; servers that could add up everything by then do, and ranks
    nothing. Else all are done at one time, found by halving.
    """
    n, fastest = len(rates), max(rates)
    ranks = [r / fastest for r in rates]

    def shares(done: float) -> list[float]:
        own = [max(0.0, done * r - 1) / (n - 2) if n > 2 else done * r / n for r in ranks]
        return [*own, *(done * s / n for s in servers)]

    early, late = 1 / min(ranks), float(2 * n)
    if n > 2 and sum(shares(early)[n:]) >= 1:
        return tuple(round(s, 4) for s in (*([0.0] * n), *(x / sum(servers) for x in servers)))
    for _ in range(60):
        middle = (early + late) / 2
        early, late = (early, middle) if sum(shares(middle)) >= 1 else (middle, late)
    found = shares(late)
    return tuple(round(s / sum(found), 4) for s in found)
