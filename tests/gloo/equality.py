"""What an equality test runs on each rank: a plan's program, and the same training in one process."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from autopar import Plan
from autopar.ir.batch import flatten
from autopar.ir.build import training_graph
from autopar.ir.training_graph import TrainingGraph
from autopar.runtime.compiled import Settings
from autopar.runtime.job.process_group import Group, join
from autopar.runtime.job.servers import serve_here
from autopar.runtime.optimizers.optimizer import context_for
from autopar.runtime.program import Program
from autopar.search import build_plan
from autopar.search.builders import builder_named
from autopar.spec.plan import ParameterSlice, SyncGroup
from autopar.strategies import Context
from autopar.testing import classes, lookups
from autopar.testing.cases import SERVERS, cluster_of
from autopar.testing.tasks import Task, seeded
from autopar.testing.training import SAMPLES, TRAININGS, batches, trained
from benchmarks.zoo import find, huggingface, plain
from benchmarks.zoo.batches import CLASSES
from benchmarks.zoo.resnet import ResNet

STEPS = 10
CLASSES_OF = {"classes": 13, "few-classes": 3, "smoothed": 13}
"""Of models with a head."""


@dataclass(frozen=True)
class Case:
    """One equality test."""

    model: str
    strategy: str
    training: str
    samples: str

    def __str__(self) -> str:
        return f"{self.model}-{self.strategy}-{self.training}-{self.samples}"


@cache
def task(name: str) -> Task:
    """A model in float64, its batches and its loss."""
    if name == "gpt2":  # its own loss is computed in float32, whatever the model's dtype
        entry = find(huggingface.ENTRIES, "gpt2")
        return Task(
            name,
            seeded(entry.build),
            lambda n, s: _with_ignored(entry.batch(n, s), s),
            language_loss,
            lambda target: classes.weight(target[:, 1:]),
        )
    if name == "resnet":  # shallow: over the few pixels of a deep stage, batch norm of three samples is ill-conditioned
        images = find(plain.ENTRIES, "resnet18")
        model = seeded(lambda: ResNet((1, 1), width=8, classes=CLASSES))
        return Task(name, model, lambda n, s: _double(images.batch(n, s)), images.loss_fn)
    if name in CLASSES_OF:
        number = CLASSES_OF[name]
        model = seeded(lambda: classes.Classes(number, bias=name == "classes"))
        loss = classes.smoothed_loss if name == "smoothed" else classes.loss
        return Task(name, model, lambda n, s: classes.batch(n, s, number), loss, classes.weight)
    if name == "lookups":
        return Task(name, seeded(lookups.Lookups), lookups.batch, F.mse_loss)
    entry = find(plain.ENTRIES, name)
    return Task(name, seeded(entry.build), lambda n, s: _double(entry.batch(n, s)), entry.loss_fn)


def language_loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """Next-token cross-entropy, ignoring -100, in the model's own dtype."""
    logits = output.logits[:, :-1]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))


def _with_ignored(batch: Any, seed: int) -> Any:
    labels = batch["input_ids"].clone()
    labels[0, : 2 + seed % 5] = -100  # so that ranks count differently many targets
    return {"input_ids": batch["input_ids"]}, labels


def _double(batch: Any) -> Any:
    flat = flatten(batch)
    return flat.rebuild(tuple(t.double() if t.is_floating_point() else t for t in flat.tensors))


@cache
def captured(model: str, samples: int) -> TrainingGraph:
    """The graph of a model for a batch size; the same for every plan."""
    made = task(model)
    return training_graph(made.model(), flatten(made.batch(samples, 0)), made.loss_fn)


def capture_all(runs: Mapping[int, Sequence[Case]]) -> None:
    """Captures what the cases of each world size train."""
    for world_size, cases in runs.items():
        for case in cases:
            for rank in range(world_size):
                captured(case.model, SAMPLES[case.samples][rank])


@cache
def group(world_size: int) -> Group:
    """The one process group of all programs of a world size, and the servers beside it."""
    joined = join(120.0)
    if joined.rank == 0 and world_size > 1:
        serve_here(SERVERS)
    return joined


