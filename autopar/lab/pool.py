"""Living ranks: trial after trial on the same processes, which import torch once and capture a model once.

    with Lab.of(cluster) as lab, Pool(lab) as pool:
        result = pool.trial(TrialSpec(plan, RealCompute("benchmarks.suite:workload_named", ("bert",))))

A trial that crashes, hangs or whose ranks disagree is recorded as such; the ranks are ended, and the next trial starts
new ones. All ranks keep one process group over all trials.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Protocol, Self

from autopar.ir.tables import GraphTables
from autopar.lab.forks import Module
from autopar.lab.host import Host
from autopar.lab.job import Job, JobFailed, JobTimeout
from autopar.lab.load import Load, Moment
from autopar.lab.trial import Comparison, RealCompute, Status, TrialResult, TrialSpec, VirtualCompute
from autopar.spec.files import write_file

Answers = list[dict[str, Any]]


class Place(Protocol):
    """Where ranks run: a `Lab`."""

    @property
    def ranks(self) -> tuple[Host, ...]: ...
    @property
    def servers(self) -> tuple[Host, ...]: ...
    @property
    def emulated(self) -> bool: ...
    @property
    def note(self) -> str: ...


class Asked(Protocol):
    """Ranks that live, and answer: a `Job`."""

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> Answers:
        """One answer of each rank; raises `JobFailed` where one has ended, and `JobTimeout` where one is late."""

    def __exit__(self, *raised: Any) -> None:
        """Ends the ranks."""


Start = Callable[[float], Asked]
"""Starts the ranks, which wait for each other for as many seconds at most."""


@dataclass(frozen=True)
class Limits:
    """How long ranks may take before they count as hung, in seconds."""

    start_s: float = 120.0
    """To import and to come together."""
    load_s: float = 300.0
    """To build and capture a model, on few cores."""
    run_s: float = 120.0
    """For a trial's steps."""


class _Failed(Exception):
    """A trial that ended before its time."""

    def __init__(self, status: Status, error: str) -> None:
        super().__init__(error)
        self.status: Status = status


