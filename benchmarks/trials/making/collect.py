"""Takes trials, evenly over cells, for as long as there is time; a later run goes on where this one stopped.

Cells whose clusters differ in nothing but rates share a lab and its living ranks. Each visit of a lab takes some trials
of those of its cells that have the fewest so far, DDP first, and repeats some old ones: so repeats lie minutes or hours
apart, and tell how much the same trial differs from time to time.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from autopar.cost_models import OptimizerCost
from autopar.ir.tables import GraphTables
from autopar.lab import Lab
from autopar.lab.pool import Limits, Pool
from autopar.lab.trial import TrialResult
from autopar.lab.wiring import of_cluster
from benchmarks.harness import Machine, additions_us
from benchmarks.suite import WORKLOADS
from benchmarks.suite.clusters import ClusterCase
from benchmarks.trials.groups import encode
from benchmarks.trials.making.cells import BUDGET_S, Cell, Choice, Draw, cell_name
from benchmarks.trials.making.clusters import clusters
from benchmarks.trials.making.journal import Journal, digest
from benchmarks.trials.records import ALWAYS, COMPUTES, Cluster, Compute, Graph, Session, Trial
from benchmarks.zoo.captured import Captured
from benchmarks.zoo.named import any_workload
from benchmarks.zoo.small import SMALL

CELLS_A_VISIT, NEW_TRIALS, REPEATS = 12, 3, 1
"""Of a visit: cells, and trials of each."""
TOO_SLOW_S = 1.5
"""Cells whose DDP step is predicted to take longer than this in the lab are left out."""
LIMITS = Limits(load_s=240.0, run_s=60.0)

Progress = Callable[[str], None]


class NothingToTry(Exception):
    """All that could be tried is too slow for the lab."""


class Collector:
    """Fills a journal."""

    def __init__(
        self,
        journal: Journal,
        seed: int = 0,
        progress: Progress = lambda line: None,
        *,
        one_choice: bool = False,
        budget_s: float = BUDGET_S,
        new_trials: int = NEW_TRIALS,
    ) -> None:
        """`one_choice`, `budget_s`: of its cells. `new_trials`: of each cell in a visit of a lab."""
        self._one_choice, self._budget_s, self._new_trials = one_choice, budget_s, new_trials
        self.journal = journal
        self.seed = seed
        self.progress = progress
        self._session = max(journal.known.sessions, default=-1) + 1
        self._draw = random.Random(f"{seed} {self._session}")
        self._graphs: dict[str, Graph] = {g.workload: g for g in journal.known.graphs.values()}
        self._clusters: dict[str, Cluster] = {}

    def run(
        self,
        minutes: float,
        workloads: Sequence[str] | None = None,
        names: Sequence[str] | None = None,
        most: int = 10**9,
        computes: Sequence[Compute] = COMPUTES,
    ) -> int:
        """Takes trials until the time is over, or `most` of them; returns how many. Raises `NothingToTry` where
        all that could be tried is too slow."""
        deadline, taken = time.monotonic() + 60 * minutes, 0
        labs: defaultdict[object, list[Cell]] = defaultdict(list)
        for cell in self.cells(workloads, names, computes):
            wiring = of_cluster(cell.case.cluster)
            labs[wiring.layout, tuple(p.host.name for p in cell.case.cluster.ranks)].append(cell)
        if not labs:
            raise NothingToTry(f"no such workload on such a cluster takes less than {TOO_SLOW_S:g} s with DDP")
        began = False
        while time.monotonic() < deadline and taken < most:
            done = self._counts()
            cells = min(labs.values(), key=lambda some: sum(self._need(c, done) for c in some) / len(some))
            chosen = sorted(cells, key=lambda c: (self._need(c, done), self._draw.random()))[:CELLS_A_VISIT]
            chosen.sort(key=lambda c: (c.workload.name, c.compute))  # ranks keep what they captured last
            with Lab.of(chosen[0].case.cluster) as lab, Pool(lab, LIMITS) as pool:
                for cell, drawn, repeat in self._visit(chosen, done):
                    lab.set_rates(cell.case.cluster, scale=1 / drawn.dilation)
                    speed = additions_us()
                    result = pool.trial(cell.spec(drawn))
                    if not began:
                        self._begin(pool)
                        began = True
                    self._record(cell, drawn, repeat, result, speed)
                    taken += 1
                    if time.monotonic() > deadline or taken >= most:
                        break
        return taken

    def cells(
        self, workloads: Sequence[str] | None, names: Sequence[str] | None, computes: Sequence[Compute]
    ) -> Iterator[Cell]:
        """All cells of these workloads and clusters, by default of all, that are not too slow for the lab."""
        cases = [case for name, case in clusters().items() if names is None or name in names]
        for workload in workloads or (*SMALL, *WORKLOADS):
            graph = self._graph(workload)
            cost = OptimizerCost(graph.optimizer, graph.state_tensors)
            known = Captured(workload, graph.tables.graph(), cost, graph.sparse_update)
            for case in cases:
                real = not case.virtual and workload in SMALL
                for compute in (c for c in COMPUTES if c in computes and (real or c == "virtual")):
                    cell = Cell(known, case, compute, one_choice=self._one_choice, budget_s=self._budget_s)
                    if cell.ddp_s <= TOO_SLOW_S:
                        yield cell

    def _need(self, cell: Cell, done: Counter[str]) -> float:
        """How far the cell would be after a visit, by its weight; the cell that would be least far is next."""
        return (done[cell.name] + self._new_trials) / cell.weight

    def _counts(self) -> Counter[str]:
        known = self.journal.known
        return Counter(self._name(t) for t in known.trials if not t.repeat and t.plan != ALWAYS)

    def _name(self, trial: Trial) -> str:
        """Of its cell."""
        known = self.journal.known
        return cell_name(known.workload(trial), known.cluster_name(trial), trial.compute)

    def _visit(self, cells: Sequence[Cell], done: Counter[str]) -> Iterator[tuple[Cell, Draw, int]]:
        """Cells with what is to be run in them, and how often that was run before."""
        known = self.journal.known
        for cell in cells:
            first = done[cell.name]
            new = [cell.draw(self.seed, i) for i in range(first, first + self._new_trials)]
            tried = self._choices(cell)
            for choice in dict.fromkeys([*tried, *(drawn.choice for drawn in new)]):
                if not tried.get(choice):
                    yield cell, cell.always(choice), 0
            for drawn in new:
                yield cell, drawn, 0
            for index in self._draw.choices(range(first), k=REPEATS) if first else ():
                old = cell.draw(self.seed, index)
                key = self._key(cell, old)
                yield cell, old, sum(t.key == key for t in known.trials)

    def _choices(self, cell: Cell) -> dict[Choice, bool]:
        """Of the cell's trials, with whether `ALWAYS` was run in them."""
        found: dict[Choice, bool] = {}
        for t in self.journal.known.trials:
            if self._name(t) == cell.name:
                choice = t.dilation, t.clip_grad_norm
                found[choice] = found.get(choice, False) or t.plan == ALWAYS
        return found

    def _graph(self, workload: str) -> Graph:
        if workload not in self._graphs:
            self.progress(f"capturing {workload}")
            made = any_workload(workload)
            known = Captured.of(made)
            tables = GraphTables.of(known.graph)
            record = Graph(
                workload=workload,
                about=made.about,
                digest=digest(tables.model_dump_json()),
                optimizer=known.optimizer.name,
                state_tensors=known.optimizer.state_tensors,
                sparse_update=known.sparse_update,
                tables=tables,
            )
            self.journal.write(record)
            self._graphs[workload] = record
        return self._graphs[workload]

    def _cluster(self, case: ClusterCase) -> Cluster:
        if case.name not in self._clusters:
            fingerprint = case.cluster.fingerprint
            record = Cluster(
                cluster=case.name,
                about=case.about,
                digest=fingerprint.digest,
                summary=fingerprint.summary,
                spec=fingerprint.spec,
            )
            self.journal.write(record)
            self._clusters[case.name] = record
        return self._clusters[case.name]

    def _begin(self, pool: Pool) -> None:
        machine = Machine.here()
        self.journal.write(
            Session(
                session=self._session,
                date=machine.date,
                processor=machine.processor,
                cores=machine.cores,
                memory_gib=machine.memory_gib,
                versions=pool.versions,
            )
        )

    def _key(self, cell: Cell, drawn: Draw) -> str:
        plan = encode(drawn.groups, [p.name for p in cell.graph.parameters])
        return digest(repr((cell.name, self._graph(cell.workload.name).digest, drawn.dilation, drawn.clip, plan)))

    def _record(self, cell: Cell, drawn: Draw, repeat: int, result: TrialResult, speed: float) -> None:
        load = result.load
        record = Trial(
            key=self._key(cell, drawn),
            repeat=repeat,
            session=self._session,
            graph=self._graph(cell.workload.name).digest,
            cluster=self._cluster(cell.case).digest,
            compute=cell.compute,
            dilation=drawn.dilation,
            plan=drawn.origin,
            groups=encode(drawn.groups, [p.name for p in cell.graph.parameters]),
            clip_grad_norm=drawn.clip,
            status=result.status,
            error=_summary(result.error),
            order_hash=result.order_hash,
            step_us=tuple(round(1e6 * s) for s in result.step_s),
            sent_bytes=tuple(map(round, result.sent_bytes)),
            received_bytes=tuple(map(round, result.received_bytes)),
            peak_memory_bytes=result.peak_memory_bytes,
            others_cores=round(load.others_cores, 3) if load else 0.0,
            stolen_cores=round(load.stolen_cores, 3) if load else 0.0,
            load_average=round(load.average, 2) if load else 0.0,
            additions_us=speed,
            noise=result.noise,
            wall_s=round(result.wall_s, 2),
        )
        self.journal.write(record)
        shown = f"{1e3 * record.step_time_s:.0f} ms" if record.step_us else record.error
        self.progress(f"{cell.name}, {drawn.origin}, {len(drawn.groups)} groups: {record.status}, {shown}")


_RAISED = re.compile(r"^[\w.]*(Error|Exception|Failure|Mismatch)\b.*")


def _summary(text: str) -> str:
    """Of an error: its first line, and what was raised in the end. Between them is a traceback, with the paths of this
    machine."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    raised = [line for line in lines[1:] if _RAISED.match(line)]
    return " ".join([*lines[:1], *raised[-1:]])[:300]
