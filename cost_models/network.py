"""What collectives take: the bytes on every link, and the latency of their rounds.

The flows are those that `autopar.ops` declares, of the algorithms that `autopar.backends` runs. Flows of one phase run
at the same time, so a link that several of them cross carries the sum, and the fullest link decides; phases follow one
another:

    time = call + rounds x (hop + latency of the longest path that it takes)
         + sum over phases of max over links of bytes / (fraction x bandwidth)

Links are directed: what a host's card sends does not get in the way of what it receives. Where the processors that
compute also move the bytes, a host moves no more than its cores can, over all its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autopar.backends.base import Backend
from autopar.backends.gloo import GLOO
from autopar.backends.nccl import NCCL
from autopar.cost_models.calibrated import Calibrated, host_bytes_per_s
from autopar.cost_models.compute import is_cpu
from autopar.cost_models.flows import ways_of
from autopar.cost_models.price import Transfer
from autopar.errors import PlanError, among
from autopar.ops.base import Call
from autopar.ops.collectives import collective_of, wire_bytes
from autopar.ops.links import Phase, Vector
from autopar.ops.subgroups import Subgroups, all_subgroups
from autopar.spec.calibration import Calibration
from autopar.spec.devices import CORE_FLOPS
from autopar.spec.topology import Topology
from autopar.spec.units import PROVENANCES, Provenance

Floats = npt.NDArray[np.float64]


def backend_of(topology: Topology) -> Backend:
    """The backend that all ranks have: NCCL among GPUs, else gloo."""
    return GLOO if any(is_cpu(place.device) for place in topology.ranks) else NCCL


@dataclass(frozen=True, slots=True)
class Host:
    """A machine whose processors move the bytes of its ranks."""

    ranks: tuple[int, ...]
    bytes_per_s: float
    """Bytes a second, sent and received together, that all of the host's ranks can move."""


