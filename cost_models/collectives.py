"""What collectives take: the bytes on every link, and the latency of their rounds.

The flows are those of the algorithms that `runtime.collectives` runs; `ir.primitives.wire_bytes` says what they sum up
to for each rank. Flows of one phase run at the same time, so a link that several of them cross carries the sum, and
the fullest link decides; phases follow one another:

    time = call + rounds x (hop + latency of the longest path)
         + sum over phases of max over links of bytes / (fraction x bandwidth)

Links are directed: what a host's card sends does not get in the way of what it receives. Where the processors that
compute also move the bytes, a host moves no more than its cores can, over all its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations

import numpy as np
import numpy.typing as npt

from autopar.cost_models.calibrated import Calibrated, host_bytes_per_s
from autopar.cost_models.compute import is_cpu
from autopar.cost_models.exchanges import goes_around, in_rounds, parts
from autopar.cost_models.price import Transfer
from autopar.ir.primitives import (
    COLLECTIVES,
    DTYPE_BYTES,
    Kind,
    Primitive,
    Teams,
    all_teams,
    broadcast_children,
    ring_reduce_bytes,
    served_pieces,
    wire_bytes,
)
from autopar.spec.calibration import Calibration
from autopar.spec.devices import CORE_FLOPS
from autopar.spec.topology import Link, Topology
from autopar.spec.units import PROVENANCES, Provenance

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Backend:
    """What a communication library adds to, and takes from, the network."""

    name: str
    """Also the name of its channel in the timeline."""
    call_s: float
    """For a collective to begin, on all ranks."""
    hop_s: float
    """For a round of it, beside the latency of the links."""
    issue_s: float
    """On the compute stream, to hand a collective over."""
    fraction: dict[Kind, float]
    """Of the bandwidth of links that a kind of collective reaches."""
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


GLOO = Backend(
    "gloo",
    # An all-reduce of 4 bytes takes 0.1 to 0.4 ms over 2 to 4 ranks of one machine, torch 2.13. [Empirical]
    call_s=60e-6,
    hop_s=20e-6,
    issue_s=100e-6,
    # Four hosts, each with 0.2 or 1 Gbit/s, messages from 1 MB, torch 2.13. [Empirical] All-reduce: 0.955 of the line
    # rate; all-gather, and the rounds that a reduce-scatter is made of, 0.92; an all-to-all 0.56, as all senders meet
    # at a receiver.
    fraction={
        Kind.ALL_REDUCE: 0.955,
        Kind.ALL_GATHER: 0.92,
        Kind.REDUCE_SCATTER: 0.92,
        Kind.ALL_TO_ALL: 0.56,
        Kind.REDUCE: 0.955,
        Kind.BROADCAST: 0.955,
        Kind.SERVED_SUM: 0.92,
    },
    # Sockets of one machine, copied in and out of the kernel and added up. [Empirical, of the right order]
    host_bytes_per_s=2e9,
    # The thread that runs the collective, and the one that reads and writes the sockets.
    host_threads=2,
    # The threads of a process group, unless its options say otherwise (ProcessGroupGloo, torch 2.13).
    at_once=2,
    # What 1 to 64 MiB over four hosts and two servers take longer than their bytes. [Empirical]
    served_call_s=3e-3,
)

NCCL = Backend(
    "nccl",
    # Ring, simple protocol: 8.4 us, and 2.7 to 14 us a step over a network (NCCL 2.x, src/graph/tuning.cc).
    call_s=8.4e-6,
    hop_s=3e-6,
    issue_s=10e-6,
    # NCCL's own model takes 0.92 of the bus for its LL128 protocol; its reduce and broadcast are a single ring.
    fraction=dict.fromkeys(COLLECTIVES, 0.92),
    # Compute beside a collective takes 1.1256 times as long on A100 (Galvatron's shipped overlap coefficient).
    device_taken=1 - 1 / 1.1256,
    chains=True,
)


def backend_of(topology: Topology) -> Backend:
    """The backend that all ranks have: NCCL among GPUs, else gloo."""
    return GLOO if any(is_cpu(place.device) for place in topology.ranks) else NCCL


@dataclass(frozen=True, slots=True)
class Host:
    """A machine whose processors move the bytes of its ranks."""

    ranks: tuple[int, ...]
    bytes_per_s: float
    """Sent and received together, by all its ranks."""


@dataclass(frozen=True, slots=True)
class _Flows:
    """Traffic on each link, linear in one vector over ranks: [link, rank]."""

    ring: Floats
    """Of what each rank sends on to the next one of its team."""
    from_each: Floats
    """Of what each rank sends to every other one of its team."""
    to_each: Floats
    """Of what each rank receives from every other one of its team."""


class Network:
    """Prices collectives over all ranks of one topology. The work that depends on no message is done once."""

    def __init__(
        self,
        topology: Topology,
        backend: Backend | None = None,
        hosts: Sequence[Host] | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        """`hosts` are, by default, those of the topology that compute on processors, each with its ranks' cores. Where
        there is a `calibration`, it corrects what collectives take."""
        self.backend = _as_measured(backend or backend_of(topology), calibration, topology.world_size)
        self.world_size = n = topology.world_size
        index: dict[str, int] = {}
        found: list[Link] = []
        self.latency_s = 0.0
        """Of the longest path."""
        self._summing: list[int | str] = [*range(n), *topology.servers]
        """Who can add up, as the topology calls them."""
        self.links_of_ranks = 0
        """So many of the links, the first ones, lie between ranks; the others lead to hosts that serve."""
        served = [way for r in range(n) for s in topology.servers for way in ((r, s), (s, r))]
        for ways in (permutations(range(n), 2), served):
            for a, b in ways:
                path = topology.path(a, b)
                self.latency_s = max(self.latency_s, sum(link.latency_s for link in path))
                for link in path:
                    if link.id not in index:
                        index[link.id] = len(found)
                        found.append(link)
            self.links_of_ranks = self.links_of_ranks or len(found)
        self.links = tuple(found)
        self._index, self._topology = index, topology
        self.bandwidth: Floats = np.array([link.bandwidth_bytes_per_s for link in found])
        self._known: dict[Teams, _Flows] = {}
        self._cores = np.array(
            [p.device.flops_per_s().value / CORE_FLOPS if is_cpu(p.device) else 0.0 for p in topology.ranks]
        )
        self.hosts = self._with_cores() if hosts is None else tuple(hosts)
        self.provenance: Provenance = max(
            (link.provenance for link in found), key=PROVENANCES.index, default="measured"
        )
        self._calibration = calibration
        if calibration is not None:
            self.provenance = "measured"

    def _with_cores(self) -> tuple[Host, ...]:
        ranks: dict[str, list[int]] = {}
        for rank, place in enumerate(self._topology.ranks):
            if self._cores[rank]:
                ranks.setdefault(place.host.name, []).append(rank)
        return tuple(Host(tuple(r), self.backend.host_bytes_per_s * self._cores[r].sum()) for r in ranks.values())

    def _flows(self, teams: Teams) -> _Flows:
        """What depends on no message; once for each choice of teams."""
        if teams not in self._known:
            shape = (len(self.links), self.world_size)
            flows = _Flows(np.zeros(shape), np.zeros(shape), np.zeros(shape))
            for team in all_teams(teams, self.world_size):
                for i, a in enumerate(team):
                    for b in team:
                        for link in self._path(a, b) if a != b else ():
                            flows.from_each[link, a] += 1
                            flows.to_each[link, b] += 1
                            if b == team[(i + 1) % len(team)]:
                                flows.ring[link, a] += 1
            self._known[teams] = flows
        return self._known[teams]

    def phases(self, primitive: Primitive) -> list[tuple[Kind, Floats]]:
        """Bytes on each of `links`, for the parts of a collective that follow one another; and the kind of collective
        whose fraction of the bandwidth each part reaches."""
        kind, size = primitive.kind, primitive.bytes
        if kind is Kind.REDUCE:
            return self._reduce(primitive.owner or 0, size)
        if kind is Kind.BROADCAST:
            return self._broadcast(primitive.owner or 0, size)
        if kind is Kind.SERVED_SUM:
            return self._served_sum(primitive)
        n, flows = self.world_size, self._flows(primitive.teams)
        held: Floats = np.array([primitive.held_elements(r) for r in range(n)], float) * DTYPE_BYTES[primitive.dtype]
        others: Floats = np.array([len(primitive.team_of(r, n)) - 1 for r in range(n)], float)
        if kind is Kind.ALL_REDUCE:
            return [(kind, np.asarray(flows.ring @ (2 * others / (others + 1) * held)))]
        if kind is Kind.ALL_TO_ALL:
            return [(kind, np.asarray(flows.from_each @ (held / (others + 1))))]
        if not is_ring(primitive, n, self.backend):
            flow = flows.to_each if kind is Kind.REDUCE_SCATTER else flows.from_each
            return [(Kind.REDUCE_SCATTER, np.asarray(flow @ held))]
        return [(kind, np.asarray(flows.ring @ (others * held)))]

    def _around(self, sent: Floats) -> Floats:
        """Rank r sends `sent[r]` to rank r+1."""
        return np.asarray(self._flows(()).ring @ sent)

    def _reduce(self, owner: int, size: int) -> list[tuple[Kind, Floats]]:
        n = self.world_size
        if self.backend.chains:
            return [(Kind.REDUCE, self._around(_all_but(owner, n, size)))]
        # A ring's reduce-scatter, then everyone's part to the owner (gloo/reduce.cc). Senders do not meet there as they
        # do in an all-to-all. [Empirical: four hosts at 0.4 and 1.5 Gbit/s, 1 to 64 MiB]
        parts = np.zeros(n)
        parts[owner] = size / n
        scattered = self._around(np.full(n, float(ring_reduce_bytes(size, n))))
        return [(Kind.REDUCE, scattered), (Kind.REDUCE, np.asarray(self._flows(()).to_each @ parts))]

    def _broadcast(self, owner: int, size: int) -> list[tuple[Kind, Floats]]:
        n = self.world_size
        if self.backend.chains:
            return [(Kind.BROADCAST, self._around(_all_but((owner - 1) % n, n, size)))]
        # A binomial tree; a rank that has received the whole message sends it to all its children at once.
        found, level = [], [0]
        while level:
            traffic = np.zeros(len(self.links))
            below = []
            for parent in level:
                for child in broadcast_children(parent, n):
                    a, b = (parent + owner) % n, (child + owner) % n
                    for i in self._path(a, b):
                        traffic[i] += size
                    below.append(child)
            if below:
                found.append((Kind.BROADCAST, traffic))
            level = below
        return found

    def _served_sum(self, primitive: Primitive) -> list[tuple[Kind, Floats]]:
        """Parts on their way to who adds them up, and sums on their way back, at the same time."""
        traffic = np.zeros(len(self.links))
        for summing, elements in zip(self._summing, primitive.summed_by, strict=True):
            for rank in range(self.world_size) if elements else ():
                for link in (*self._path(rank, summing), *self._path(summing, rank)):
                    traffic[link] += elements * DTYPE_BYTES[primitive.dtype]
        return [(Kind.SERVED_SUM, traffic)]

    def _path(self, a: int | str, b: int | str) -> list[int]:
        return [self._index[link.id] for link in self._topology.path(a, b)]

    def link_bytes(self, primitive: Primitive) -> Floats:
        """Bytes on each of `links` that a collective puts there in all."""
        return np.asarray(sum(traffic for _, traffic in self.phases(primitive)))

    def transfer(self, primitive: Primitive) -> Transfer:
        """The price of a collective."""
        computed = self._computed(primitive)
        if self._calibrated is None or self.world_size == 1:
            return computed
        wire_s = computed.seconds * max(computed.loads[: len(self.links)], default=0.0)
        seconds = self._calibrated.seconds(primitive, computed.seconds, wire_s)
        loads = self._calibrated.loads(computed.loads, seconds / computed.seconds)
        return replace(computed, seconds=seconds, loads=loads)

    @cached_property
    def _calibrated(self) -> Calibrated | None:
        if self._calibration is None:
            return None
        return Calibrated(
            self._calibration, self.world_size, lambda p: self._computed(p).seconds, self.bandwidth.tolist(), self._path
        )

    def _computed(self, primitive: Primitive) -> Transfer:
        """By the figures of the cluster and of the backend."""
        sent, received = wire_bytes(primitive, self.world_size)
        if self.world_size == 1:
            return Transfer(0.0, (), tuple(sent), tuple(received))
        backend = self.backend
        phases = self.phases(primitive)
        wire_s = sum(float(np.max(traffic / self.bandwidth)) / backend.fraction[kind] for kind, traffic in phases)
        moved: Floats = np.array(sent, dtype=float) + np.array(received)
        host_s: Floats = moved / backend.host_bytes_per_s
        # A collective cannot be faster than the library's own threads move its bytes, nor than all the host's cores.
        hosts_s = [float(moved[list(host.ranks)].sum()) / host.bytes_per_s for host in self.hosts]
        size = max(len(primitive.team_of(r, self.world_size)) for r in range(self.world_size))
        rounds = self._rounds(primitive.kind, size, len(phases))
        start_s = backend.call_s + rounds * (backend.hop_s + self.latency_s)
        if primitive.kind is Kind.SERVED_SUM:  # the last piece's sum comes back when all parts have gone
            start_s += backend.served_call_s + wire_s / served_pieces(primitive.bytes)
        seconds = start_s + max(wire_s, float(host_s.max()) / backend.host_threads, *hosts_s, 0.0)
        links_s: Floats = np.asarray(sum(x / self.bandwidth / backend.fraction[kind] for kind, x in phases))
        loads = tuple((np.append(links_s, hosts_s) / seconds).tolist())
        at_once = 1 if in_rounds(primitive) else backend.at_once
        return Transfer(seconds, self._taken(host_s, seconds), tuple(sent), tuple(received), loads, at_once)

    def _rounds(self, kind: Kind, team: int, phases: int) -> int:
        """Messages that follow one another, in a team of so many ranks."""
        if kind is Kind.ALL_REDUCE:
            return 2 * (team - 1)
        if kind is Kind.BROADCAST and not self.backend.chains:
            return phases
        return team - 1 + (phases - 1)

    def _taken(self, host_s: Floats, seconds: float) -> tuple[float, ...]:
        """A CPU rank moves the bytes on the cores that it computes on: all of it is lost where it has but one."""
        if not self._cores.any():
            return (self.backend.device_taken,) * self.world_size if self.backend.device_taken else ()
        cores = np.where(self._cores > 0, np.maximum(self._cores, 1e-9), np.inf)
        return tuple(float(x) for x in np.minimum(1.0, host_s / seconds / cores))


def _as_measured(backend: Backend, calibration: Calibration | None, world_size: int) -> Backend:
    """What a backend takes from the compute beside it, as it was measured."""
    if calibration is None:
        return backend
    moved = host_bytes_per_s(calibration, world_size)
    if moved is not None and backend.host_bytes_per_s < float("inf"):
        backend = replace(backend, host_bytes_per_s=moved)
    if calibration.compute_beside is not None and backend.device_taken:
        backend = replace(backend, device_taken=max(0.0, 1 - 1 / calibration.compute_beside))
    return backend


def is_ring(primitive: Primitive, world_size: int, backend: Backend) -> bool:
    """Whether ranks send on to the next one what they gather or add up, and not from each to each."""
    if not backend.chains and in_rounds(primitive):
        return goes_around(primitive, world_size)
    return primitive.kind is Kind.ALL_GATHER and all(len(set(each)) == 1 for each in parts(primitive, world_size))


def _all_but(last: int, n: int, size: int) -> Floats:
    """What each rank sends along a chain that ends with `last`."""
    sent = np.full(n, float(size))
    sent[last] = 0.0
    return sent
