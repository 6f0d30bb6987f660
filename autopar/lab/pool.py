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
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Protocol, Self

from autopar.ir.tables import GraphTables
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


class Pool:
    """The ranks of a lab. A context manager; ranks are started by the first trial."""

    def __init__(self, place: Place, limits: Limits | None = None, env: Mapping[str, str] | None = None) -> None:
        self.place = place
        self.limits = limits or Limits()
        self.starts = 0
        """How often ranks were started: once, and once more after each failure."""
        self.versions: dict[str, str] = {}
        """Of what the ranks run on; known once they have started."""
        self._env = dict(env or {})
        self._job: Job | None = None
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
        the machine down hits both. Blocks have `a.steps` and `b.steps` steps; who goes first alternates."""
        specs, found = {"a": a, "b": b}, {"a": TrialResult("ok"), "b": TrialResult("ok")}
        blocks: dict[str, list[Answers]] = {"a": [], "b": []}
        loads: dict[str, list[Load]] = {"a": [], "b": []}
        warm: dict[str, Answers] = {}
        slot = "a"
        try:
            for slot, spec in specs.items():
                found[slot] = self._load(slot, spec)
                warm[slot] = self._run(slot, 0, max(1, spec.warmup))
            done = {slot: max(1, spec.warmup) for slot, spec in specs.items()}
            for number in range(rounds):
                for slot in ("a", "b") if number % 2 == 0 else ("b", "a"):
                    timed, load = self._measured(slot, done[slot], specs[slot].steps)
                    done[slot] += specs[slot].steps
                    blocks[slot].append(timed)
                    loads[slot].append(load)
        except _Failed as e:
            found[slot] = TrialResult(e.status, str(e), note=self.place.note)
            return Comparison(found["a"], found["b"])
        finally:
            self._drop("a")
            self._drop("b")
        results = {s: self._result(found[s], specs[s], warm[s], blocks[s], loads[s]) for s in specs}
        ratios = tuple(
            median(_step_s(second)) / median(_step_s(first))
            for first, second in zip(blocks["a"], blocks["b"], strict=True)
        )
        return Comparison(results["a"], results["b"], ratios)

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

    def _start(self) -> Job:
        timeout_s = 2 * max(self.limits.load_s, self.limits.run_s)  # A late rank is the pool's to find.
        argv = [sys.executable, "-m", "autopar.lab.rank", str(timeout_s)]
        self._job = Job(self.place.ranks, argv, self._env, self.place.servers).__enter__()
        self.starts += 1
        self.versions = self._job.ask({"do": "hello"}, self.limits.start_s)[0]
        return self._job

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
