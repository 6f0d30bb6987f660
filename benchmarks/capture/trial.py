"""One model on one rank: trained with autopar in both of its modes under three plans, and compared with plain PyTorch.

The plans: the one that is searched for (with `measure_compute`); partitioned parameter servers, or, as a drop-in module
has no optimizer, partitioned all-reduces; and a random one, in which every parameter or slice of one has any strategy
that applies. What was captured for the first is taken for the others.
"""

from __future__ import annotations

import copy
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.errors import AutoparError, VerificationError
from autopar.ir.batch import flatten, module_batch
from autopar.ir.outline import Outline
from autopar.ir.training_graph import TrainingGraph
from autopar.runtime.base_program import BaseProgram
from autopar.runtime.drop_in.module import SyncedModule
from autopar.runtime.job.process_group import Group
from autopar.runtime.program import Program
from autopar.search import build_plan
from benchmarks.capture.outcome import Kind, Outcome, Run
from benchmarks.capture.reference import (
    STEPS,
    Judge,
    Trained,
    Tree,
    batch_of,
    fill,
    moved,
    optimizer_of,
    train,
    values_of,
)
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
    `ValueError` where two trainings differ or lead to no numbers. The other rank's training is the second one."""
    judge: Judge | None = None
    try:
        judge = _referred(entry, group.world_size)
    finally:
        alike = _alike(bytes(32) if judge is None else judge.expected.digest(), group)
    if not all(u.isfinite().all() for tree in judge.expected.updates for u in tree.values()):
        raise ValueError("plain training leads to numbers that are not finite")
    _, where = (0.0, "") if alike else judge.worst(train(entry, judge.model, group.world_size, judge.dtype))
    if where:
        raise ValueError(f"two plain trainings differ: {where}")
    return judge


def _referred(entry: Entry, world_size: int) -> Judge:
    """The model with one training of it."""
    model = entry.build()
    try:
        wide = copy.deepcopy(model).double()
        return Judge(entry, wide, world_size, torch.float64, train(entry, wide, world_size, torch.float64))
    except Exception:  # it converts to float32 somewhere, or a kernel has no float64
        return Judge(entry, model, world_size, torch.float32, train(entry, model, world_size, torch.float32))


def _alike(digest: bytes, group: Group) -> bool:
    """Whether several ranks have trained, each by itself, and all have the same to the last bit."""
    if group.pg is None:
        return False
    own = torch.tensor(list(digest), dtype=torch.uint8)
    every = [torch.empty_like(own) for _ in range(group.world_size)]
    dist.all_gather(every, own, group.pg)
    return all(torch.equal(one, own) for one in every)


def _runs(judge: Judge, group: Group) -> Iterator[tuple[Run, str]]:
    """Each run, and the traceback of what it raised."""
    for mode, names in PLANS.items():
        made: _Made | None = None
        for name in names:
            began = time.perf_counter()
            run, trace = Run(mode, name, "crashed"), ""
            try:
                plan = None if made is None else _plan(name, made, judge.entry)
                if made is None or plan is None or not made.program._is_whole():  # rows live on one rank each
                    made = _made(judge, group, mode, plan)
                else:
                    made = made.under(plan)
                run = _trained(judge, group, run, made, time.perf_counter() - began)
            except VerificationError as e:
                run, trace = replace(run, kind="wrong", said=said(e)), traceback.format_exc(limit=-6)
            except AutoparError as e:
                run, trace = replace(run, kind="refused", said=said(e)), traceback.format_exc(limit=-6)
            except Exception as e:  # which is a finding
                run, trace = replace(run, said=said(e)), traceback.format_exc(limit=-8)
            yield replace(run, seconds=run.seconds or time.perf_counter() - began), trace
            if made is None:
                break  # the others would say the same


