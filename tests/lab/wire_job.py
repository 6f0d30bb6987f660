"""A rank of the wire-byte test: for each number of ranks, runs each plan for some steps between two looks at the
namespace's byte counter."""

from __future__ import annotations

import copy
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from autopar.ir.batch import flatten
from autopar.ir.build import training_graph
from autopar.ir.training_graph import TrainingGraph
from autopar.runtime.compiled import Settings
from autopar.runtime.job.process_group import join
from autopar.runtime.job.servers import serve_here
from autopar.runtime.program import Program
from autopar.search import build_plan
from autopar.spec.plan import ParameterSlice, SyncGroup
from autopar.strategies import Context
from autopar.testing.cases import SERVERS, cluster_of
from autopar.testing.wire import SAMPLES, WIDE, seen_and_declared


def _group(strategy: str, names: list[str], wire: str) -> SyncGroup:
    return SyncGroup(strategy=strategy, members=tuple(ParameterSlice(name=n) for n in names), options={"wire": wire})


def bytes_of_plans(n: int, graph: TrainingGraph) -> dict[str, dict[str, int]]:
    """Of every strategy and wire format, on n ranks: bytes seen and declared."""
    model, batch, context = WIDE.model(), WIDE.batch(SAMPLES, 0), Context(n)
    base = build_plan("AllReduce", graph, cluster_of(n), context)
    members = base.groups[0].members
    assert len(base.groups) == 1
    by_kind: dict[str, list[ParameterSlice]] = {}
    for p in graph.parameters:
        by_kind.setdefault(p.structure, []).append(ParameterSlice(name=p.name))
    parts = {"rows": "sparse_rows", "factors": "sufficient_factors", "dense": "all_reduce"}
    variants: dict[str, tuple[str, dict[str, Any]]] = {
        "all_reduce": ("all_reduce", {}),
        "all_reduce-bfloat16": ("all_reduce", {"wire": "bfloat16"}),
        "parameter_server-0": ("parameter_server", {"owner": 0}),
        "parameter_server-last": ("parameter_server", {"owner": n - 1}),
        "partitioned-equal": ("partitioned_parameter_server", {}),
        "partitioned-unequal": ("partitioned_parameter_server", {"shares": tuple(float(r) for r in range(n))}),
        "sharded": ("sharded_parameters", {}),
        "sharded-kept": ("sharded_parameters", {"keep": True}),
        "servers": ("summation_servers", {}),
        "servers-unequal": ("summation_servers", {"adds_up": (*(float(r) for r in range(n)), 0.0, 2.0)}),
        "servers-float16": ("summation_servers", {"wire": "float16"}),
        "partitioned-float16": ("partitioned_parameter_server", {"wire": "float16"}),
    }
    if n == 4:
        variants["hierarchical"] = ("hierarchical_all_reduce", {"inner": 2})
        variants["hierarchical-bfloat16"] = ("hierarchical_all_reduce", {"inner": 2, "wire": "bfloat16"})
    plans: dict[str, tuple[SyncGroup, ...]] = {
        name: (SyncGroup(strategy=s, options=o, members=members),) for name, (s, o) in variants.items()
    }
    for wire in ("same", "bfloat16"):
        plans[f"parts-{wire}"] = tuple(
            SyncGroup(strategy=parts[kind], members=tuple(pieces), options={"wire": wire})
            for kind, pieces in by_kind.items()
        )
        for strategy, apart in {
            "class_sharded_head": {p.name for p in graph.parameters if p.head},
            "row_sharded_table": {p.name for p in graph.parameters if p.table},
        }.items():
            plans[f"{strategy}-{wire}"] = (
                _group(strategy, [p.name for p in graph.parameters if p.name in apart], wire),
                _group("all_reduce", [p.name for p in graph.parameters if p.name not in apart], wire),
            )
    group = join(60.0)
    found = {}
    for name, groups in plans.items():
        plan = base.model_copy(update={"groups": groups, "fidelity": "rounded"})
        mine = copy.deepcopy(model)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.01)
        program = Program(mine, plan, group, optimizer, Settings(WIDE.loss_fn), context)
        program.adopt(graph, batch)
        seen, declared = seen_and_declared(program, batch)
        found[name] = {"seen": seen, "declared": declared}
    return found


def main() -> None:
    torch.set_num_threads(1)
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    graph = training_graph(WIDE.model(), flatten(WIDE.batch(SAMPLES, 0)), WIDE.loss_fn)
    found = {}
    for i, n in enumerate(map(int, sys.argv[1:])):
        if rank >= n:
            continue
        os.environ.update(WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n), MASTER_PORT=str(port + i))
        dist.init_process_group("gloo")
        if rank == 0:
            serve_here(SERVERS)
        found[n] = bytes_of_plans(n, graph)
        dist.barrier()
        dist.destroy_process_group()
    if rank == 0:
        sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
