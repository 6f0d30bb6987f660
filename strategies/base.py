"""What a strategy is, and what it is told.

A strategy is one file. It is asked, in this order:

1. `applies(parameter, context)`: can this parameter use it here? `None` for yes, else the reason why not.
2. `options(context)`: which of its settings are worth pricing?
3. `lower(group, emit)`: once per sync group of a plan that names it. It emits primitives; nothing else. The
   cost model prices these primitives, and the runtime writes the same ones into the FX graph.

A strategy never sees a tensor, and neither the cost models nor the runtime know any strategy by name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict

from autopar.ir.training_graph import Parameter, Parts
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import Fidelity, ParameterSlice, SyncGroup
from autopar.spec.topology import Topology

if TYPE_CHECKING:
    from autopar.strategies.emitter import Emitter

ALIKE = 1.05
"""Rates whose greatest is at most so many times the smallest are taken as equal."""

WireDtype = Literal["same", "float32", "bfloat16", "float16"]


def _not_negative(shares: tuple[float, ...]) -> tuple[float, ...]:
    if shares and (min(shares) < 0 or sum(shares) <= 0):
        raise ValueError(f"shares must not be negative and must not all be 0, got {shares}")
    return shares


Shares = Annotated[tuple[float, ...], AfterValidator(_not_negative)]
"""Parts of a whole, in any unit; empty where that is left open."""


class Options(BaseModel):
    """The settings of a strategy: subclass it with fields and their docstrings. Unknown settings are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True, slots=True)
class Server:
    """A host that only serves."""

    name: str
    rate: float
    """What it can send to the ranks, and receive from them, in units of what the fastest rank can."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a strategy may depend on, besides the parameter."""

    world_size: int
    has_optimizer: bool = True
    """False: the program leaves synchronized gradients on every rank, and updates nothing."""
    elementwise_update: bool = True
    """Whether the optimizer updates each element from that element's gradient and state alone, so that it can
    run on slices."""
    clips: bool = False
    """Whether gradients are clipped by their global norm before the update."""
    hosts: tuple[int, ...] = ()
    """On which host each rank is; empty where every rank has one of its own."""
    rates: tuple[float, ...] = ()
    """What each rank can send to other hosts, and receive from them, in bytes a second; empty where all can the same,
    or nothing is known."""
    servers: tuple[Server, ...] = ()
    """Hosts that only serve, in the cluster's order."""
    late_parameters: bool = False
    """Whether updated parameters may still be on their way between one step and the next."""
    sparse_update: bool = False
    """Whether the optimizer leaves an element alone whose gradient is zero, and can be given the others only."""

    @property
    def keeps_rows_together(self) -> str | None:
        """Why rows of one parameter cannot be updated on different ranks; `None` where they can."""
        if not self.has_optimizer:
            return "the program needs the optimizer"
        if not self.elementwise_update:
            return "the optimizer's update is not elementwise, so it cannot run on some of the rows"
        return None

    def on(self, cluster: ClusterSpec) -> Context:
        """The same on the hosts of a cluster."""
        places = cluster.ranks
        names = list(dict.fromkeys(p.host.name for p in places))
        hosts = tuple(names.index(p.host.name) for p in places)
        topology = Topology(cluster)
        rates = _rates(topology, hosts)
        fastest = max(rates, default=0.0)
        alike = fastest <= ALIKE * min(rates, default=0.0)
        servers = tuple(Server(s, _card(topology, s) / fastest) for s in topology.servers) if fastest else ()
        return replace(self, hosts=hosts, rates=() if alike else rates, servers=servers)


def _rates(topology: Topology, hosts: Sequence[int]) -> tuple[float, ...]:
    """What each rank can send to other hosts and receive from them: by the best way there and back, the slower
    direction, divided by the ranks that share the host's card. Where all ranks are on one host, the others serve."""
    first = {host: hosts.index(host) for host in hosts}
    shares = {}
    for host, a in first.items():
        others: Sequence[int | str] = [b for b in first.values() if b != a] or topology.servers
        ways = [(topology.bandwidth_bytes_per_s(a, b), topology.bandwidth_bytes_per_s(b, a)) for b in others]
        shares[host] = max(map(min, ways), default=0.0) / hosts.count(host)
    return tuple(shares[host] for host in hosts)


def _card(topology: Topology, server: str) -> float:
    """What a host that serves can send to all ranks together and receive from them, the slower of the two."""
    sent = max(topology.path(server, rank)[0].bandwidth_bytes_per_s for rank in range(topology.world_size))
    received = max(topology.path(rank, server)[-1].bandwidth_bytes_per_s for rank in range(topology.world_size))
    return min(sent, received)


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter, or a slice of one, in a sync group."""

    slice: ParameterSlice
    parameter: Parameter

    @property
    def shape(self) -> tuple[int, ...]:
        return self.slice.shape(self.parameter.spec)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def parts(self) -> Parts:
        """What the gradient is made of; only for a strategy that has asked for it in `applies`."""
        assert self.parameter.parts is not None and self.slice.whole, f"the gradient of '{self.slice}' has no parts"
        return self.parameter.parts

    @property
    def contiguous(self) -> bool:
        """Whether its elements lie together in the parameter's memory."""
        return self.slice.whole or self.slice.dim == 0


@dataclass(frozen=True)
class Group:
    """A sync group of a plan, with its parameters looked up in the training graph."""

    index: int
    spec: SyncGroup
    members: tuple[Member, ...]

    @cached_property
    def elements(self) -> int:
        return sum(m.elements for m in self.members)

    @property
    def dtype(self) -> str:
        return self.members[0].parameter.spec.dtype

    @cached_property
    def ready(self) -> int:
        """Position in the graph's compute at which the last of the group's gradients is complete."""
        return max(m.parameter.ready for m in self.members)

    @property
    def first_use(self) -> int:
        """Position of the first node in the graph's compute that reads one of the parameters."""
        return min(m.parameter.first_use for m in self.members)

    @property
    def known(self) -> int:
        """Position at which the number of rows of all its parts is known."""
        return max(m.parts.known for m in self.members)


class Strategy(ABC):
    """One way to synchronize a group of parameters. Subclass it in a file of its own and list it in `__init__`."""

    name: ClassVar[str]
    """How plans name it."""
    summary: ClassVar[str]
    """One line for people."""
    options_type: ClassVar[type[Options]] = Options
    """Its settings."""
    spreads: ClassVar[bool] = False
    """Whether parameters live on one rank each between steps, so that the model cannot run by itself then."""

    def fidelity(self, options: Options) -> Fidelity:
        """What the strategy promises with these options."""
        return "exact" if getattr(options, "wire", "same") == "same" else "rounded"

    def applies(self, member: Member, context: Context) -> str | None:
        """`None` where the parameter can use this strategy, else the reason why not."""
        return None

    @abstractmethod
    def options(self, context: Context) -> Sequence[Options]:
        """The settings worth pricing, the plainest first."""

    @abstractmethod
    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        """Emits what the strategy does for one group: from `emit.pack` to `emit.update` or `emit.store`."""
