"""A rank of the wire-byte test: runs each plan for some steps between two looks at the namespace's byte counter."""

from __future__ import annotations

import copy
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar import ClusterSpec
from autopar.ir.batch import flatten
from autopar.ir.build import training_graph
from autopar.ir.primitives import wire_bytes
from autopar.runtime.process_group import join
from autopar.runtime.program import Program, Settings, signature_key
from autopar.search import build_plan
from autopar.spec.plan import ParameterSlice, SyncGroup
from autopar.strategies import Context

STEPS = 5
SAMPLES, WORDS = 60, 500


class Net(nn.Module):
    """Two linear layers, of which the second scores classes, and a table of which each sample looks five rows up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(500, 1001), nn.Linear(1001, 500)
        self.table = nn.Embedding(WORDS, 1001)

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x) + self.table(words).sum(1))
        scores: torch.Tensor = self.second(hidden)
        return scores


def sent_in_namespace() -> int:
    """Bytes that all processes of this namespace have sent over its loopback."""
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def _group(strategy: str, names: list[str], wire: str) -> SyncGroup:
    return SyncGroup(strategy=strategy, members=tuple(ParameterSlice(name=n) for n in names), options={"wire": wire})


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Net()
    words = torch.randint(0, WORDS // 2, (SAMPLES, 5))
    batch = ((torch.randn(SAMPLES, 500), words), torch.randint(0, 500, (SAMPLES,)))
    graph = training_graph(model, flatten(batch), nn.functional.cross_entropy)
    context = Context(n)
    base = build_plan("AllReduce", graph, ClusterSpec.local(n), context)
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
        plan = base.model_copy(update={"groups": groups})
        mine = copy.deepcopy(model)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.01)
        program = Program(mine, plan, group, optimizer, Settings(nn.functional.cross_entropy), context)
        compiled = program.adopt(signature_key(mine, flatten(batch)), graph)
        program.step(batch)
        dist.barrier()
        looks = []
        for _ in range(STEPS):
            before = sent_in_namespace()
            dist.barrier()
            program.step(batch)
            dist.barrier()
            looks.append(sent_in_namespace() - before)
        seen = statistics.median(looks)  # on a busy machine TCP now and then sends a segment twice
        declared = sum(sum(wire_bytes(p, n)[0]) for p in compiled.program.primitives)
        found[name] = {"seen": seen, "declared": declared}
    if rank == 0:
        sys.stdout.write(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