@dataclass(frozen=True)
class _Made:
    """What `optimize` has made of a model in one mode."""

    model: nn.Module
    start: Tree
    buffers: Tree
    optimizer: torch.optim.Optimizer
    result: Program | SyncedModule
    batch: Any
    eager: str
    """Why it runs eagerly."""

    @property
    def program(self) -> BaseProgram:
        return self.result if isinstance(self.result, Program) else self.result.program

    @property
    def graph(self) -> TrainingGraph:
        program = self.program
        return next(iter(program._compiled if program._outlined is None else [program._outlined])).graph

    def under(self, plan: autopar.Plan) -> _Made:
        """The same under another plan, from the same values, without capturing it again."""
        fill(self.model.named_parameters(), self.start)
        fill(self.model.named_buffers(), self.buffers)
        for p in self.model.parameters():
            p.grad = None
        program, optimizer = self.program, optimizer_of(self.model)
        graph, context, settings = self.graph, program._context, program.settings
        if isinstance(self.result, Program):
            made = Program(self.model, plan, program._group, optimizer, settings, context)
            made.adopt(graph, self.batch)
            return replace(self, optimizer=optimizer, result=made)
        gradients = type(self.result.program)(self.model, plan, program._group, settings, context)
        gradients.adopt(graph, self.batch)
        return replace(self, optimizer=optimizer, result=SyncedModule(gradients))


def _made(judge: Judge, group: Group, mode: str, plan: autopar.Plan | None) -> _Made:
    """The model, from its first values, with a plan or with the one that is searched for."""
    entry, model = judge.entry, copy.deepcopy(judge.model)
    start, optimizer = values_of(model), optimizer_of(model)
    buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
    batch = batch_of(entry, 0, group.rank, judge.dtype)
    settings: dict[str, Any] = {"unused_parameters": "freeze", "time_budget_s": SEARCH_BUDGET_S}
    if mode == "step":
        settings |= {"optimizer": optimizer, "loss_fn": entry.loss_fn, "example_inputs": batch}
    else:
        batch = batch if entry.loss_fn is None else batch[0]
        settings |= {"example_inputs": batch}
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings |= {"measure_compute": True} if plan is None else {"plan": plan}
        result: Any = autopar.optimize(model, timeout_s=group.timeout_s, **settings)
    flat = flatten(batch) if mode == "step" else module_batch(model, batch)
    found = _Made(model, start, buffers, optimizer, result, flat, _eagerly(w.message for w in caught))
    return replace(found, eager=(found.eager or "said on rank 0") if isinstance(found.graph.joint, Outline) else "")


def _trained(judge: Judge, group: Group, run: Run, made: _Made, seconds: float) -> Run:
    """A few steps, compared with the reference."""
    found, program, optimizer = Trained([], []), made.result, made.optimizer
    for step in range(STEPS):
        torch.manual_seed(step)
        mine = batch_of(judge.entry, step, group.rank, judge.dtype)
        if isinstance(program, Program):
            found.losses.append([program.step(mine).item()])
            with program.gathered():
                found.updates.append(moved(values_of(made.model), made.start))
        else:
            optimizer.zero_grad()
            loss = judge.entry.loss(program, mine)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            found.losses.append([loss.item()])
            found.updates.append(moved(values_of(made.model), made.start))
    size, where = judge.worst(found, _mean if run.mode == "step" else lambda losses: [losses[group.rank]])
    strategies = ", ".join(dict.fromkeys(g.strategy for g in program.plan.groups))
    kind: Kind = "wrong" if where else "equal"
    return replace(run, kind=kind, said=where, error=size, seconds=seconds, strategies=strategies, eager=made.eager)


def _plan(name: str, made: _Made, entry: Entry) -> autopar.Plan:
    """A builder's plan by name, or random groups, which are alike on all ranks."""
    plan, graph, context = made.program.plan, made.graph, made.program._context
    if name != "random":
        return build_plan(name, graph, plan.cluster.cluster, context)
    groups = random_groups(sum(map(ord, entry.name)), graph, context)
    return autopar.Plan(name="random", model=plan.model, cluster=plan.cluster, groups=groups)


def _mean(losses: list[float]) -> list[float]:
    return [sum(losses) / len(losses)]
