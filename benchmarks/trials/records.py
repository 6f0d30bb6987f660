"""The records of the data set: lines of JSON, plain or compressed with xz.

Four kinds of line. A `session` says what the trials behind it ran on; a `graph` holds a workload's tables, a `cluster`
its description, each once; a `trial` refers to them. From a trial and what it refers to, the graph, the topology and
the lowered program are made again (`Dataset.program`), so that a cost model can be asked what it would have said.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError

from autopar.cost_models.optimizers import OptimizerCost
from autopar.ir.tables import GraphTables
from autopar.ir.training_graph import TrainingGraph
from autopar.spec.calibration import Calibration
from autopar.spec.cluster import ClusterSpec
from autopar.spec.json_file import Record
from autopar.spec.plan import SyncGroup
from autopar.strategies import Context
from autopar.strategies.lowering import StepProgram, lower_plan
from benchmarks.trials.groups import Encoded, decode

DATA = Path(__file__).parent / "data"
ALWAYS = "ddp"
"""The plan that is run in every choice, whatever else is."""


Compute = Literal["virtual", "real"]
COMPUTES: tuple[Compute, ...] = ("virtual", "real")


class Session(Record):
    """One run of the collector, and what it ran on."""

    kind: Literal["session"] = "session"
    session: int
    date: str
    processor: str
    cores: int
    memory_gib: float
    versions: dict[str, str]


class Graph(Record):
    """A workload: its graph without the model, and what its optimizer costs."""

    kind: Literal["graph"] = "graph"
    workload: str
    about: str
    digest: str
    """Of `tables`: workloads of one model that differ in their batch differ in it."""
    optimizer: str
    state_tensors: int
    sparse_update: bool = False
    """Whether the optimizer leaves rows alone that no rank has looked up."""
    tables: GraphTables


class Cluster(Record):
    """A cluster, as described."""

    kind: Literal["cluster"] = "cluster"
    cluster: str
    about: str
    digest: str
    summary: str
    spec: dict[str, Any]


class LabCalibration(Record):
    """What the lab did as a cluster at one speed."""

    kind: Literal["calibration"] = "calibration"
    cluster: str
    """The digest of its cluster."""
    dilation: float
    """As a trial's. Times are those of the lab."""
    additions_us: float
    """As a trial's."""
    calibration: Calibration


class Trial(Record):
    """One trial. Sizes in bytes, for one step."""

    kind: Literal["trial"] = "trial"
    key: str
    """Of what is run: repeats of the same trial have the same key."""
    repeat: int = 0
    """How often the same was run before."""
    session: int
    graph: str
    """The digest of its graph."""
    cluster: str
    """The digest of its cluster."""
    compute: Compute
    dilation: float = 1.0
    """The lab ran so many times slower than the cluster: rates divided by it, with virtual compute also its sleeps
    multiplied by it. Below 1, faster."""
    plan: str
    """Where the plan came from: a builder, or `random`."""
    groups: list[Encoded]
    clip_grad_norm: float | None = None
    status: Literal["ok", "refused", "crashed", "hung", "disagreed"]
    error: str = ""
    order_hash: str = ""
    step_us: tuple[int, ...] = ()
    """Microseconds of each timed step, in order, as they took in the lab: `dilation` times the cluster's."""
    sent_bytes: tuple[int, ...] = ()
    """By host that holds ranks."""
    received_bytes: tuple[int, ...] = ()
    peak_memory_bytes: tuple[int, ...] = ()
    """By rank; with real compute only."""
    others_cores: float = 0.0
    """Cores that other processes took meanwhile."""
    stolen_cores: float = 0.0
    load_average: float = 0.0
    additions_us: float = 0.0
    """What 100,000 additions in Python took just before: the machine's speed, which varies by itself. 0 where it was
    not taken."""
    noise: str = ""
    """Why the step time may be off by more than 5 %, in the trial's own judgement."""
    wall_s: float = 0.0

    @property
    def step_time_s(self) -> float:
        """The median step, in the lab."""
        return median(self.step_us) * 1e-6

    @property
    def ok(self) -> bool:
        return self.status == "ok"


