"""How many samples of a global batch each rank is given, so that ranks on unequal devices compute equally long.

A synchronous step takes as long as its slowest rank. What a rank computes takes a + b times its samples, as priced for
two sizes of the batch; ranks that end together have the least longest time. Whole samples, and ranks of one entry of
the description having as many each, allow that only nearly: among what is near, the best is found by dynamic
programming over the entries.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from autopar.cost_models.analytic import StepPricer
from autopar.cost_models.base import CostModel
from autopar.errors import PlanError, SpecError
from autopar.formatting import number_of
from autopar.ir.scaled_batch import why_not
from autopar.ir.training_graph import TrainingGraph
from autopar.search.base import Problem
from autopar.search.builders import builder_named
from autopar.search.circumstances import with_batch_of
from autopar.search.constraints import NONE, Constraints
from autopar.spec.cluster import ClusterSpec
from autopar.spec.topology import topology_of
from autopar.strategies import Context
from autopar.strategies.lowering import lower_plan

WINDOW = 12
"""Samples below and above the equal time that are tried on each rank."""
UNBOUNDED = 1 << 30
"""Samples, where a batch takes no memory that counts."""
PLANS = ("ddp", "zero1", "sharded", "column_parallel_zero1")
"""Plans by name. The memory that one of them takes limits each rank's batch: the first with which all samples fit."""


@dataclass(frozen=True)
class Entry:
    """Equal devices of one host, or of equal hosts, and what their ranks take. Seconds and bytes grow with samples."""

    host: int
    place: int
    """Among the devices of the host's entry in the description."""
    ranks: int
    kind: str
    start_s: float
    sample_s: float
    most: int
    """Samples of a rank at most, for its memory; more where the samples fit with no plan of `PLANS`."""

    def seconds(self, samples: int) -> float:
        return self.start_s + self.sample_s * samples


def with_shares(
    samples: int,
    graph: TrainingGraph,
    cluster: ClusterSpec,
    context: Context,
    cost_model: CostModel,
    constraints: Constraints = NONE,
) -> ClusterSpec:
    """The cluster with a batch on each device, `samples` on all ranks together; what the description says of a batch
    stays. Samples that fit with no plan of `PLANS` are shared out all the same, by the devices' memory: a search knows
    leaner plans, and says by how much none fits.

    Raises `SpecError` where that cannot be done: with why, and with the nearest numbers that can be shared out."""
    problem = Problem(graph, cluster, topology_of(cluster), context.on(cluster), cost_model, constraints=constraints)
    why = why_not(graph, Fraction(2))
    if why is not None:
        raise SpecError(
            f"a global batch of {samples} cannot be shared out by what ranks compute, as batches of other sizes cannot "
            f"be priced: {why}. Give the devices of the cluster description a batch each"
        )
    said = [place.device.batch for place in cluster.ranks]
    rest, ranks = samples - sum(n for n in said if n is not None), said.count(None)
    if not ranks:
        raise SpecError(
            f"every device of the cluster has a batch in its description, {samples - rest} together: leave out a "
            f"batch, or the global batch of {samples}"
        )
    if rest < ranks:
        raise SpecError(
            f"a global batch of {samples} leaves {max(0, rest)} samples for {number_of(ranks, 'rank')}: expected one "
            "for each at least"
        )
    entries = _entries(problem, rest, ranks)
    shares = _shared(entries, rest)
    if shares is None:
        raise SpecError(_no_such_shares(entries, rest, samples))
    of = {(e.host, e.place): n for e, n in zip(entries, shares, strict=True)}
    return with_batch_of(cluster, lambda device, i, j: of.get((i, j), device.batch))


