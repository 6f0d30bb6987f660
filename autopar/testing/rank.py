"""A rank of a conformance check; started by `autopar.testing.check`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from autopar.cost_models.analytic import StepPricer
from autopar.cost_models.optimizers import optimizer_cost
from autopar.errors import AutoparError
from autopar.ir.batch import flatten
from autopar.ir.build import training_graph
from autopar.ir.tables import GraphTables
from autopar.ir.training_graph import TrainingGraph
from autopar.ops.values import Setting
from autopar.runtime.compiled import Settings
from autopar.runtime.job.process_group import Group, Rendezvous, join
from autopar.runtime.job.servers import serve_here
from autopar.runtime.optimizers.optimizer import context_for
from autopar.runtime.program import Program
from autopar.runtime.virtual import DeviceTimes, VirtualProgram
from autopar.spec.topology import Topology
from autopar.strategies import Strategy
from autopar.strategies.timing import cycle
from autopar.testing.cases import SERVERS, Use, cluster_of, uses
from autopar.testing.deadline import Deadline
from autopar.testing.declared import memory_differences, traffic_differences, work_differences
from autopar.testing.findings import Finding, Kind
from autopar.testing.load import load
from autopar.testing.mean import Mean
from autopar.testing.recorder import Recorder
from autopar.testing.tasks import TASKS, Task
from autopar.testing.training import (
    LEARNING_RATE,
    SAMPLES,
    TRAININGS,
    batches,
    digest_of,
    gradients,
    reference,
    trained,
    updated_with,
)
from autopar.testing.wire import NARROW, WIDE, seen_and_declared
from autopar.testing.wire import SAMPLES as WIDE_SAMPLES
from autopar.verification import ROUNDED_TOLERANCE

STEPS = 4
PLAIN = ("sgd", "plain", "adamw")
"""Trainings by SGD, with momentum and without; and by AdamW, for strategies that do not take SGD."""
MARK = "autopar-conformance "
"""In front of what is found, on a line of its own: strategies may print, too."""
LOOKS_AT = "autopar-conformance looks at "
"""The same on stderr, of what comes next."""
EQUAL, BYTES = 1e-10, 0.03
KEPT = 1e-5
"""Of the largest element: states may be in float32."""


def _sum_of(
    state: dict[str, Any], name: str, like: torch.Tensor, momenta: Mapping[str, float], lacking: Collection[str]
) -> tuple[Any, Any]:
    """What all states together hold of a parameter's gradient; and what momenta, by their states' names, add to the
    next. `lacking`: states of what parameters lack, which a gradient times the rate of SGD would take off them."""
    of = {key: by_name[name].double() for key, by_name in state.get("state", {}).items() if name in by_name}
    of = {key: value for key, value in of.items() if value.shape == like.shape}
    of |= {key: value / -LEARNING_RATE for key, value in of.items() if key in lacking}
    added = sum((momenta[key] * value for key, value in of.items() if key in momenta), 0.0)
    return sum((value for key, value in of.items() if key not in momenta), 0.0), added


def _alike(use: Use) -> bool:
    """Whether steps are all alike, once all groups have begun, so that any is what is declared."""
    return len(cycle(use.plan.groups)) == 1


def _begin(use: Use, program: Program, batch: Any) -> None:
    """Takes the steps that come before those which are alike: replicas begin to be apart in the first one, say."""
    for _ in range(max(use.fidelity == "local", *(g.from_step for g in use.plan.groups))):
        program.step(batch)


def _plainest(use: Use) -> str:
    return "plain" if use.training == "sgd" else use.training


class Rank:
    """Looks at one strategy, on one number of ranks."""

    def __init__(self, strategy: Strategy, group: Group, findings: list[Finding], deadline_s: float) -> None:
        """`findings`: to which what is found is added. `deadline_s`: for each look."""
        self.strategy = strategy
        self.group = group
        self.findings = findings
        self._deadline = Deadline(deadline_s, self._last_words)
        self._looks_at: tuple[Kind, str] = "equality", ""
        self._graphs: dict[tuple[str, int], TrainingGraph] = {}
        self._turn = group.world_size

    def look(self, with_bytes: bool) -> None:
        """Everything that can be seen on this many ranks."""
        for task in TASKS.values():
            sys.stderr.write(f"{LOOKS_AT}{self.strategy.name} on {self.group.world_size} ranks: {task.name}\n")
            sys.stderr.flush()
            for use in self._uses(task, SAMPLES["equal"][self.group.rank]):
                case = f"{task.name}, {use.options}, {self.group.world_size} ranks"
                if use.fidelity != "exact":
                    if use.wire in ROUNDED_TOLERANCE and use.fidelity == "rounded" and self.group.world_size > 1:
                        self._rounding(task, use, case)
                    if use.fidelity == "compressed":
                        self._feedback(task, use, case)
                    if use.fidelity in ("compressed", "local") and self.group.world_size > 1 and _alike(use):
                        self._issued(task, use, case)
                    continue
                self._equality(task, use, case)
                if self.group.world_size > 1:
                    self._issued(task, use, case)
        for use in self._uses(WIDE, WIDE_SAMPLES) if self.group.world_size > 1 else ():
            case = f"{use.options}, {self.group.world_size} ranks"
            if not _alike(use):
                continue
            self._declared(use, case)
            if with_bytes:
                self._bytes(use, case)

    def _uses(self, task: Task, samples: int) -> Iterator[Use]:
        try:
            for training in PLAIN:
                optimizer = self._optimizer(task, training)
                context = context_for(self.group.world_size, optimizer, "element", None, True, late_parameters=True)
                found = list(uses(self.strategy, self._graph(task, samples), context))
                if found:
                    yield from (replace(use, training=training) for use in found)
                    return
        except (AutoparError, AssertionError) as e:
            case = f"{task.name}, {self.group.world_size} ranks"
            self.findings.append(Finding("equality", case, False, f"cannot be lowered: {e}"))

    def _equality(self, task: Task, use: Use, case: str) -> None:
        """Two of the trainings each time, with equal and with unequal batches."""
        names = [t for t in TRAININGS if t != "plain" or task.name == "tables"]
        for samples in SAMPLES:
            self._turn += 1
            training = names[self._turn % len(names)]

            def look(training: str = training, samples: str = samples) -> str | None:
                rank, n = self.group.rank, self.group.world_size
                program = self._program(task, use, training, SAMPLES[samples][rank])
                outcome = trained(program, task, training, samples, STEPS)
                alike = set(Rendezvous(self.group).exchange("parameters", outcome.digest))
                off = outcome.differences(task, training, samples, n)
                if max(off.values()) > EQUAL:
                    return f"differs by {off['parameters']:.1e} in parameters and {off['loss']:.1e} in the loss"
                return None if len(alike) == 1 else "has other parameters than other ranks, if only in their last bits"

            self._see("equality", f"{case}, {training}, {samples} batches", look)

    def _rounding(self, task: Task, use: Use, case: str) -> None:
        """A step of SGD is the gradient, times its rate, where nothing but rounding is lost."""

        def look() -> str | None:
            program = self._program(task, use, "plain", SAMPLES["unequal"][self.group.rank])
            program.step(batches(task, "plain", "unequal", 0, self.group.rank)[0])
            before = dict(task.model().named_parameters())
            expected, _ = reference(task, "plain", "unequal", self.group.world_size, 1)
            with program.gathered():
                found = {n: p.detach().clone() for n, p in program.model.named_parameters()}
            worst = 0.0
            for name, value in expected.items():
                moved = float((value - before[name].detach()).abs().max())
                worst = max(worst, float((found[name] - value).abs().max()) / moved if moved else 0.0)
            limit = ROUNDED_TOLERANCE[use.wire]
            if 0 < worst <= limit:
                return None
            return f"is off by {worst:.1e} of the largest gradient, expected more than 0 and at most {limit:.1e}"

        self._see("rounding", case, look)

    def _feedback(self, task: Task, use: Use, case: str) -> None:
        """What a step updates with was sent; states hold what was not, or it is nothing in the mean."""

        def look() -> str | None:
            n, rank = self.group.world_size, self.group.rank
            program = self._program(task, use, _plainest(use), SAMPLES["unequal"][rank])
            alike, kept, mean = Rendezvous(self.group), dict[str, Any](), Mean()
            moments: dict[str, torch.Tensor] = {}
            calls = program.compile_for(batches(task, "plain", "unequal", 0, rank)[0]).program.calls
            momenta = {str(c.op.state_key()): c.op.momentum for c in calls if c.op.momentum is not None}
            lacking = {str(c.op.state_key()) for c in calls if c.op.of_parameters}
            for step in range(STEPS):
                with program.gathered():
                    before = {k: p.detach().clone() for k, p in program.model.named_parameters()}
                expected = gradients(task, "plain", "unequal", n, step, before)
                program.step(batches(task, "plain", "unequal", step, rank)[0])
                state, earlier, some = program.state_dict(), kept, False
                kept = {k: _sum_of(state, k, p, momenta, lacking) for k, p in before.items()}
                taken, moments = updated_with(state, before, moments)
                for name in before:
                    sent = taken[name]
                    given = expected[name] + sum(earlier.get(name, ()))
                    some |= bool(sent.any()) or not bool(given.any())
                    if use.remainder != "kept":
                        mean.add(sent, given)
                        continue
                    off = float((sent + kept[name][0] - given).abs().max())
                    if off > KEPT * max(1.0, float(given.abs().max())):
                        return f"step {step}, '{name}': what was sent and what is kept are {off:.1e} off the gradient"
                if not some:
                    return f"step {step}: nothing was sent; all is kept for later"
                bits = digest_of(state["model"])
                if len(set(alike.exchange(f"parameters of step {step}", bits))) > 1:
                    return f"step {step}: ranks have different parameters"
            return mean.biased() if use.remainder == "none in the mean" else None

        self._see("feedback", case, look)

    def _issued(self, task: Task, use: Use, case: str) -> None:
        """What real and virtual compute issue, and whether ranks agree."""

        def look() -> str | None:
            rank, samples = self.group.rank, SAMPLES["equal"][self.group.rank]
            batch = task.batch(samples, 0)
            program = self._program(task, use, use.training, samples)
            _begin(use, program, batch)
            compiled = program.compile_for(batch)
            recorder = Recorder(compiled.graphs["step"])
            compiled.graphs["step"] = recorder.run
            program.step(batch)
            program.synchronize()

            # All that virtual compute is given has been through JSON, as on its way to a rank.
            tables = GraphTables.model_validate_json(
                GraphTables.of(self._graph(task, samples)).model_dump_json()
            ).graph()
            cluster = cluster_of(self.group.world_size)
            times = DeviceTimes.of(StepPricer(tables, Topology(cluster)), compiled.program, rank)
            virtual = VirtualProgram(tables, compiled.program, times, self.group)
            again = Recorder(virtual.module)
            virtual.module = again.run  # type: ignore[assignment]
            virtual.step()
            virtual.synchronize()
            if recorder.calls != again.calls:
                return f"issued {recorder.calls}, virtual compute {again.calls}"
            return "; ".join(work_differences(compiled.program.calls, self.group.world_size)) or None

        def agree() -> str | None:
            samples = SAMPLES["unequal"][self.group.rank]
            first = batches(task, use.training, "unequal", 0, self.group.rank)[0]
            program = self._program(task, use, use.training, samples)
            _begin(use, program, first)
            compiled = program.compile_for(first)
            said = Rendezvous(self.group).exchange(case, compiled.program.order_hash)
            return None if len(set(said)) == 1 else f"orders differ: {said}"

        self._see("parity", case, look)
        self._see("order", case, agree)

    def _declared(self, use: Use, case: str) -> None:
        """What operations declare of traffic and of memory."""
        n, batch = self.group.world_size, WIDE.batch(WIDE_SAMPLES, 0)

        def traffic() -> str | None:
            program = self._program(WIDE, use, _plainest(use), WIDE_SAMPLES)
            _begin(use, program, batch)
            calls = program.compile_for(batch).program.calls
            return "; ".join(traffic_differences(calls, n, len(SERVERS))) or None

        def memory() -> str | None:
            program = self._program(WIDE, use, use.training, WIDE_SAMPLES)
            setting = Setting(n, optimizer_cost("SGD").moved_tensors, rounds=True)
            return "; ".join(memory_differences(program, batch, setting)) or None

        self._see("traffic", case, traffic)
        self._see("memory", case, memory)

    def _bytes(self, use: Use, case: str) -> None:
        def look() -> str | None:
            program = self._program(WIDE, use, _plainest(use), WIDE_SAMPLES)
            seen, declared = seen_and_declared(program, WIDE.batch(WIDE_SAMPLES, 0))
            if use.fidelity == "compressed":  # few bytes, beside which headers count
                narrow = use.plan.model_copy(update={"model": self._graph(NARROW, WIDE_SAMPLES).model})
                program = self._program(NARROW, replace(use, plan=narrow), _plainest(use), WIDE_SAMPLES)
                few, of_few = seen_and_declared(program, NARROW.batch(WIDE_SAMPLES, 0))
                seen -= few - of_few
            off = abs(seen / declared - 1)
            return None if off <= BYTES else f"{seen:.0f} bytes were seen, {declared} declared: {off:.1%} off"

        self._see("bytes", case, look)

    def _program(self, task: Task, use: Use, training: str, samples: int) -> Program:
        how = TRAININGS[training]
        model = task.model()
        optimizer = how.optimizer(model.parameters())
        context = context_for(self.group.world_size, optimizer, "element", how.clip, True, late_parameters=True)
        program = Program(model, use.plan, self.group, optimizer, Settings(task.loss_fn, how.clip), context)
        program.adopt(self._graph(task, samples), task.batch(samples, 0))
        return program

    def _optimizer(self, task: Task, training: str) -> torch.optim.Optimizer:
        return TRAININGS[training].optimizer(task.model().parameters())

    def _graph(self, task: Task, samples: int) -> TrainingGraph:
        key = task.name, samples
        if key not in self._graphs:
            self._graphs[key] = training_graph(task.model(), flatten(task.batch(samples, 0)), task.loss_fn)
        return self._graphs[key]

    def _see(self, kind: Kind, case: str, look: Callable[[], Any]) -> None:
        """Writes down what is wrong, where something is, errors included."""
        self._looks_at = kind, case
        try:
            with self._deadline.on():
                wrong = look()
        except (AutoparError, AssertionError, RuntimeError, ValueError, TypeError, KeyError, IndexError) as e:
            wrong = f"{type(e).__name__}: {e}"
        self.findings.append(Finding(kind, case, wrong is None, wrong or ""))

    def _last_words(self, stuck: str) -> None:
        """Says what was found so far, and what does not end."""
        say([*self.findings, Finding(*self._looks_at, False, stuck)])


def say(findings: list[Finding]) -> None:
    """Hands findings over to the process that has started this one."""
    sys.stdout.write(f"\n{MARK}{json.dumps([asdict(f) for f in findings])}\n")
    sys.stdout.flush()


def main(strategy: Strategy, worlds: list[int], with_bytes: bool, deadline_s: float) -> list[Finding]:
    """Looks at a strategy on each number of ranks that this rank is part of, one after the other."""
    torch.set_num_threads(1)
    rank, port, findings = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"]), list[Finding]()
    for i, world_size in enumerate(worlds):
        if rank >= world_size:
            continue
        os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size), MASTER_PORT=str(port + i))
        if world_size > 1:
            dist.init_process_group("gloo")
            if rank == 0:
                serve_here(SERVERS)
        # What does not end is to be found by the deadline, which can say where it is.
        Rank(strategy, join(2 * deadline_s), findings, deadline_s).look(with_bytes)
        if world_size > 1:
            dist.barrier()
            dist.destroy_process_group()
    return findings


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    say(main(load(told["strategy"]), told["worlds"], told["bytes"], told["deadline_s"]))
