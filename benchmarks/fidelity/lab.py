"""What the cost model says of a trial of the lab, and the physical features of the plan that it ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.cost_models.analytic import StepPricer
from autopar.cost_models.correction import Correction, Floats
from autopar.cost_models.features import features
from autopar.cost_models.learning import learn
from autopar.cost_models.network import Host, Network
from autopar.spec.calibration import Calibration
from autopar.spec.topology import Topology
from autopar.strategies.lowering import StepProgram
from benchmarks.fidelity.figures import Quality
from benchmarks.suite.clusters import backend_in_lab
from benchmarks.trials.records import Dataset, Trial

CORE_BYTES_PER_S = 1.1e9
"""What a core of the lab's machine moves for all hosts together, sent and received, through sockets, bridges and
token buckets. [Empirical]"""


@dataclass(frozen=True)
class Said:
    """A trial with what is said of it."""

    trial: Trial
    predicted_s: float
    """In the lab, as the trial's own times are."""
    serial_s: float
    """The same by an alpha-beta model: compute, and each collective by its latency and its bytes, one after the other
    with nothing hidden."""
    features: dict[str, float]
    choice: tuple[str, ...]
    """Plans that were run under the same conditions: one of them would have been chosen."""
    workload: str
    cluster: str


@dataclass(frozen=True)
class Table:
    """Trials with what is said of them, in columns."""

    names: tuple[str, ...]
    """Of the features."""
    rows: Floats
    """[trial, feature]"""
    predicted: Floats
    measured: Floats
    families: tuple[tuple[str, str], ...]
    """The workload and the cluster of each: what is left out as a whole."""

    @classmethod
    def of(cls, said: Sequence[Said]) -> Table:
        names = tuple(said[0].features)
        return cls(
            names,
            np.array([[s.features[n] for n in names] for s in said]),
            np.array([s.predicted_s for s in said]),
            np.array([s.trial.step_time_s for s in said]),
            tuple((s.workload, s.cluster) for s in said),
        )

    def learned(self, known: npt.NDArray[np.bool_] | None = None) -> Correction:
        """A correction, from these trials or from some of them."""
        at = np.flatnonzero(np.ones(len(self.rows), bool) if known is None else known)
        families = [self.families[i] for i in at]
        return learn(self.names, self.rows[at], self.predicted[at], self.measured[at], families)


def quality(said: Sequence[Said], predicted: Floats, draws: Sequence[int] | None = None) -> Quality:
    """Of predictions of these trials; those that are not a number are not counted. `draws`: where trials were predicted
    in several ways, which one each is of: no plan is chosen among predictions of two."""
    at = np.flatnonzero(~np.isnan(predicted)).tolist()
    truth = np.array([said[i].trial.step_time_s for i in at])
    choices = [(draws[i] if draws else 0, *said[i].choice) for i in at]
    return Quality.of(predicted[at], truth, choices, [said[i].trial.key for i in at])


class Lab:
    """Predicts trials. What plans of one workload and cluster share is computed once."""

    def __init__(self, data: Dataset) -> None:
        self.data = data
        self._pricers: dict[tuple[str, str, float, str], StepPricer] = {}

    def say(self, trial: Trial) -> Said:
        """The lab runs `dilation` times slower than the cluster; what a collective costs beside its bytes does not. So
        the cluster is simulated, with these costs made smaller by as much, and the outcome is made longer. Latencies
        are not emulated, and virtual compute is not slowed down by the communication beside it."""
        data = self.data
        program, pricer = data.program(trial), self._pricer(trial)
        estimate = pricer.estimate(program)
        workload, cluster = data.workload(trial), data.cluster_name(trial)
        return Said(
            trial,
            trial.dilation * estimate.step_time_s,
            trial.dilation * (estimate.compute_s + _sent_s(program, pricer)),
            features(program, estimate, pricer, trial.dilation),
            (workload, cluster, trial.compute, str(trial.dilation), str(trial.clip_grad_norm)),
            workload,
            cluster,
        )

    def _pricer(self, trial: Trial) -> StepPricer:
        key = trial.graph, trial.cluster, trial.dilation, trial.compute
        if key not in self._pricers:
            topology = Topology(self.data.cluster(trial))
            network = self._network(trial, topology)
            self._pricers[key] = StepPricer(
                self.data.graph(trial), topology, self.data.optimizer(trial), network=network
            )
        return self._pricers[key]

    def _network(self, trial: Trial, topology: Topology) -> Network:
        d = trial.dilation
        backend = backend_in_lab(d, virtual=trial.compute == "virtual")
        cores = self.data.sessions[trial.session].cores
        machine = Host(tuple(range(topology.world_size)), d * cores * CORE_BYTES_PER_S)
        known = self.data.calibrations.get((trial.cluster, d)) if trial.compute == "virtual" else None
        calibration = None if known is None else slower(known.calibration, 1 / d)
        return Network(topology, backend, [machine], calibration, latency_s=0.0)


def _sent_s(program: StepProgram, pricer: StepPricer) -> float:
    transfers = (pricer.network.transfer(c) for c in program.calls if c.is_pending)
    return sum(t.seconds for t in transfers)


def slower(calibration: Calibration, times: float) -> Calibration:
    """Of a cluster that does everything in so many times the time."""
    collectives = (
        c.model_copy(
            update={
                "seconds": tuple(times * s for s in c.seconds),
                "processor_s": (0.0,) * len(c.seconds),
                "core_wait_s": 0.0,
            }
        )
        for c in calibration.collectives
    )
    links = (a.model_copy(update={"bytes_per_s": a.bytes_per_s / times}) for a in calibration.links)
    return calibration.model_copy(update={"collectives": tuple(collectives), "links": tuple(links)})