def plan_for(strategy: str, graph: TrainingGraph, world_size: int, context: Context) -> Plan:
    """A plan by a builder's name; `mixed` has every strategy, slices, and unequal shares in one model; `parts` sends
    what gradients are made of, for all that have structure; `late` leaves parameters to the next step; `heads` shares
    the classes of heads out; `shares` the rows of tables as well; `servers` has hosts that serve add up; `sharded`
    gathers parameters for each pass; `layers` shares the outputs of linear layers out."""
    if (key := (id(graph), world_size, context)) not in _bases:
        _bases[key] = build_plan("AllReduce", graph, cluster_of(world_size), context)
    of = _OWN_GROUPS.get(strategy)
    groups = of(graph, world_size) if of else builder_named(strategy)(graph.parameters, context, cluster_of(world_size))
    return _bases[key].model_copy(update={"groups": groups})


_bases: dict[tuple[int, int, Context], Plan] = {}
"""Plans of which other groups are made, by their graph, ranks and context; graphs live as long."""


def _mixed(graph: TrainingGraph, world_size: int) -> tuple[SyncGroup, ...]:
    largest = max(graph.parameters, key=lambda p: (len(p.spec.shape) > 1, p.numel))
    rest = sorted((p for p in graph.parameters if p is not largest), key=lambda p: p.ready)
    rows = largest.spec.shape[0]
    cut = max(1, rows // 3)
    shares = tuple(float(r) for r in range(world_size)) if world_size > 1 else ()
    return (
        SyncGroup(strategy="partitioned_parameter_server", options={"shares": shares}, members=_whole(rest[::3])),
        SyncGroup(strategy="parameter_server", options={"owner": world_size - 1}, members=_whole(rest[1::3])),
        SyncGroup(strategy="all_reduce", members=(ParameterSlice(name=largest.name, start=cut, stop=rows),)),
        SyncGroup(
            strategy="partitioned_parameter_server",
            members=(ParameterSlice(name=largest.name, start=0, stop=cut), *_whole(rest[2::3])),
        ),
    )


def _by_structure(graph: TrainingGraph, world_size: int) -> tuple[SyncGroup, ...]:
    """Tables in two groups, each product in its own, the rest in one."""
    by_kind = {k: [p for p in graph.parameters if p.structure == k] for k in ("rows", "factors", "dense")}
    rows, factors, dense = by_kind["rows"], by_kind["factors"], by_kind["dense"]
    groups = [
        *(SyncGroup(strategy="sparse_rows", members=_whole(part)) for part in (rows[::2], rows[1::2]) if part),
        *(SyncGroup(strategy="sufficient_factors", members=_whole([p])) for p in factors[2:]),
        *(SyncGroup(strategy="sufficient_factors", members=_whole(factors[:2])) for _ in factors[:1]),
        *(SyncGroup(strategy="all_reduce", members=_whole(dense)) for _ in dense[:1]),
    ]
    return tuple(groups)


def _in_shares(graph: TrainingGraph, world_size: int, *, with_tables: bool) -> tuple[SyncGroup, ...]:
    """Classes shared out, and the rows of tables, in two groups; the rest in one."""
    heads = [[p for p in graph.parameters if p.head == h] for h in dict.fromkeys(p.head for p in graph.parameters) if h]
    tables = [p for p in graph.parameters if with_tables and p.table is not None and p.head is None]
    assert heads or tables, "the model has neither a head nor a table"
    rest = [p for p in graph.parameters if p.head is None and p not in tables]
    return (
        *(SyncGroup(strategy="class_sharded_head", members=_whole(head)) for head in heads),
        *(SyncGroup(strategy="row_sharded_table", members=_whole(t)) for t in (tables[::2], tables[1::2]) if t),
        *(SyncGroup(strategy="all_reduce", members=_whole(rest)) for _ in rest[:1]),
    )


def _layers(graph: TrainingGraph, world_size: int) -> tuple[SyncGroup, ...]:
    """The outputs of every linear layer shared out, the rest gathered for each pass or in one all-reduce."""
    layers = [p for p in graph.parameters if p.layer is not None]
    assert layers, "the model has no linear layer"
    rest = [p for p in graph.parameters if p.layer is None]
    gathered, summed = rest[::2], rest[1::2]
    return (
        *(SyncGroup(strategy="column_parallel_linear", members=_whole([p])) for p in layers),
        *(SyncGroup(strategy="sharded_parameters", members=_whole(some)) for some in (gathered,) if some),
        *(SyncGroup(strategy="all_reduce", members=_whole(some)) for some in (summed,) if some),
    )


def _late(graph: TrainingGraph, world_size: int) -> tuple[SyncGroup, ...]:
    """Parameters that come back in the next step: from all ranks, from one; and some that come back in this one, beside
    the backward pass."""
    by_use = sorted(graph.parameters, key=lambda p: p.ready)
    options: tuple[dict[str, Any], ...]
    options = ({"late": True}, {"owner": world_size - 1, "late": True}, {"early": 0.5})
    names = ("partitioned_parameter_server", "parameter_server", "partitioned_parameter_server")
    return tuple(
        SyncGroup(strategy=name, options=chosen, members=_whole(by_use[i::3]))
        for i, (name, chosen) in enumerate(zip(names, options, strict=True))
        if by_use[i::3]
    )


def _sharded(graph: TrainingGraph, world_size: int) -> tuple[SyncGroup, ...]:
    """Parameters in shares of rows: gathered for each pass, gathered once, and some that are whole all the time."""
    chosen: tuple[tuple[str, dict[str, Any]], ...]
    chosen = (("sharded_parameters", {}), ("sharded_parameters", {"keep": True}), ("all_reduce", {}))
    by_use = sorted(graph.parameters, key=lambda p: p.first_use)
    cuts = [by_use[: len(by_use) // 2], by_use[len(by_use) // 2 : -1], by_use[-1:]]
    return tuple(
        SyncGroup(strategy=name, options=options, members=_whole(some))
        for (name, options), some in zip(chosen, cuts, strict=True)
        if some
    )


def _served(graph: TrainingGraph, world_size: int) -> tuple[SyncGroup, ...]:
    """Added up by servers alone, by ranks and one server, and by all-reduce between them."""
    mixed = (*(float(r) for r in range(world_size)), 0.0, 1.5)
    chosen: tuple[tuple[str, dict[str, Any]], ...]
    chosen = (("summation_servers", {}), ("all_reduce", {}), ("summation_servers", {"adds_up": mixed}))
    return tuple(
        SyncGroup(strategy=name, options=options, members=_whole(list(graph.parameters[i::3])))
        for i, (name, options) in enumerate(chosen)
        if graph.parameters[i::3]
    )


def _whole(parameters: list[Any]) -> tuple[ParameterSlice, ...]:
    return tuple(ParameterSlice(name=p.name) for p in parameters)


_OWN_GROUPS: dict[str, Callable[[TrainingGraph, int], tuple[SyncGroup, ...]]] = {
    "servers": _served,
    "sharded": _sharded,
    "heads": partial(_in_shares, with_tables=False),
    "shares": partial(_in_shares, with_tables=True),
    "layers": _layers,
    "late": _late,
    "parts": _by_structure,
    "mixed": _mixed,
}


def run_case(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    """What bits a rank's parameters have after a plan's training; and, on one of the ranks, how far they are from one
    process's. Which rank that is depends on what one process trains, so that each such training is done once."""
    made, how = task(case.model), TRAININGS[case.training]
    model = made.model()
    optimizer = how.optimizer(model.parameters())
    context = context_for(world_size, optimizer, "element", how.clip, True, late_parameters=True)
    graph = captured(case.model, SAMPLES[case.samples][rank])
    plan = plan_for(case.strategy, graph, world_size, context)
    program = Program(model, plan, group(world_size), optimizer, Settings(made.loss_fn, how.clip), context)
    first = batches(made, case.training, case.samples, 0, rank)[0]
    program.adopt(graph, first)
    outcome = trained(program, made, case.training, case.samples, STEPS)
    compares = zlib.crc32(f"{case.model} {case.training} {case.samples}".encode()) % world_size == rank
    differences = outcome.differences(made, case.training, case.samples, world_size) if compares else {}
    return {"digest": outcome.digest, **differences}


def run_cases(rank: int, world_size: int, cases: list[Case]) -> list[dict[str, Any]]:
    """Runs all cases on this rank, in order."""
    return [run_case(rank, world_size, copy.copy(c)) for c in cases]
