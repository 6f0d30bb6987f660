"""Circumstances under which a plan is looked at again: another bandwidth, another batch, another number of hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from pydantic import ValidationError

from autopar.errors import ClusterSpecError
from autopar.formatting import number_of
from autopar.ir.scaled_batch import ASSUMPTION, scaled, why_not
from autopar.ir.training_graph import TrainingGraph
from autopar.spec.cluster import ClusterSpec
from autopar.spec.cluster_parts import DeviceSpec, DuplexSpec, InterconnectSpec
from autopar.spec.cluster_resolve import port_rate
from autopar.spec.units import Figure
from autopar.spec.validation import explain

HALF, TWICE = Fraction(1, 2), Fraction(2)


@dataclass(frozen=True)
class Circumstance:
    """A cluster and a graph, in which one thing differs from those that a plan was made for."""

    name: str
    """`bandwidth x 1/2`; `as it is` where nothing differs."""
    text: str
    """Where the sentence about it begins: `at half the bandwidth`."""
    cluster: ClusterSpec
    graph: TrainingGraph
    batch: Fraction = Fraction(1)
    """The size of a rank's batch, in multiples of that of the plan."""
    assumption: str = ""
    """What prices in the circumstance rest on, besides the cost model."""


@dataclass(frozen=True)
class LeftOut:
    """A circumstance that cannot be priced."""

    name: str
    why: str


AS_IT_IS = "as it is"


def circumstances(cluster: ClusterSpec, graph: TrainingGraph) -> list[Circumstance | LeftOut]:
    """What a plan for this cluster and graph is looked at in: as it is, then with the bandwidth, the batch of each rank
    and the number of hosts halved and doubled."""
    found: list[Circumstance | LeftOut] = [Circumstance(AS_IT_IS, "as it is", cluster, graph)]
    for factor, word in ((HALF, "half"), (TWICE, "twice")):
        found.append(_bandwidth(cluster, graph, factor, word))
    for factor, word in ((HALF, "half"), (TWICE, "twice")):
        name = f"batch x {factor}"
        why = why_not(graph, factor)
        if why is not None:
            found.append(LeftOut(name, why))
            continue
        there = scaled(graph, factor)
        try:
            batches = with_batches(cluster, factor)
        except ClusterSpecError as e:
            found.append(LeftOut(name, str(e)))
            continue
        text = f"with {word} the batch on each rank ({batches.batches or there.batch_size})"
        found.append(Circumstance(name, text, batches, there, factor, ASSUMPTION))
    for factor in (HALF, TWICE):
        found.append(_hosts(cluster, graph, factor))
    return found


def _bandwidth(cluster: ClusterSpec, graph: TrainingGraph, factor: Fraction, word: str) -> Circumstance | LeftOut:
    name = f"bandwidth x {factor}"
    if cluster.world_size == 1:
        return LeftOut(name, "one rank sends nothing")
    of = "" if len(cluster.all_hosts) > 1 else " between the devices"
    return Circumstance(name, f"at {word} the bandwidth{of}", with_bandwidth(cluster, factor), graph)


def _hosts(cluster: ClusterSpec, graph: TrainingGraph, factor: Fraction) -> Circumstance | LeftOut:
    name = f"hosts x {factor}"
    try:
        there = with_hosts(cluster, factor)
    except ClusterSpecError as e:
        return LeftOut(name, str(e))
    if there.world_size == 1 < cluster.world_size:
        return LeftOut(name, "one rank has nothing to synchronize")
    hosts = sum(bool(host.devices) for host in there.all_hosts)
    text = f"on {number_of(hosts, 'host')} ({number_of(there.world_size, 'rank')}, each with as large a batch)"
    return Circumstance(name, text, there, graph)


def with_bandwidth(cluster: ClusterSpec, factor: Fraction) -> ClusterSpec:
    """The cluster with `factor` times the bandwidth between its hosts: of cards, ports and links; on one host, of the
    interconnect of its devices. Latencies stay."""

    def times(rate: Figure | None) -> Figure | None:
        return rate and Figure(float(factor * Fraction(rate.value)), rate.provenance)

    if len(cluster.all_hosts) == 1:
        (entry,) = cluster.hosts
        own = entry.interconnect or InterconnectSpec()
        faster = own.model_copy(update={"bandwidth": times(cluster.all_hosts[0].interconnect.bytes_per_s)})
        return _made(cluster, hosts=(entry.model_copy(update={"interconnect": faster}),))

    def both(card: DuplexSpec | None) -> DuplexSpec | None:
        return card and card.model_copy(update={"send": times(card.send), "receive": times(card.receive)})

    network = cluster.network
    ports = [s.model_copy(update={"bandwidth": times(s.bandwidth)}) for s in network.switches]
    links = [k.model_copy(update={"bandwidth": times(k.bandwidth)}) for k in network.links]
    rate = times(port_rate(network, None))
    changed = {"bandwidth": rate, "switches": tuple(ports), "links": tuple(links)}
    hosts = [h.model_copy(update={"bandwidth": both(h.bandwidth)}) for h in cluster.hosts]
    return _made(cluster, hosts=tuple(hosts), network=network.model_copy(update=changed))


def with_batches(cluster: ClusterSpec, factor: Fraction) -> ClusterSpec:
    """The cluster with `factor` times the batch on each device that says its own. Raises `ClusterSpecError` where one
    cannot be divided."""

    def times(device: DeviceSpec, host: int, place: int) -> int | None:
        if device.batch is None:
            return None
        batch = device.batch * factor
        if batch.denominator != 1:
            raise ClusterSpecError(f"a batch of {device.batch} on {device.kind} cannot be multiplied by {factor}")
        return int(batch)

    return with_batch_of(cluster, times)


def with_batch_of(cluster: ClusterSpec, batch_of: Callable[[DeviceSpec, int, int], int | None]) -> ClusterSpec:
    """The cluster with a batch on each device, from its entry in the description, the place of the host's entry, and
    its place there."""
    hosts = []
    for i, entry in enumerate(cluster.hosts):
        devices = [d.model_copy(update={"batch": batch_of(d, i, j)}) for j, d in enumerate(entry.devices)]
        hosts.append(entry.model_copy(update={"devices": tuple(devices)}))
    return _made(cluster, hosts=tuple(hosts))


def with_hosts(cluster: ClusterSpec, factor: Fraction) -> ClusterSpec:
    """The cluster with `factor` times as many hosts of each kind; hosts that only serve stay as many. Raises
    `ClusterSpecError` where there is no such cluster."""
    hosts = []
    for entry in cluster.hosts:
        count = entry.count * (factor if entry.devices else Fraction(1))
        if count.denominator != 1:
            raise ClusterSpecError(f"{number_of(entry.count, 'host')} '{entry.name}' cannot be multiplied by {factor}")
        hosts.append(entry.model_copy(update={"count": int(count)}))
    return _made(cluster, hosts=tuple(hosts))


def _made(cluster: ClusterSpec, **changed: object) -> ClusterSpec:
    """The cluster with other parts, checked as one that was read from a file."""
    try:
        return ClusterSpec.model_validate(cluster.model_copy(update=changed).description)
    except ValidationError as e:
        problem = explain(e, ClusterSpec).splitlines()[-1]
        raise ClusterSpecError(f"the description allows no such cluster: {problem}") from None
