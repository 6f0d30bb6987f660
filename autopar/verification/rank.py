"""A rank of a verification: it runs the program, and compares each step with the single process."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.api import optimize
from autopar.ops.fragments import Fragment
from autopar.runtime.job.servers import serve_here
from autopar.runtime.program import Program
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import FIDELITIES, Plan
from autopar.spec.topology import Topology
from autopar.strategies.lowering import rounded_forward
from autopar.verification.differences import (
    ROUNDED_TOLERANCE,
    TOLERANCE,
    Measure,
    StepDifference,
    buffer_difference,
    coarsest,
    distance,
    largest_of,
)
from autopar.verification.job import Built, Job, batches, build, check_comparable
from autopar.verification.processes import wait_for
from autopar.verification.reference import Told, done_path, step_path, tell

Seen = list[tuple[Fragment, torch.Tensor]]
"""The gradients that this rank has updated with."""


def run(rank: int, job: Job) -> None:
    """Trains, and puts down what differs."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.port),
    )
    if job.world_size > 1:
        dist.init_process_group("gloo")
    built = build(job)
    start = {n: t.detach().clone() for n, t in [*built.parameters.items(), *built.buffers().items()]}
    program = _program(rank, job, built)
    seen: Seen = []
    program.observe(lambda fragment, gradient: seen.append((fragment, gradient.clone())))
    rows, about = [], {}
    for step in range(job.steps):
        own = batches(job, built.example, step, rank)
        seen.clear()
        loss = program.step(micro_batches=own) if len(own) > 1 else program.step(own[0])
        if rank == 0:
            shared = program.compile_for(own[-1]).shared_buffers
            tell(job, step, Told(shared, rounded_forward(program.plan.groups)))
        with program.gathered():
            reference = _reference(job, step, rank)
            measure = _measure(job, program, reference["computed in"])
            rows.append(_compare(measure, step, rank, loss, seen, built, start, reference))
            about = {"tolerance": measure.tolerance, "computed_in": reference["computed in"]}
            notes = reference["notes"]
    found = {"steps": [asdict(r) for r in rows], "notes": notes, **about}
    (Path(job.folder) / f"rank{rank}.json").write_text(json.dumps(found))
    if job.world_size > 1:
        dist.destroy_process_group()


def _program(rank: int, job: Job, built: Built) -> Program:
    plan = None if job.plan is None else Plan.loads(job.plan)
    if plan is not None and job.world_size > 1 and rank == 0:
        serve_here(Topology(plan.cluster.cluster).servers)
    program = optimize(
        built.model,
        ClusterSpec.local(job.world_size) if plan is None else None,
        example_inputs=batches(job, built.example, 0, rank)[0],
        loss_fn=built.loss_fn,
        optimizer=built.optimizer,
        plan=plan,
        strategy=job.strategy,
        fidelity=FIDELITIES[-1] if job.strategy else "exact",
        clip_grad_norm=job.clip_grad_norm,
        **{"late_parameters": True, **job.settings},  # parameters are compared once they are there
    )
    check_comparable(program.plan)
    return program


def _reference(job: Job, step: int, rank: int) -> dict[str, Any]:
    path = step_path(job, step)
    wait_for(path.exists)
    reference: dict[str, Any] = torch.load(path, weights_only=True)
    done_path(job, step, rank).touch()
    return reference


def _measure(job: Job, program: Program, computed_in: str) -> Measure:
    wires = {str(g.options.get("wire", "same")) for g in program.plan.groups} & ROUNDED_TOLERANCE.keys()
    dtype = getattr(torch, computed_in)
    # One rank sends nothing; among several, a gradient flows through what is rounded.
    forward = rounded_forward(program.plan.groups) if job.world_size > 1 else ""
    through = coarsest([dtype, getattr(torch, forward)]) if forward else dtype
    usual = TOLERANCE.get(through, 16 * torch.finfo(through).eps)
    allowed = max([usual, *(ROUNDED_TOLERANCE[w] for w in wires)])
    return Measure(job.tolerance or allowed, coarsest([dtype, *(getattr(torch, w) for w in wires)]))


def _compare(
    measure: Measure,
    step: int,
    rank: int,
    loss: torch.Tensor,
    seen: Seen,
    built: Built,
    start: dict[str, torch.Tensor],
    reference: dict[str, Any],
) -> StepDifference:
    expected, held, moves = reference["parameters"], reference["buffers"][rank], reference["moves"]
    largest = largest_of(reference["gradients"])
    gradients: dict[str, float] = {}
    for f, g in seen:
        whole = reference["gradients"].get(f.name)
        if whole is None:  # one process has none in this step; the ranks send zeros, and update nothing by them
            whole = torch.zeros_like(built.parameters[f.name].detach())
        found = measure.gradient(g, f.cut(whole), largest, moves.get(f"gradients {f.name}", 0.0))
        gradients[f.name] = max(found, gradients.get(f.name, 0.0))
    farthest = max(distance(value, start[n]) for n, value in expected.items())
    values = {
        n: measure.value(p, expected[n], start[n], step + 1, farthest, moves.get(f"parameters {n}", 0.0))
        for n, p in built.parameters.items()
    }
    now = built.buffers()
    buffers = dict.fromkeys({*now, *held}, float("inf"))
    for n in now.keys() & held.keys():
        far = moves.get(f"buffers {n}", 0.0)
        buffers[n] = buffer_difference(measure, now[n], held[n], start.get(n, held[n]), step + 1, far)
    each = {n: max(values.get(n, 0.0), gradients.get(n, 0.0), buffers.get(n, 0.0)) for n in [*values, *buffers]}
    return StepDifference(
        step,
        measure.loss(loss, reference["loss"]),
        max(gradients.values(), default=0.0),
        max(values.values()),
        max(buffers.values(), default=0.0),
        max(each.items(), key=lambda x: x[1])[0],
    )
