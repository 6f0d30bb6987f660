"""Which changes would make a plan fit that does not: each is priced by the memory model before it is named."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autopar.cost_models.analytic import StepPricer
from autopar.cost_models.batches import graphs_for
from autopar.cost_models.memory import MemoryModel
from autopar.errors import PlanError
from autopar.formatting import size
from autopar.ir.training_graph import TrainingGraph
from autopar.search.base import Problem
from autopar.search.builders import builder_named
from autopar.search.evaluate import overflow_bytes
from autopar.spec.devices import DEVICES
from autopar.spec.plan import SyncGroup
from autopar.strategies.lowering import lower_plan

LEANER = ("zero1", "sharded_kept", "sharded")
"""Plans by name that spread ever more over the ranks."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Change:
    """A change with which a plan fits."""

    what: str
    peak_bytes: int
    """Peak bytes of the fullest rank, with the change."""
    about: bool = False
    """Whether activations were scaled rather than captured again."""

    def __str__(self) -> str:
        return f"{self.what} ({'about ' if self.about else ''}{size(self.peak_bytes)})"


def other_strategies(problems: Sequence[Problem], name: str) -> Iterator[Change]:
    """Plans by other names that fit. `problems`: with ever more of the activations computed again."""
    for problem in problems:
        again = "" if problem.graph.recompute == "none" else ", with activations computed again, as autopar does then"
        for other in LEANER:
            with contextlib.suppress(PlanError):
                groups = builder_named(other)(problem.graph.parameters, problem.context, problem.cluster)
                groups = problem.rules.applied(groups)
                peaks = _peaks(problem, groups)
                if other != name and problem.rules.admit(groups) and not overflow_bytes(problem, peaks):
                    yield Change(f"the strategy '{other}'{again}", max(peaks))
                    return


def other_inputs(problem: Problem, groups: Sequence[SyncGroup]) -> Iterator[Change]:
    """Smaller batches, and parameters of 16 bits, with which the groups fit. Of ranks with batches of different sizes,
    all become as much smaller; the text says that of the fullest one."""
    peaks, batches = _peaks(problem, groups), [graph.batch_size or 1 for graph in _graphs(problem)]
    fullest = max(range(len(peaks)), key=lambda rank: peaks[rank] - problem.memory_limits[rank])
    whole = batches[fullest]
    where, others = "rank", ""
    if len(set(batches)) > 1:
        where, others = problem.topology.ranks[fullest].device.kind, ", and fewer in proportion on the others"
    for batch in (whole >> i for i in range(1, whole.bit_length())):
        peaks = _peaks(problem, groups, partial(_with_activations, part=batch / whole))
        if not overflow_bytes(problem, peaks):
            yield Change(f"{batch} samples on each {where} in place of {whole}{others}", max(peaks), about=True)
            break
    if all(p.spec.dtype == "float32" for p in problem.graph.parameters):
        with contextlib.suppress(PlanError):
            peaks = _peaks(problem, groups, _in_bfloat16)
            if not overflow_bytes(problem, peaks):
                yield Change(
                    "a model in bfloat16, model.to(torch.bfloat16) or --dtype bfloat16", max(peaks), about=True
                )


def larger_devices(problem: Problem, peaks: Sequence[int]) -> str:
    """How much memory devices need for a plan with these peaks, and the smallest that have as much."""
    needed = max(peaks) / (1 - problem.constraints.memory_reserve)
    is_cpu = all(p.device.host_link.name == "memory" for p in problem.topology.ranks)
    enough = [d for d in DEVICES.values() if d.memory_bytes.value >= needed and d.products] if not is_cpu else []
    named = f", as {min(enough, key=lambda d: d.memory_bytes.value).name} has" if enough else ""
    shown = f"{math.ceil(needed / GIB)} GiB" if needed > 4 * GIB else size(math.ceil(needed))
    return f"devices with {shown} each{named}"


def _graphs(problem: Problem) -> list[TrainingGraph]:
    """The graph of each rank, with the batch of its device."""
    return graphs_for(problem.graph, [place.device.batch for place in problem.topology.ranks])


def _peaks(
    problem: Problem,
    groups: Sequence[SyncGroup],
    changed: Callable[[TrainingGraph], TrainingGraph] = lambda graph: graph,
) -> tuple[int, ...]:
    """Peak bytes of each rank, with a change of its graph."""
    pricer = problem.pricer or StepPricer(problem.graph, problem.topology)
    backend, graphs = pricer.network.backend, _graphs(problem)
    program = lower_plan(groups, changed(problem.graph), problem.context)
    peaks = {
        key: MemoryModel(changed(g), backend.rounds, backend.sums).peaks(program, pricer.optimizer)
        for key, g in {id(g): g for g in graphs}.items()
    }
    return tuple(peaks[id(g)][rank] for rank, g in enumerate(graphs))


def _with_activations(graph: TrainingGraph, part: float) -> TrainingGraph:
    """The graph with activations of this part of their size. Among what nodes hold are gradients that are being
    computed, which are as large for any batch: as much as the largest of them takes is left as it is."""
    held = max((p.numel * 4 for p in graph.parameters), default=0)

    def scaled(live: int) -> int:
        fixed = min(live, held)
        return fixed + math.ceil(part * (live - fixed))

    nodes = tuple(replace(n, live_bytes=scaled(n.live_bytes)) for n in graph.compute)
    return replace(graph, compute=nodes, input_bytes=math.ceil(part * graph.input_bytes))


def _in_bfloat16(graph: TrainingGraph) -> TrainingGraph:
    """The graph of the model in bfloat16: half of what float32 takes."""
    specs = {p.name: p.model_copy(update={"dtype": "bfloat16"}) for p in graph.model.parameters if p.dtype == "float32"}
    model = graph.model.model_copy(update={"parameters": tuple(specs.get(p.name, p) for p in graph.model.parameters)})
    nodes = tuple(replace(n, live_bytes=n.live_bytes // 2, own_bytes=n.own_bytes // 2) for n in graph.compute)
    parameters = tuple(replace(p, spec=specs[p.name]) for p in graph.parameters)
    return replace(graph, model=model, parameters=parameters, compute=nodes)