@dataclass
class _Run:
    """A trial that is run in turn with others."""

    spec: TrialSpec
    result: TrialResult = field(default_factory=lambda: TrialResult("ok"))
    warm: Answers = field(default_factory=list)
    blocks: list[Answers] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    done: int = 0
    """Steps since it was loaded."""
    loaded_by: int = 0
    """Which start of the ranks holds it, from 1; 0 for none."""
    failed: TrialResult | None = None
    wall_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of a step, the median of its blocks so far; infinite before the first."""
        return median(median(_step_s(block)) for block in self.blocks) if self.blocks else math.inf


class Pool:
    """The ranks of a lab. A context manager; ranks are started by the first trial."""

    def __init__(
        self,
        place: Place,
        limits: Limits | None = None,
        env: Mapping[str, str] | None = None,
        start: Start | None = None,
    ) -> None:
        """`start`: starts the ranks otherwise than as a job on the place's hosts."""
        self.place = place
        self.limits = limits or Limits()
        self.starts = 0
        """How often ranks were started: once, and once more after each failure."""
        self.versions: dict[str, str] = {}
        """Of what the ranks run on; known once they have started."""
        self._env = dict(env or {})
        self._start_ranks = start or self._start_job
        self._job: Asked | None = None
        self._tables: dict[tuple[int, int], tuple[VirtualCompute, str]] = {}
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        self._folder = Path(self._resources.enter_context(tempfile.TemporaryDirectory(prefix="autopar-pool-")))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._resources.close()

    def trial(self, spec: TrialSpec) -> TrialResult:
        """Runs one trial. What goes wrong in the ranks is in the result; what raises is a fault of the caller's."""
        began = time.monotonic()
        result = TrialResult("ok")
        try:
            result = self._load("a", spec)
            warm = self._run("a", 0, spec.warmup) if spec.warmup else []
            count = _steps_within(spec, warm)
            timed, load = self._measured("a", spec.warmup, count)
            result = self._result(result, spec, warm, [timed], [load])
        except _Failed as e:
            result = replace(result, status=e.status, error=str(e))
        finally:
            self._drop("a")
        return replace(result, wall_s=time.monotonic() - began)

    def compare(self, a: TrialSpec, b: TrialSpec, rounds: int = 5) -> Comparison:
        """Runs two trials in turn: a block of steps of one, a block of the other, `rounds` times, so that what slows
        the machine down hits both. Blocks have `a.steps` and `b.steps` steps; who goes first alternates. Where one of
        them fails, both end."""
        found = self.in_turn({"a": a, "b": b}, rounds, goes_on=False)
        left_out = TrialResult("refused", "it was not run, for the other one failed", note=self.place.note)
        first, second = (found.get(slot, left_out) for slot in ("a", "b"))
        if not first.status == second.status == "ok":
            return Comparison(first, second)
        blocks = zip(first.block_s, second.block_s, strict=True)
        return Comparison(first, second, tuple(of_b / of_a for of_a, of_b in blocks))

    def in_turn(
        self,
        specs: Mapping[str, TrialSpec],
        rounds: int = 5,
        *,
        goes_on: bool = True,
        together: bool = True,
        behind: float = math.inf,
        stopped: Callable[[], bool] = lambda: False,
        tell: Callable[[str], None] = lambda name: None,
    ) -> dict[str, TrialResult]:
        """Runs trials in turn, by name: a block of steps of each, then again, the other way round, `rounds` times, so
        that what slows the machine down hits all.

        `goes_on`: one that fails is left out, and the others are run, on new ranks where it took them along.
        `together`: all are kept in memory; else each is loaded anew for each of its blocks. `behind`: those whose steps
        take more than so many times as long as the fastest one's, as far as blocks have shown by then, get no
        further ones. `stopped`: asked between blocks; then what was measured by then counts, and what was not run is
        left out. `tell`: is told which block is next.
        """
        runs = {slot: _Run(spec) for slot, spec in specs.items()}
        try:
            for number in range(rounds):
                limit_s = behind * min((run.step_s for run in runs.values()), default=math.inf)
                for slot in list(runs) if number % 2 == 0 else list(runs)[::-1]:
                    run = runs[slot]
                    if run.failed is not None or stopped() or (run.blocks and run.step_s > limit_s):
                        continue
                    tell(slot)
                    began = time.monotonic()
                    try:
                        self._block(slot, run)
                    except _Failed as e:
                        run.failed = TrialResult(e.status, str(e), note=self.place.note)
                        if not goes_on:
                            return self._outcomes(runs)
                    finally:
                        run.wall_s += time.monotonic() - began
                        if not together or run.failed is not None:
                            self._drop(slot)
                            run.loaded_by = 0
        finally:
            for slot in runs:
                self._drop(slot)
        return self._outcomes(runs)

    def _block(self, slot: str, run: _Run) -> None:
        """Some steps of one trial, which is loaded where these ranks do not hold it: they may be others than before."""
        spec = run.spec
        if self._job is None or run.loaded_by != self.starts:
            run.result = self._load(slot, spec)
            run.loaded_by, run.done = self.starts, 0
            warm = self._run(slot, 0, max(1, spec.warmup))
            run.warm, run.done = run.warm or warm, max(1, spec.warmup)
        timed, load = self._measured(slot, run.done, spec.steps)
        run.done += spec.steps
        run.blocks.append(timed)
        run.loads.append(load)

    def _outcomes(self, runs: Mapping[str, _Run]) -> dict[str, TrialResult]:
        """Of those that were run."""
        found = {}
        for slot, run in runs.items():
            if run.failed is not None:
                found[slot] = replace(run.failed, wall_s=run.wall_s)
            elif run.blocks:
                result = self._result(run.result, run.spec, run.warm, run.blocks, run.loads)
                found[slot] = replace(result, wall_s=run.wall_s)
        return found

    def _load(self, slot: str, spec: TrialSpec) -> TrialResult:
        request: dict[str, Any] = {
            "do": "load",
            "slot": slot,
            "plan": spec.plan.model_dump_json(exclude={"prediction", "alternatives"}),
            "clip_grad_norm": spec.clip_grad_norm,
        }
        if isinstance(spec.compute, RealCompute):
            request["real"] = {"workload": spec.compute.workload, "arguments": list(spec.compute.arguments)}
        else:
            request["virtual"] = self._virtual(spec.compute)
        answers = self._ask(request, self.limits.load_s)
        said = [a.get("refused") or a.get("failed") for a in answers]
        if any(said):
            status: Status = "disagreed" if not all(said) else "crashed" if "failed" in answers[0] else "refused"
            which = next(rank for rank, text in enumerate(said) if text)
            raise _Failed(status, f"rank {which}: {said[which]}")
        hashes = [a["order_hash"] for a in answers]
        if len(set(hashes)) > 1:
            raise _Failed("disagreed", f"ranks would issue different collectives, by the hash of their order: {hashes}")
        self._ask({"do": "start", "slot": slot}, self.limits.run_s)
        return TrialResult("ok", order_hash=hashes[0], note=self.place.note)

    def _virtual(self, compute: VirtualCompute) -> dict[str, Any]:
        key = id(compute.graph), id(compute.measured_s)
        if key not in self._tables:
            tables = GraphTables.of(compute.graph).model_dump(mode="json")
            text = json.dumps({"tables": tables, "measured_s": compute.measured_s})
            path = self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
            write_file(path, text, "table of a model")
            self._tables[key] = compute, str(path)  # what the ids are of, too, lest they be given to another
        optimizer = [compute.optimizer.name, compute.optimizer.state_tensors]
        return {
            "tables": self._tables[key][1],
            "dilation": compute.dilation,
            "optimizer": optimizer,
            "sparse_update": compute.sparse_update,
        }

    def _run(self, slot: str, first: int, count: int) -> Answers:
        answers = self._ask({"do": "run", "slot": slot, "first": first, "count": count}, self.limits.run_s)
        for number, losses in enumerate(zip(*(a["losses"] for a in answers), strict=True)):
            if len({str(loss) for loss in losses}) > 1:  # as text, for NaN does not equal itself
                self._stop()
                raise _Failed("disagreed", f"step {first + number}: ranks return different losses: {list(losses)}")
        return answers

    def _measured(self, slot: str, first: int, count: int) -> tuple[Answers, Load]:
        before, own_s = Moment.now(), time.process_time()
        answers = self._run(slot, first, count)
        own_s = time.process_time() - own_s + sum(a["cpu_s"] for a in answers)
        return answers, before.until(Moment.now(), own_s)

    def _result(
        self, result: TrialResult, spec: TrialSpec, warm: Answers, blocks: Sequence[Answers], loads: Sequence[Load]
    ) -> TrialResult:
        steps = sum(len(block[0]["ends_s"]) for block in blocks)
        real = isinstance(spec.compute, RealCompute)
        return replace(
            result,
            step_s=tuple(s for block in blocks for s in _step_s(block)),
            block_s=tuple(median(_step_s(block)) for block in blocks),
            losses=tuple(loss for block in (warm, *blocks) if block for loss in block[0]["losses"]),
            sent_bytes=self._by_host(blocks, "sent_bytes", steps),
            received_bytes=self._by_host(blocks, "received_bytes", steps),
            peak_memory_bytes=tuple(a["peak_bytes"] for a in blocks[-1]) if real else (),
            load=Load(
                median(load.others_cores for load in loads),
                median(load.stolen_cores for load in loads),
                loads[-1].average,
            ),
        )

    def _by_host(self, blocks: Sequence[Answers], what: str, steps: int) -> tuple[float, ...]:
        """Read by the first rank of each host: ranks of one host read the same counter."""
        first = [self.place.ranks.index(host) for host in dict.fromkeys(self.place.ranks)]
        if len(first) == 1 or not self.place.emulated:
            return ()
        return tuple(sum(block[rank][what] for block in blocks) / steps for rank in first)

    def _ask(self, request: Mapping[str, Any], timeout_s: float) -> Answers:
        """One answer of each rank, which are started where there are none. `_Failed` where one is gone or late; then
        there are none again."""
        with self._failures():
            job = self._job or self._start()
            return job.ask(request, timeout_s)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except JobFailed as e:
            self._stop()
            raise _Failed("crashed", str(e)) from e
        except JobTimeout as e:
            self._stop()
            raise _Failed("hung", str(e)) from e
        except BaseException:  # Ctrl-C, say: what was asked has not been answered, so nothing more can be asked.
            self._stop()
            raise

    def _start(self) -> Asked:
        self._job = self._start_ranks(
            2 * max(self.limits.load_s, self.limits.run_s)
        )  # A late rank is the pool's to find.
        self.starts += 1
        self.versions = self._job.ask({"do": "hello"}, self.limits.start_s)[0]
        return self._job

    def _start_job(self, timeout_s: float) -> Asked:
        ranks = Module("autopar.lab.rank", (str(timeout_s),))
        return Job(self.place.ranks, ranks, self._env, self.place.servers).__enter__()

    def _stop(self) -> None:
        if self._job is not None:
            self._job.__exit__(None, None, None)
            self._job = None

    def _drop(self, slot: str) -> None:
        if self._job is not None:
            with suppress(_Failed), self._failures():
                self._job.ask({"do": "drop", "slot": slot}, self.limits.run_s)


def _step_s(answers: Answers) -> list[float]:
    """A step lasts from the last rank's end of the one before to the last rank's end of it."""
    ends = [max(a["start_s"] for a in answers), *map(max, zip(*(a["ends_s"] for a in answers), strict=True))]
    return [b - a for a, b in pairwise(ends)]


def _steps_within(spec: TrialSpec, warm: Answers) -> int:
    """As many steps as the budget has room for, as long as the last one of the warm-up."""
    if not warm or not math.isfinite(spec.budget_s):
        return spec.steps
    fitting = int(spec.budget_s / max(_step_s(warm)[-1], 1e-6))
    return min(spec.steps, max(spec.least_steps, fitting))