def _entries(problem: Problem, rest: int, ranks: int) -> list[Entry]:
    """The entries of the description that say no batch. A sample's seconds are the difference between two sizes of the
    batch, of which the smaller is the mean of `rest` samples on `ranks` ranks."""
    few = max(1, rest // ranks)
    few_s, twice_s = (_pricer(problem, n).graph_s(frozenset()) for n in (few, 2 * few))
    most = _limits(problem, rest)
    found, rank = [], 0
    for i, host in enumerate(problem.cluster.hosts):
        first = rank  # of its first host: the others have ranks like that one's
        for j, device in enumerate(host.devices):
            if device.batch is None:
                sample_s = max(0.0, float(twice_s[first] - few_s[first]) / few)
                start_s = max(0.0, float(few_s[first]) - few * sample_s)
                found.append(Entry(i, j, host.count * device.count, device.kind, start_s, sample_s, most[first]))
            first += device.count
        rank += host.count * sum(d.count for d in host.devices)
    return found


def _limits(problem: Problem, rest: int) -> list[int]:
    """Samples of each rank at most: those with the first of `PLANS` that has room for `rest` on the ranks whose batch
    the description does not say. Where none has, the most of a rank with any of them, all in proportion until there is
    room."""
    asked = [rank for rank, place in enumerate(problem.cluster.ranks) if place.device.batch is None]
    best = [1] * problem.context.world_size
    for limits in _limits_by_plan(problem, max(1, rest // 2)):
        if min(limits[rank] for rank in asked) >= 1 and sum(limits[rank] for rank in asked) >= rest:
            return limits
        best = [max(pair) for pair in zip(best, limits, strict=True)]
    lacking = max(Fraction(1), Fraction(rest, sum(best[rank] for rank in asked)))
    return [math.ceil(lacking * limit) for limit in best]


def _pricer(problem: Problem, batch: int) -> StepPricer:
    """Prices steps in which every rank has as large a batch."""
    topology = topology_of(with_batch_of(problem.cluster, lambda device, i, j: batch))
    return replace(problem, topology=topology).pricer or StepPricer(problem.graph, topology)


def _limits_by_plan(problem: Problem, batch: int) -> Iterator[list[int]]:
    """Samples that leave each rank within its memory with each of `PLANS`; below 1 where none do. A sample's bytes are
    the difference between a batch, which should be large, and one twice as large: with few samples, a step's fullest
    moment may be one without activations."""
    pricers = [_pricer(problem, n) for n in (batch, 2 * batch)]
    for name in PLANS:
        with contextlib.suppress(PlanError):
            groups = builder_named(name)(problem.graph.parameters, problem.context, problem.cluster)
            program = lower_plan(groups, problem.graph, problem.context)
            peaks = (pricer.estimate(program).peak_memory_bytes for pricer in pricers)
            yield [_most(a, b, batch, limit) for a, b, limit in zip(*peaks, problem.memory_limits, strict=True)]


def _most(one: int, two: int, batch: int, limit: int) -> int:
    """Samples that leave a rank within its limit, from its peak bytes with a batch, and with twice as large a one;
    below 1 where none do."""
    of_sample = (two - one) / batch
    if of_sample <= 0:
        return UNBOUNDED
    return int((limit - (one - batch * of_sample)) / of_sample)


def _shared(entries: Sequence[Entry], rest: int) -> list[int] | None:
    """Samples of each rank of an entry, `rest` together, with the least longest time; of those, with the least sum of
    times. `None` where there are none near the equal time."""
    at = [_within(e, _equal_s(entries, rest)) for e in entries]
    ways: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}  # by the samples that are given
    for entry, near in zip(entries, at, strict=True):
        further: dict[int, tuple[float, float, list[int]]] = {}
        for given, (longest, total, shares) in ways.items():
            for n in range(max(1, near - WINDOW), min(entry.most, near + WINDOW) + 1):
                sum_, seconds = given + entry.ranks * n, entry.seconds(n)
                way = (max(longest, seconds), total + entry.ranks * seconds, [*shares, n])
                if sum_ <= rest and (sum_ not in further or way < further[sum_]):
                    further[sum_] = way
        ways = further
    return ways[rest][2] if rest in ways else None


def _equal_s(entries: Sequence[Entry], rest: int) -> float:
    """Seconds after which ranks that all end then have computed `rest` samples, by bisection."""
    low, high = 0.0, max(e.seconds(rest) for e in entries)
    for _ in range(60):
        middle = (low + high) / 2
        enough = sum(e.ranks * _within(e, middle) for e in entries) >= rest
        low, high = (low, middle) if enough else (middle, high)
    return high


def _within(entry: Entry, seconds: float) -> int:
    """Samples that a rank computes in so many seconds, one at least."""
    if entry.sample_s <= 0:
        return entry.most
    return max(1, min(entry.most, math.floor((seconds - entry.start_s) / entry.sample_s)))


def _no_such_shares(entries: Sequence[Entry], rest: int, samples: int) -> str:
    near = range(1, 1 + 2 * max(e.ranks for e in entries))
    fewer = next((rest - k for k in near if _shared(entries, rest - k) is not None), None)
    more = next((rest + k for k in near if _shared(entries, rest + k) is not None), None)
    nearest = " or ".join(str(samples - rest + n) for n in (fewer, more) if n is not None)
    ranks = ", ".join(f"{e.ranks} x {e.kind}" for e in entries)
    return (
        f"a global batch of {samples} cannot be shared out in whole samples with equal batches on equal devices "
        f"({ranks}): take {nearest or 'another number'}, or give them an entry each"
    )
