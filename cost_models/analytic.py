"""The analytic cost model: rooflines for compute, bytes over links for communication, and an event simulation of both.

It has nothing to learn. It prices the operations that a plan was lowered to and knows no strategy. Where its figures
are guesses, so are its times; the order of plans is more certain than the times are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from autopar.backends.base import Backend
from autopar.cost_models.alike import alike_in
from autopar.cost_models.base import CostModel, Estimate
from autopar.cost_models.batches import graphs_for, scaled_times
from autopar.cost_models.clocks import Streams
from autopar.cost_models.compute import Rates, compute_dtype, compute_provenance, node_times
from autopar.cost_models.memory import MemoryModel
from autopar.cost_models.network import Network
from autopar.cost_models.optimizers import ADAMW, OptimizerCost
from autopar.cost_models.price import Price
from autopar.cost_models.simulate import simulate
from autopar.ir.training_graph import TrainingGraph
from autopar.ops.base import Call
from autopar.ops.context import Context
from autopar.ops.group import Group
from autopar.ops.spared import used_share
from autopar.ops.values import Setting
from autopar.spec.calibration import Calibration, DeviceRates
from autopar.spec.topology import Topology
from autopar.spec.units import PROVENANCES, Provenance
from autopar.strategies.lowering import Known, StepProgram

RELATIVE_ERROR: dict[Provenance, float] = {"measured": 0.15, "looked up": 0.35, "guessed": 0.6}
"""Of the step time, by the weakest figure behind it. [Empirical: calibrated event simulations of others err by 3 to
15 %, closed forms on data sheet figures by 10 to 60 %; no error of this model was measured yet]"""

EAGER_ISSUE_S = 120e-6
"""Seconds on the compute stream that a group's collective takes longer to be issued and waited for where the model runs
eagerly, between the hooks of its gradients, than in a graph. [Empirical: 40 layers on two ranks, in one group and in
20: each group takes the thread 0.48 ms eagerly and 0.23 ms captured with all-reduces, 0.68 and 0.48 ms with partitioned
servers]"""

NodeTimes = Mapping[str, Mapping[str, float]]
"""By kind of device, then by name of a node: the seconds that the node takes."""


class AnalyticCostModel(CostModel):
    """Prices a plan from the cluster's figures.

    `optimizer` is what updates cost; `measured_s` are measured times of the graph's nodes, which take precedence over
    the roofline; `backend` replaces the communication library that the devices imply; a `calibration` of the cluster
    takes the place of data sheets and guesses.
    """

    def __init__(
        self,
        optimizer: OptimizerCost = ADAMW,
        measured_s: NodeTimes | None = None,
        backend: Backend | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.measured_s = measured_s
        self.backend = backend
        self.calibration = calibration
        self._pricer: StepPricer | None = None

    def predict(
        self, graph: TrainingGraph, program: StepProgram, topology: Topology, *, timeline: bool = False
    ) -> Estimate:
        return self.pricer(graph, topology).estimate(program, timeline=timeline)

    def pricer(self, graph: TrainingGraph, topology: Topology) -> StepPricer:
        """The pricer of programs for a graph on a topology. The last one is kept, with all that it has computed."""
        if self._pricer is None or self._pricer.graph is not graph or self._pricer.topology is not topology:
            network = Network(topology, self.backend, calibration=self.calibration)
            rates = self.calibration.devices if self.calibration else ()
            self._pricer = StepPricer(graph, topology, self.optimizer, self.measured_s, network, rates)
        return self._pricer


class StepPricer:
    """Prices programs for one graph on one topology."""

    def __init__(
        self,
        graph: TrainingGraph,
        topology: Topology,
        optimizer: OptimizerCost = ADAMW,
        measured_s: NodeTimes | None = None,
        network: Network | None = None,
        device_rates: Sequence[DeviceRates] = (),
    ) -> None:
        """`device_rates`: by kind of device, the rates that were measured; other kinds are priced from the cluster's
        figures."""
        self.graph = graph
        self.topology = topology
        self.optimizer = optimizer
        self.network = network or Network(topology)
        rounds, sums = self.network.backend.rounds, self.network.backend.sums
        self._graphs = graphs_for(graph, [place.device.batch for place in topology.ranks])
        """By rank: the graph for its batch."""
        models = {id(g): MemoryModel(g, rounds, sums) for g in {id(g): g for g in [graph, *self._graphs]}.values()}
        self.memory = models[id(graph)]
        self._memories = [models[id(g)] for g in self._graphs]
        self._setting = Setting(topology.world_size, optimizer.moved_tensors, rounds, sums)
        devices = list(dict.fromkeys(place.device for place in topology.ranks))
        dtype = compute_dtype(graph)
        measured = {rates.kind: rates for rates in device_rates}
        of_updates = dict(optimizer.rates)
        figures = [Rates.of(d, dtype) for d in devices]
        first = [next(i for i, other in enumerate(devices) if other.kind == d.kind) for d in devices]
        """Of each device, the place of the first one of its kind: others of the kind may be slower."""
        rates = [
            Rates.of(d, dtype, measured.get(d.kind), of_updates.get(d.kind)).on(figures[i], figures[first[i]])
            if d.kind in measured
            else Rates.of(d, dtype, None, of_updates.get(d.kind))
            for i, d in enumerate(devices)
        ]
        device_of_rank = [devices.index(place.device) for place in topology.ranks]
        self.rates = [rates[i] for i in device_of_rank]
        times = [(measured_s or {}).get(device.kind) for device in devices]
        graphs = [self._graphs[device_of_rank.index(i)] for i in range(len(devices))]
        self._nodes = [
            node_times(g, r, t if t is None or (g is graph and r == of) else scaled_times(graph, of, g, r, t))
            for g, r, of, t in zip(graphs, rates, (rates[i] for i in first), times, strict=True)
        ]
        self._device_of_rank = device_of_rank
        self._devices = np.array(device_of_rank)
        self._streams: dict[frozenset[str], Streams] = {}
        found = [compute_provenance(graph, [d], t, measured) for d, t in zip(devices, times, strict=True)]
        self._compute_provenance: Provenance = max(found, key=PROVENANCES.index)
        self._of_groups: dict[Context, Known[tuple[Price, ...]]] = {}
        self._prices: dict[tuple[object, ...], Price] = {}

    def estimate(self, program: StepProgram, *, timeline: bool = False) -> Estimate:
        """The cost of one step of a program."""
        n = self.network.world_size
        prices = self.step_prices(program)
        outcome = simulate(program, prices, self.streams(program), self.network.backend.name, timeline=timeline)
        transfers = [p.transfer for p in prices if p.transfer is not None]
        moved = np.concatenate([np.zeros((2, n), np.int64), *(t.bytes for t in transfers)])
        sent, received = moved.reshape(-1, 2, n).sum(axis=0).tolist()
        provenance = self._compute_provenance
        if transfers:
            provenance = max(provenance, self.network.provenance, key=PROVENANCES.index)
        return Estimate(
            step_time_s=outcome.step_time_s,
            compute_s=outcome.compute_s,
            exposed_communication_s=max(0.0, outcome.step_time_s - outcome.compute_s),
            communication_s=outcome.communication_s,
            sent_bytes=tuple(sent),
            received_bytes=tuple(received),
            peak_memory_bytes=self._peaks(program),
            relative_error=RELATIVE_ERROR[provenance],
            provenance=provenance,
            spans=tuple(outcome.spans),
        )

    def memory_of(self, rank: int) -> MemoryModel:
        """The memory model of a rank, with that rank's batch."""
        return self._memories[rank]

    def _peaks(self, program: StepProgram) -> tuple[int, ...]:
        """Peak bytes of each rank."""
        by_model = {id(m): m.peaks(program, self.optimizer) for m in {id(m): m for m in self._memories}.values()}
        return tuple(by_model[id(m)][rank] for rank, m in enumerate(self._memories))

    def streams(self, program: StepProgram) -> Streams:
        """The compute streams without the nodes that a program replaces; remembered, as plans share them."""
        return self._streams_without(program.replaced)

    @property
    def graph_streams(self) -> Streams:
        """The compute streams of the whole graph."""
        return self._streams_without(frozenset())

    def graph_s(self, replaced: frozenset[str]) -> npt.NDArray[np.float64]:
        """Seconds that each rank takes for the graph's own nodes, replaced ones not included."""
        prefix_s = self._streams_without(replaced).prefix_s
        return np.array([prefix_s[device][-1] for device in self._device_of_rank])

    def _streams_without(self, nodes: frozenset[str]) -> Streams:
        if nodes not in self._streams:
            kept = [n.name not in nodes for n in self.graph.compute]
            times = [[t * k for t, k in zip(seconds, kept, strict=True)] for seconds in self._nodes]
            prefixes = [[0.0, *accumulate(seconds)] for seconds in times]
            self._streams[nodes] = Streams(prefixes, self._device_of_rank, self.graph.backward_start)
        return self._streams[nodes]

    def alone_s(self, program: StepProgram) -> tuple[float, float]:
        """What a program's operations take by themselves, with nothing beside them and no compute of the graph:
        seconds on the channel, and on the busiest rank's device. The step's own two sums are left out."""
        channel, device = 0.0, np.zeros(self.network.world_size)
        for price in self.group_prices(program):
            channel += price.transfer.seconds if price.transfer else 0.0
            device += price.device_s
        return channel, float(device.max())

    def step_prices(self, program: StepProgram) -> list[Price]:
        """The prices of all calls, in the mean over steps; those of groups are remembered, as plans share them."""
        known = self._of_groups.setdefault(program.context, {})
        return program.each(known, partial(self.prices, program.context))

    def group_prices(self, program: StepProgram) -> list[Price]:
        """The prices of the calls that belong to groups."""
        known: Known[tuple[Price, ...]] = {}
        make = partial(self.prices, program.context)
        return [price for _, prices in program.of_groups(known, make) for price in prices]

    def prices(self, context: Context, group: Group | None, calls: Sequence[Call]) -> tuple[Price, ...]:
        """The prices of a group's calls, or of those of none, in the mean over steps."""
        prices = tuple(map(self.price, calls))
        share = 1.0 if group is None else used_share(group, calls, context)
        return prices if share == 1.0 else tuple([p.shared(share) for p in prices])

    def price(self, call: Call) -> Price:
        """The price of a call in a step in which it runs; remembered, as plans share most of their groups."""
        key = call.key
        found = self._prices.get(key)
        if found is None:
            found = self._prices[key] = self._price(call)
        return found

    def _price(self, call: Call) -> Price:
        issue_s = self.network.backend.issue_s if call.op.is_collective else 0.0
        if self.graph.eager and call.op.is_collective and call.group is not None:
            issue_s += EAGER_ISSUE_S
        first, of_rank = alike_in(call, self._devices)
        # To a tenth of a microsecond: ranks whose shards differ by one element are then simulated as one.
        each = [round(issue_s + self.rates[r].seconds(call.op.work(call, r, self._setting)), 7) for r in first.tolist()]
        sent = call.op.sends(call)
        transfer = None if sent is None else self.network.transfer(sent)
        uniform = _equal(each) and (transfer is None or _equal(transfer.taken))
        return Price(np.array(each)[of_rank], transfer, uniform)


def _equal(values: Sequence[float]) -> bool:
    return len(set(values)) <= 1