AnyRecord = Session | Graph | Cluster | LabCalibration | Trial
_ANY: TypeAdapter[AnyRecord] = TypeAdapter(Annotated[AnyRecord, Field(discriminator="kind")])


def read(path: Path) -> Iterator[AnyRecord]:
    """The records of a file, in order. A last line that was cut off is passed over; any other line that is no record
    raises ValueError with its number."""
    with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                yield _ANY.validate_json(line)
            except ValidationError as e:
                if not line.endswith("\n"):
                    return
                raise ValueError(f"{path}:{number}: no record of a trial: {e.errors()[0]['msg']}") from e


@dataclass
class Dataset:
    """Records with what they refer to."""

    sessions: dict[int, Session] = field(default_factory=dict)
    graphs: dict[str, Graph] = field(default_factory=dict)
    clusters: dict[str, Cluster] = field(default_factory=dict)
    calibrations: dict[tuple[str, float], LabCalibration] = field(default_factory=dict)
    """By cluster and dilation."""
    trials: list[Trial] = field(default_factory=list)

    @classmethod
    def load(cls, *paths: Path) -> Self:
        """Reads files, by default all of `data/`; files that are not there are empty."""
        found = cls()
        for path in paths or sorted(DATA.glob("*.jsonl.xz")):
            if path.exists():
                found.add(read(path))
        return found

    def add(self, records: Iterable[AnyRecord]) -> None:
        """Takes records in."""
        for record in records:
            match record:
                case Session():
                    self.sessions[record.session] = record
                case Graph():
                    self.graphs[record.digest] = record
                case Cluster():
                    self.clusters[record.digest] = record
                case LabCalibration():
                    self.calibrations[record.cluster, record.dilation] = record
                case Trial():
                    self.trials.append(record)

    @cached_property
    def _training_graphs(self) -> dict[str, TrainingGraph]:
        return {}

    def graph(self, trial: Trial) -> TrainingGraph:
        """The training graph of a trial, without its joint graph; trials of one workload share it."""
        known = self._training_graphs
        if trial.graph not in known:
            known[trial.graph] = self.graphs[trial.graph].tables.graph()
        return known[trial.graph]

    def workload(self, trial: Trial) -> str:
        return self.graphs[trial.graph].workload

    def optimizer(self, trial: Trial) -> OptimizerCost:
        """What the workload's optimizer costs."""
        graph = self.graphs[trial.graph]
        return OptimizerCost(graph.optimizer, graph.state_tensors)

    def cluster(self, trial: Trial) -> ClusterSpec:
        """The cluster as described; the lab's rates were these over `trial.dilation`."""
        return ClusterSpec.model_validate(self.clusters[trial.cluster].spec)

    def cluster_name(self, trial: Trial) -> str:
        return self.clusters[trial.cluster].cluster

    def groups(self, trial: Trial) -> tuple[SyncGroup, ...]:
        """The plan's groups."""
        return decode(trial.groups, [p.name for p in self.graph(trial).parameters])

    def program(self, trial: Trial) -> StepProgram:
        """The lowered plan, as it would run today. Its `order_hash` is that of the trial."""
        cluster, sparse_update = self.cluster(trial), self.graphs[trial.graph].sparse_update
        clips = trial.clip_grad_norm is not None
        context = Context(cluster.world_size, clips=clips, late_parameters=True, sparse_update=sparse_update)
        return lower_plan(self.groups(trial), self.graph(trial), context.on(cluster))

    def repeats(self) -> Mapping[str, list[Trial]]:
        """The good trials that were run more than once, by key."""
        by_key: dict[str, list[Trial]] = {}
        for trial in self.trials:
            if trial.ok:
                by_key.setdefault(trial.key, []).append(trial)
        return {key: trials for key, trials in by_key.items() if len(trials) > 1}
