"""Random valid plans for a captured model."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from autopar.errors import PlanError
from autopar.ir.training_graph import Parameter, TrainingGraph
from autopar.spec.plan import ParameterSlice, Plan, SyncGroup
from autopar.strategies import STRATEGIES, Context, Member, Strategy
from autopar.strategies.lowering import lower_plan
from autopar.testing.cases import cluster_of
from benchmarks.fuzz.case import Case

_ATTEMPTS = 12


def random_plan(case: Case, graph: TrainingGraph, context: Context) -> Plan:
    """The case's plan: its own groups, or those that its seed leads to."""
    cluster = cluster_of(context.world_size)
    groups = groups_of(case.groups) if case.groups else random_groups(case.plan_seed, graph, context.on(cluster))
    return Plan(name="fuzz", model=graph.model, cluster=cluster.fingerprint, groups=groups, recompute=case.recompute)


def groups_of(text: str) -> tuple[SyncGroup, ...]:
    """Groups from JSON."""
    return tuple(SyncGroup.model_validate(g) for g in json.loads(text))


def as_text(groups: Sequence[SyncGroup]) -> str:
    """Groups as JSON."""
    return json.dumps([g.model_dump(exclude_defaults=True, mode="json") for g in groups])


def random_groups(seed: int, graph: TrainingGraph, context: Context) -> tuple[SyncGroup, ...]:
    """Every parameter whole or in slices, in groups of one strategy each, in random order."""
    for attempt in range(_ATTEMPTS):
        rng = random.Random(1000 * seed + attempt)
        groups = _drawn(rng, graph, context)
        try:
            lower_plan(groups, graph, context)
        except PlanError:
            continue
        return groups
    return tuple(SyncGroup(strategy="all_reduce", members=(ParameterSlice(name=p.name),)) for p in graph.parameters)


EXACT = {n: s for n, s in STRATEGIES.items() if s.fidelity(s.options_type()) == "exact"}
"""Strategies of which numbers are compared with one process's."""


def _drawn(rng: random.Random, graph: TrainingGraph, context: Context) -> tuple[SyncGroup, ...]:
    favourite = rng.choice([*EXACT, ""])
    by_kind: dict[tuple[str, str], list[ParameterSlice]] = {}
    groups: list[SyncGroup] = []
    taken: set[str] = set()
    parameters = [*graph.parameters]
    rng.shuffle(parameters)
    for p in parameters:
        if p.name in taken:
            continue
        pieces = _pieces(rng, p, context)
        for piece in pieces:
            able = [n for n, s in EXACT.items() if s.applies(Member(piece, p), context) is None]
            name = favourite if favourite in able and rng.random() < 0.7 else rng.choice(able)
            if name == "class_sharded_head" and p.head is not None:
                both = [q for q in parameters if q.head == p.head and q.name not in taken]
                taken |= {q.name for q in both}
                members = tuple(ParameterSlice(name=q.name) for q in both)
                groups.append(SyncGroup(strategy=name, members=members, options=_options(rng, name, context)))
            elif name == "column_parallel_linear":
                groups.append(SyncGroup(strategy=name, members=(piece,), options=_options(rng, name, context)))
            else:
                by_kind.setdefault((name, p.spec.dtype), []).append(piece)
        taken.add(p.name)
    for (name, _), pieces in by_kind.items():
        rng.shuffle(pieces)
        while pieces:
            count = rng.choice((1, 1, 2, 3, 5))
            some, pieces = pieces[:count], pieces[count:]
            groups.append(SyncGroup(strategy=name, members=tuple(some), options=_options(rng, name, context)))
    rng.shuffle(groups)
    return tuple(groups)


def _pieces(rng: random.Random, p: Parameter, context: Context) -> list[ParameterSlice]:
    dims = [i for i, s in enumerate(p.spec.shape) if s > 0]
    if not dims or not context.elementwise_update or rng.random() < 0.55:
        return [ParameterSlice(name=p.name)]
    dim = rng.choice(dims)
    extent = p.spec.shape[dim]
    cuts = sorted(rng.sample(range(1, extent), min(extent - 1, rng.choice((1, 1, 2, 3)))))
    edges = [0, *cuts, extent]
    return [ParameterSlice(name=p.name, dim=dim, start=a, stop=b) for a, b in pairwise(edges)]


def _options(rng: random.Random, name: str, context: Context) -> dict[str, Any]:
    """Draws of the options that a strategy has; number formats on the wire stay the parameters' own."""
    drawn: dict[str, Any] = {}
    for field, info in STRATEGIES[name].options_type.model_fields.items():
        if rng.random() < 0.4 or field == "wire":
            continue
        value = _option(rng, field, info.annotation, STRATEGIES[name], context)
        if value is not None:
            drawn[field] = value
    return drawn


def _option(rng: random.Random, field: str, kind: Any, strategy: Strategy, context: Context) -> Any:
    n = context.world_size
    if field == "owner":
        return rng.randrange(n)
    if field in ("shares", "adds_up"):
        count = n if field == "shares" else n + len(context.servers)
        drawn = [rng.choice((0.0, 0.5, 1.0, 2.5)) for _ in range(count)]
        return tuple(drawn) if sum(drawn) else None
    if field == "late":
        return rng.random() < 0.6 and context.late_parameters
    if field == "early":
        return rng.choice((0.25, 0.5, 1.0))
    if kind is bool:
        return rng.random() < 0.5
    offered = {getattr(o, field) for o in strategy.options(context)}
    return rng.choice(sorted(offered)) if offered else None
