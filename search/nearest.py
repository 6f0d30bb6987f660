"""Which changes would make a plan fit that does not: each is priced by the memory model before it is named."""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from autopar.cost_models.analytic import StepPricer
from autopar.cost_models.batches import graphs_for, unscaled
from autopar.cost_models.memory import MemoryModel
from autopar.errors import PlanError
from autopar.formatting import size
from autopar.ir.scaled_batch import scaled, why_not
from autopar.ir.training_graph import TrainingGraph
from autopar.search.base import Problem
from autopar.search.circumstances import with_batch_of
from autopar.search.evaluate import overflow_bytes
from autopar.search.seeds import built
from autopar.spec.devices import DEVICES
from autopar.spec.plan import SyncGroup
from autopar.spec.topology import topology_of
from autopar.strategies.lowering import lower_plan

LEANER = ("zero1", "sharded_kept", "sharded", "sharded_head_zero1", "sharded_tables_zero1", "column_parallel_zero1")
"""Plans by name that spread ever more over the ranks; then those that share out heads, tables, and linear layers."""
GIB = 1 << 30

Groups = tuple[SyncGroup, ...]


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
        for other, peak_bytes in _fitting(problem, [n for n in LEANER if n != name]):
            yield Change(f"the strategy '{other}'{again}", peak_bytes)
            return


def fewer_constraints(problem: Problem, names: Sequence[str]) -> Iterator[Change]:
    """A pin or a forbidden strategy, or all of them where no single one helps, without which one of the plans of these
    names fits."""
    asked = problem.constraints
    ways = [
        (f"leaving out the pin '{pin}'", replace(asked, pins=tuple(p for p in asked.pins if p is not pin)))
        for pin in asked.pins
    ]
    ways += [
        (f"allowing {name}", replace(asked, forbidden=asked.forbidden - {name})) for name in sorted(asked.forbidden)
    ]
    if len(ways) > 1:
        ways.append(
            ("leaving out all pins and allowing all strategies", replace(asked, pins=(), forbidden=frozenset()))
        )
    for what, constraints in ways:
        for name, peak_bytes in _fitting(replace(problem, constraints=constraints), names):
            yield Change(f"{what}, as with the strategy '{name}'", peak_bytes)
            return


def _fitting(problem: Problem, names: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Those of the plans of these names that fit and keep to the constraints, and the peak bytes of the fullest
    rank."""
    for name in names:
        with contextlib.suppress(PlanError):
            groups = built(problem, name)
            peaks = _peaks(problem, groups)
            if problem.rules.admit(groups) and not overflow_bytes(problem, peaks):
                yield name, max(peaks)


def leaner(problem: Problem) -> list[Groups]:
    """The plans of `LEANER` that can be used and keep to the constraints."""
    plans = [built(problem, name) for name in LEANER]
    return [groups for groups in plans if problem.rules.admit(groups) and _can_be_used(problem, groups)]


def _can_be_used(problem: Problem, groups: Groups) -> bool:
    try:
        lower_plan(groups, problem.graph, problem.context)
    except PlanError:
        return False
    return True


def other_inputs(problem: Problem, plans: Sequence[Groups]) -> Iterator[Change]:
    """Smaller batches, and parameters of 16 bits, with which one of the plans fits. Of ranks with batches of different
    sizes, all become as much smaller; the text says that of the fullest one with the first plan."""
    peaks, batches = _peaks(problem, plans[0]), [graph.batch_size or 1 for graph in _graphs(problem)]
    fullest = max(range(len(peaks)), key=lambda rank: peaks[rank] - problem.memory_limits[rank])
    whole = batches[fullest]
    where, others = "rank", ""
    if len(set(batches)) > 1:
        where, others = problem.topology.ranks[fullest].device.kind, ", and fewer in proportion on the others"
    best, peak_bytes = 0, 0
    for groups in plans:
        smaller = [n for n in (whole >> i for i in range(1, whole.bit_length())) if n > best]

        def there(batch: int, groups: Groups = groups) -> tuple[int, ...]:
            return _peaks(_with_batches(problem, Fraction(batch, whole)), groups)

        place = bisect_left(smaller, True, key=lambda batch: not overflow_bytes(problem, there(batch)))
        if place < len(smaller):
            best = smaller[place]
            peak_bytes = max(there(best))
    if best:
        yield Change(f"{best} samples on each {where} in place of {whole}{others}", peak_bytes, about=True)
    if all(p.spec.dtype == "float32" for p in problem.graph.parameters):
        for groups in plans:
            with contextlib.suppress(PlanError):
                peaks = _peaks(problem, groups, _in_bfloat16)
                if not overflow_bytes(problem, peaks):
                    what = "a model in bfloat16, model.to(torch.bfloat16) or --dtype bfloat16"
                    yield Change(what, max(peaks), about=True)
                    return


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


def _with_batches(problem: Problem, part: Fraction) -> Problem:
    """The problem with this part of each rank's samples, one at least; where its graph cannot be scaled, with
    activations of this part of their size."""
    graph, samples = problem.graph, problem.graph.batch_size
    if samples is not None and not problem.cluster.batches:
        factor = Fraction(max(1, round(part * samples)), samples)
        if why_not(graph, factor) is None:
            return replace(problem, graph=scaled(graph, factor))
    elif samples is not None:
        cluster = with_batch_of(problem.cluster, lambda device, i, j: max(1, round(part * (device.batch or samples))))
        if unscaled(graph, [place.device.batch for place in cluster.ranks]) is None:
            there = topology_of(cluster)
            return replace(problem, cluster=cluster, topology=there, context=problem.context.on(cluster))
    return replace(problem, graph=_with_activations(problem.graph, part))


def _with_activations(graph: TrainingGraph, part: Fraction) -> TrainingGraph:
    """The graph with activations of this part of their size. Among what nodes hold are gradients that are being
    computed, which are as large for any batch: as much as the largest of them takes is left as it is."""
    held = max((p.numel * 4 for p in graph.parameters), default=0)

    def smaller(size: int) -> int:
        fixed = min(size, held)
        return fixed + math.ceil(part * (size - fixed))

    nodes = tuple(replace(n, live_bytes=smaller(n.live_bytes), own_bytes=smaller(n.own_bytes)) for n in graph.compute)
    return replace(graph, compute=nodes, input_bytes=math.ceil(part * graph.input_bytes))


def _in_bfloat16(graph: TrainingGraph) -> TrainingGraph:
    """The graph of the model in bfloat16: half of what float32 takes."""
    specs = {p.name: p.model_copy(update={"dtype": "bfloat16"}) for p in graph.model.parameters if p.dtype == "float32"}
    model = graph.model.model_copy(update={"parameters": tuple(specs.get(p.name, p) for p in graph.model.parameters)})
    nodes = tuple(replace(n, live_bytes=n.live_bytes // 2, own_bytes=n.own_bytes // 2) for n in graph.compute)
    parameters = tuple(replace(p, spec=specs[p.name]) for p in graph.parameters)
    return replace(graph, model=model, parameters=parameters, compute=nodes)
