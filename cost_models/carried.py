"""A cost model, carried over to a cluster that differs from the one it was made for, or to batches of another size.

What was measured on a cluster is not known of another one. It is carried over as the same multiple of what the figures
of the cluster say: a collective that took 1.3 times as long as computed is taken to do so on links of another rate, or
among more ranks. Where processors hold it up, rather than links, that is too hopeful for faster links.
"""

from __future__ import annotations

import copy

from autopar.cost_models.analytic import AnalyticCostModel
from autopar.cost_models.base import CostModel
from autopar.cost_models.calibrated import measured
from autopar.cost_models.corrected import CorrectedCostModel
from autopar.cost_models.network import Network
from autopar.ops.collectives import wire_bytes
from autopar.spec.calibration import Calibration, CollectiveTimes, LinkTimes
from autopar.spec.cluster import ClusterSpec
from autopar.spec.topology import Topology, topology_of

MOST_RATE, LEAST_RATE = 1e30, 1e-3
"""Bytes a second that a calibration may hold."""


def carried_model(model: CostModel, before: ClusterSpec, after: ClusterSpec, batch: float = 1.0) -> CostModel:
    """The model for cluster `after`, where it was made for cluster `before`, and for batches of `batch` times the size.

    Measured times of nodes grow with the batch. What a corrected model has learned is kept. A cost model of another
    class is returned as it is: it is given the topology and the graph that it prices for.
    """
    if isinstance(model, CorrectedCostModel):
        changed = copy.copy(model)
        base = carried_model(model.base, before, after, batch)
        assert isinstance(base, AnalyticCostModel)
        changed.base = base
        return changed
    if type(model) is not AnalyticCostModel:
        return model
    times = model.measured_s
    if times is not None:
        times = {kind: {name: batch * s for name, s in nodes.items()} for kind, nodes in times.items()}
    calibration = model.calibration
    if calibration is not None and before != after:
        calibration = carried_calibration(calibration, before, after)
    return AnalyticCostModel(model.optimizer, times, model.backend, calibration)


def carried_calibration(calibration: Calibration, before: ClusterSpec, after: ClusterSpec) -> Calibration:
    """What was measured on cluster `before`, for cluster `after`.

    Collectives of all ranks keep the multiple of the time that the figures say, links the part of their rate that they
    reached, devices what they reach. Collectives of teams are left out where the number of ranks differs.
    """
    old, new = topology_of(before), topology_of(after)
    collectives = [_collective(times, calibration, old, new) for times in calibration.collectives]
    links = [_link(link, old, new) for link in calibration.links]
    changed = {
        "cluster": after.fingerprint,
        "collectives": tuple(times for times in collectives if times is not None),
        "links": tuple(link for link in links if link is not None),
    }
    return calibration.model_copy(update=changed)


def _collective(
    times: CollectiveTimes, calibration: Calibration, old: Topology, new: Topology
) -> CollectiveTimes | None:
    n, m = old.world_size, new.world_size
    if n != m and times.teams:
        return None
    if m == 1:
        return None
    # The backend as measured: how many bytes a core moves is known of neither cluster otherwise.
    backend = Network(old, calibration=calibration).backend
    here, there = Network(old, backend), Network(new, backend)
    seconds, processor_s = [], []
    for size, taken_s, busy_s in zip(times.size_bytes, times.seconds, times.processor_s, strict=True):
        one, other = measured(times, size, n), measured(times, size, m)
        seconds.append(taken_s * there.transfer(other).seconds / here.transfer(one).seconds)
        moved, moved_there = (sum(map(sum, wire_bytes(c, k))) / k for c, k in ((one, n), (other, m)))
        processor_s.append(busy_s * moved_there / moved if moved else busy_s)
    return times.model_copy(update={"seconds": tuple(seconds), "processor_s": tuple(processor_s)})


def _link(link: LinkTimes, old: Topology, new: Topology) -> LinkTimes | None:
    if max(link.sender, link.receiver) >= new.world_size:
        return None
    ratio = new.bandwidth_bytes_per_s(link.sender, link.receiver) / old.bandwidth_bytes_per_s(
        link.sender, link.receiver
    )
    rate = min(max(ratio * link.bytes_per_s, LEAST_RATE), MOST_RATE)
    return link.model_copy(update={"bytes_per_s": rate})