class Network:
    """Prices collectives over all ranks of one topology. The work that depends on no message is done once."""

    def __init__(
        self,
        topology: Topology,
        backend: Backend | None = None,
        hosts: Sequence[Host] | None = None,
        calibration: Calibration | None = None,
        latency_s: float | None = None,
    ) -> None:
        """`hosts` are, by default, those of the topology that compute on processors, each with its ranks' cores. Where
        there is a `calibration`, it corrects what collectives take. `latency_s` is of all paths alike; by default, each
        has its links'."""
        self.backend = _as_measured(backend or backend_of(topology), calibration, topology.world_size)
        self.world_size = n = topology.world_size
        self._summing: list[int | str] = [*range(n), *topology.servers]
        """Who can add up, as the topology calls them."""
        self._channels: dict[tuple[Subgroups, int, bool], int] = {}
        """Numbers of channels, by the subgroups and the communicator, and by whether a server sums up."""
        self._ways, self._topology = ways_of(topology), topology
        self._latency_s = latency_s
        self.links, self.links_of_ranks = self._ways.links, self._ways.of_ranks
        """So many of the links, the first ones, lie between ranks; the others lead to hosts that serve."""
        self.bandwidth: Floats = np.array([link.bandwidth_bytes_per_s for link in self.links])
        self._cores = np.array(
            [p.device.flops_per_s().value / CORE_FLOPS if is_cpu(p.device) else 0.0 for p in topology.ranks]
        )
        self.hosts = self._with_cores() if hosts is None else tuple(hosts)
        self.provenance: Provenance = max(
            (link.provenance for link in self.links), key=PROVENANCES.index, default="measured"
        )
        self._calibration = calibration
        self._crowded = 1.0
        """How much longer compute takes on a core that other ranks' compute keeps busy, too. What a transfer takes of
        such a core was measured while they waited, and takes as much longer beside them."""
        if calibration is not None:
            self.provenance = "measured"
            self._crowded = max(1.0, calibration.compute_at_once or 1.0)

    def _with_cores(self) -> tuple[Host, ...]:
        ranks: dict[str, list[int]] = {}
        for rank, place in enumerate(self._topology.ranks):
            if self._cores[rank]:
                ranks.setdefault(place.host.name, []).append(rank)
        return tuple(Host(tuple(r), self.backend.host_bytes_per_s * self._cores[r].sum()) for r in ranks.values())

    @property
    def chains(self) -> bool:
        return self.backend.chains

    @property
    def sums(self) -> bool:
        return self.backend.sums

    def ring(self, subgroups: Subgroups, sent: Vector) -> Vector:
        return self._ways.ring(subgroups)(sent)

    def from_each(self, subgroups: Subgroups, sent: Vector) -> Vector:
        return self._ways.from_each(subgroups)(sent)

    def to_each(self, subgroups: Subgroups, received: Vector) -> Vector:
        return self._ways.to_each(subgroups)(received)

    def along(self, ways: Sequence[tuple[int, int, float]]) -> Vector:
        traffic = np.zeros(len(self.links))
        for a, b, size in ways:
            for link in self._ways.between(self._summing[a], self._summing[b]):
                traffic[link] += size
        return traffic

    def phases(self, call: Call) -> list[Phase]:
        """Bytes on each of `links`, for the parts of a collective that follow one another; and the name of the
        collective whose fraction of the bandwidth each part reaches."""
        found = collective_of(call).phases(call, self)
        for name, _ in found:
            if name not in self.backend.fraction:
                raise PlanError(
                    f"the phases of '{call.op.name}' name '{name}', expected the collective whose share of the "
                    f"bandwidth they reach{among(name, self.backend.fraction)}"
                )
        return found

    def link_bytes(self, call: Call) -> Floats:
        """Bytes that a collective puts on each of `links`, over all its parts."""
        return np.asarray(sum(traffic for _, traffic in self.phases(call)))

    def transfer(self, call: Call) -> Transfer:
        """The transfer that a collective's call makes: its seconds, bytes and loads, and what it takes of compute."""
        computed, processor_s = self._computed(call)
        if self._calibrated is None:
            return replace(computed, taken=self._taken(processor_s, computed.seconds))
        wire_s = computed.seconds * float(computed.loads[: len(self.links)].max(initial=0.0))
        seconds = self._calibrated.seconds(call, computed.seconds, wire_s)
        loads = self._calibrated.loads(computed.loads, seconds / computed.seconds)
        times = self._calibrated.processor_times(call, float(processor_s.mean()))
        core_wait_s = self._calibrated.core_wait_s(call) if self._cores.any() else 0.0
        taken = self._taken(self._crowded * times * processor_s, seconds + core_wait_s)
        return replace(computed, seconds=seconds, loads=loads, taken=taken, core_wait_s=core_wait_s)

    @cached_property
    def _calibrated(self) -> Calibrated | None:
        if self._calibration is None:
            return None
        return Calibrated(
            self._calibration,
            self.world_size,
            self._computed_s,
            self.bandwidth.tolist(),
            self._ways.between,
        )

    def _computed_s(self, call: Call) -> tuple[float, float]:
        computed, processor_s = self._computed(call)
        return computed.seconds, float(processor_s.mean())

    def _computed(self, call: Call) -> tuple[Transfer, Floats]:
        """The transfer by the figures of the cluster and of the backend, with `taken` left empty; and, by rank, the
        seconds of one processor core that the transfer takes."""
        op, n, backend = collective_of(call), self.world_size, self.backend
        sent, received = wire_bytes(call, n)
        phases = self.phases(call)
        wire_s = sum(float(np.max(traffic / self.bandwidth)) / backend.fraction[kind] for kind, traffic in phases)
        moved: Floats = np.array(sent, dtype=float) + np.array(received)
        host_s: Floats = moved / backend.host_bytes_per_s
        # A collective cannot be faster than the library's own threads move its bytes, nor than all the host's cores.
        hosts_s = [float(moved[list(host.ranks)].sum()) / host.bytes_per_s for host in self.hosts]
        size = max(map(len, all_subgroups(op.subgroups, n)))
        rounds = op.rounds(size, len(phases), backend.chains)
        pieces = op.pieces(call)
        latency_s = self._latency_s
        if latency_s is None:
            latency_s = self._ways.latency_s(op.subgroups, served=pieces > 0)
        start_s = backend.call_s + rounds * (backend.hop_s + latency_s)
        if pieces:  # the last piece's sum comes back when all parts have gone
            start_s += backend.served_call_s + wire_s / pieces
        seconds = start_s + max(wire_s, float(host_s.max()) / backend.host_threads, *hosts_s, 0.0)
        links_s: Floats = np.asarray(sum(x / self.bandwidth / backend.fraction[kind] for kind, x in phases))
        loads: Floats = np.append(links_s, hosts_s) / seconds
        in_rounds = op.in_rounds(call)
        processor_s = host_s / backend.host_lead.get(op.name, 1.0)
        processor_s += rounds * backend.round_processor_s + in_rounds * backend.exchange_processor_s
        connection = op.subgroups, call.communicator, pieces > 0
        transfer = Transfer(
            seconds,
            (),
            np.array([sent, received], np.int64),
            loads,
            connection=wire_s / seconds if backend.two_alternate and size == 2 and not pieces else 0.0,
            channel=self._channels.setdefault(connection, len(self._channels)),
            communicator=call.communicator,
            at_once=1 if in_rounds else backend.at_once,
            in_turn=size > 2,
        )
        return transfer, processor_s

    def _taken(self, processor_s: Floats, seconds: float) -> tuple[float, ...]:
        """A CPU rank runs the collective on the cores that it computes on: all of it is lost where it has but one."""
        if not self._cores.any():
            return (self.backend.device_taken,) * self.world_size if self.backend.device_taken else ()
        cores = np.where(self._cores > 0, np.maximum(self._cores, 1e-9), np.inf)
        return tuple(float(x) for x in np.minimum(1.0, processor_s / seconds / cores))


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
