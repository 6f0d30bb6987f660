"""What the tests of virtual compute run on each rank: one plan with real and with virtual compute, both recorded."""

from __future__ import annotations

import copy
import json
import time
from typing import Any

import torch
import torch.fx
from torch import nn

from autopar import ClusterSpec
from autopar.cost_models.analytic import StepPricer
from autopar.ir.batch import flatten
from autopar.ir.build import training_graph
from autopar.ir.tables import GraphTables
from autopar.runtime.compiled import Settings
from autopar.runtime.job.process_group import Group, join
from autopar.runtime.optimizers.optimizer import context_for
from autopar.runtime.program import Program
from autopar.runtime.virtual import DeviceTimes, VirtualProgram
from autopar.search import build_plan
from autopar.spec.topology import Topology
from autopar.strategies import Context
from autopar.strategies.lowering import lower_plan
from autopar.testing.recorder import Recorder

MAX_NORM = 1.0
CLUSTER = ClusterSpec.loads("{hosts: [{name: host, count: 2, devices: 2 x cpu}], network: 1GbE}")


def compare(rank: int, world_size: int, cases: list[tuple[str, bool]]) -> dict[str, Any]:
    """For each builder, with or without clipping: what real and virtual compute issue, hash and return."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(40, 12), nn.Flatten(), nn.Linear(36, 17), nn.Tanh(), nn.Linear(17, 65))
    batch = (torch.randint(0, 40, (4, 3)), torch.randint(0, 65, (4,)))
    graph = training_graph(model, flatten(batch), nn.functional.cross_entropy)
    group = join(60.0)
    return {f"{name} {clips}": _case(name, clips, model, batch, graph, group) for name, clips in cases}


def _case(name: str, clips: bool, model: nn.Module, batch: Any, graph: Any, group: Group) -> dict[str, Any]:
    n, max_norm = group.world_size, MAX_NORM if clips else None
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    context = context_for(n, optimizer, "element", max_norm, True, late_parameters=True).on(CLUSTER)
    plan = build_plan(name, graph, CLUSTER, context)

    real = Program(model, plan, group, optimizer, _settings(max_norm), context)
    compiled = real.adopt(graph, batch)
    weight = torch.ones((), dtype=torch.float64)
    with torch.no_grad():
        recorded = Recorder(compiled.graphs["step"])
        recorded.run(
            *compiled.arguments(flatten(batch).tensors, dict(model.named_parameters()), {}, torch.device("cpu")),
            weight,
            real._same_settings.with_number(weight),
        )

    # All that virtual compute is given has been through JSON, as on its way to a rank.
    tables = GraphTables.model_validate_json(GraphTables.of(graph).model_dump_json()).graph()
    program = lower_plan(plan.groups, tables, context)
    pricer = StepPricer(tables, Topology(CLUSTER))
    times = DeviceTimes.of(pricer, program, group.rank, dilation=3.0)
    virtual = VirtualProgram(tables, program, times, group, max_norm)
    with torch.no_grad():
        again = Recorder(virtual.module)
        again.run(virtual._device, weight, torch.ones(2, dtype=torch.float64))
    began = time.perf_counter()
    loss = virtual.step()
    took_s = time.perf_counter() - began
    return {
        "real": recorded.calls,
        "virtual": again.calls,
        "hashes": [compiled.program.order_hash, virtual.program.order_hash],
        "loss": float(loss),
        "took_s": took_s,
        "device_s": times.prefix_s[-1] + sum(times.work_s),
        "compute_s": pricer.estimate(program).compute_s,
    }


def _settings(max_norm: float | None) -> Settings:
    return Settings(nn.functional.cross_entropy, max_norm)


def disagree(rank: int, world_size: int) -> str:
    """What a rank says that has lowered another plan than the others."""
    torch.manual_seed(0)
    model, batch = nn.Linear(8, 8), (torch.randn(2, 8), torch.randn(2, 8))
    graph = training_graph(model, flatten(batch), nn.functional.mse_loss)
    context, cluster = Context(world_size), ClusterSpec.local(world_size)
    plan = build_plan("PartitionedPS" if rank == 1 else "ddp", graph, cluster, context)
    program = lower_plan(plan.groups, graph, context)
    times = DeviceTimes.of(StepPricer(graph, Topology(cluster)), program, rank)
    try:
        VirtualProgram(graph, program, times, join(60.0))
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return json.dumps("no error")
