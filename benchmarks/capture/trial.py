"""One model on one rank: trained with autopar in both of its modes under three plans, and compared with plain PyTorch.

The plans: the one that is searched for (with `measure_compute`); partitioned parameter servers, or, as a drop-in module
has no optimizer, partitioned all-reduces; and a random one, in which every parameter or slice of one has any strategy
that applies.
"""

from __future__ import annotations

import copy
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

import autopar
from autopar.errors import AutoparError, VerificationError
from autopar.ir.outline import Outline
from autopar.ir.training_graph import TrainingGraph
from autopar.runtime.base_program import BaseProgram
from autopar.runtime.process_group import Group
from autopar.runtime.program import Program
from benchmarks.capture.outcome import Outcome, Run
from benchmarks.capture.reference import STEPS, Judge, Trained, batch_of, moved, optimizer_of, train, values_of
from benchmarks.fuzz.plans import random_groups
from benchmarks.zoo.entry import Entry

PLANS = {"step": ("searched", "PartitionedPS", "random"), "module": ("searched", "PartitionedAR", "random")}
SEARCH_BUDGET_S = 0.3
"""That a plan is found is what is tried here, not how good it is."""


def attempt(entry: Entry, group: Group) -> Outcome:
    """All runs of a model."""
    began = time.perf_counter()
    try:
        judge = _judge(entry, group)
    except Exception as e:  # whatever the model raises
        return Outcome(entry.name, failure=said(e), unusable=True, trace=traceback.format_exc(limit=-6))
    runs, trace = [], ""
    for run, told in _runs(judge, group):
        runs.append(run)
        trace = trace or told
        torch._dynamo.reset()
    parameters = sum(p.numel() for p in judge.model.parameters())
    dtype = str(judge.dtype).removeprefix("torch.")
    return Outcome(entry.name, parameters, dtype, time.perf_counter() - began, tuple(runs), trace=trace)


def said(e: BaseException) -> str:
    """An error in one line: its class, and its message without what follows the first paragraph."""
    lines = [line.strip() for line in str(e).strip().splitlines()] or ["no message"]
    return f"{type(e).__name__}: {' '.join(lines[:3])}"[:500]


def _eagerly(words: Iterable[Any]) -> str:
    """The warning that the model runs eagerly, where there is one."""
    return next((" ".join(str(w).split())[:400] for w in words if "runs eagerly" in str(w)), "")


def _judge(entry: Entry, group: Group) -> Judge:
    """The model with its reference, in float64 where it can be trained so. Raises what the model raises, and
    `ValueError` where two trainings differ or lead to no numbers."""
    model = entry.build()
    try:
        wide = copy.deepcopy(model).double()
        expected = train(entry, wide, group.world_size, torch.float64)
        model, dtype = wide, torch.float64
    except Exception:  # it converts to float32 somewhere, or a kernel has no float64
        dtype = torch.float32
        expected = train(entry, model, group.world_size, dtype)
    judge = Judge(entry, model, group.world_size, dtype, expected)
    if not all(u.isfinite().all() for tree in expected.updates for u in tree.values()):
        raise ValueError("plain training leads to numbers that are not finite")
    _, where = judge.worst(train(entry, model, group.world_size, dtype))
    if where:
        raise ValueError(f"two plain trainings differ: {where}")
    return judge


def _runs(judge: Judge, group: Group) -> Iterator[tuple[Run, str]]:
    """Each run, and the traceback of what it raised."""
    for mode, names in PLANS.items():
        plan: autopar.Plan | None = None
        for name in names:
            began = time.perf_counter()
            run, trace = Run(mode, name, "crashed"), ""
            try:
                run, plan = _run(judge, group, run, plan)
            except VerificationError as e:
                run, trace = replace(run, kind="wrong", said=said(e)), traceback.format_exc(limit=-6)
            except AutoparError as e:
                run, trace = replace(run, kind="refused", said=said(e)), traceback.format_exc(limit=-6)
            except Exception as e:  # which is a finding
                run, trace = replace(run, said=said(e)), traceback.format_exc(limit=-8)
            yield replace(run, seconds=run.seconds or time.perf_counter() - began), trace
            if plan is None:
                break  # the others would say the same


def _run(judge: Judge, group: Group, run: Run, drawn: autopar.Plan | None) -> tuple[Run, autopar.Plan]:
    """Trains under a plan. `drawn`: the random one of this mode. Returns it, too."""
    entry, model, mode = judge.entry, copy.deepcopy(judge.model), run.mode
    start, optimizer = values_of(model), optimizer_of(model)
    batch = batch_of(entry, 0, group.rank, judge.dtype)
    settings: dict[str, Any] = {"unused_parameters": "freeze", "time_budget_s": SEARCH_BUDGET_S}
    if mode == "step":
        settings |= {"optimizer": optimizer, "loss_fn": entry.loss_fn, "example_inputs": batch}
    else:
        settings |= {"example_inputs": batch if entry.loss_fn is None else batch[0]}
    if run.plan == "searched":
        settings |= {"measure_compute": True}
    elif run.plan == "random":
        settings |= {"plan": drawn}
    else:
        settings |= {"strategy": run.plan}
    began = time.perf_counter()
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made: Any = autopar.optimize(model, timeout_s=group.timeout_s, **settings)
    seconds = time.perf_counter() - began
    found = Trained([], [])
    for step in range(STEPS):
        torch.manual_seed(step)
        mine = batch_of(entry, step, group.rank, judge.dtype)
        if isinstance(made, Program):
            loss = made.step(mine)
        else:
            optimizer.zero_grad()
            loss = entry.loss(made, mine)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        found.losses.append([loss.item()])
        if isinstance(made, Program):
            with made.gathered():
                found.updates.append(moved(values_of(model), start))
        else:
            found.updates.append(moved(values_of(model), start))
    size, where = judge.worst(found, _mean if mode == "step" else lambda losses: [losses[group.rank]])
    strategies = ", ".join(dict.fromkeys(g.strategy for g in made.plan.groups))
    run = replace(run, kind="wrong" if where else "equal", said=where, error=size, seconds=seconds)
    program = made if isinstance(made, Program) else made.program
    graph = next(iter(program._compiled if program._outlined is None else [program._outlined])).graph
    eager = _eagerly(w.message for w in caught) or "(said on rank 0)" if isinstance(graph.joint, Outline) else ""
    return replace(run, strategies=strategies, eager=eager), _random(entry, graph, program)


def _mean(losses: list[float]) -> list[float]:
    return [sum(losses) / len(losses)]


def _random(entry: Entry, graph: TrainingGraph, program: BaseProgram) -> autopar.Plan:
    """Random groups of what was captured, alike on all ranks."""
    seed = sum(map(ord, entry.name))
    plan = program.plan
    groups = random_groups(seed, graph, program._context)
    return autopar.Plan(name="random", model=plan.model, cluster=plan.cluster, groups=groups)
