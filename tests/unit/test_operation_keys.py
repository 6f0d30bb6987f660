"""Prices are remembered by the key of a call: calls with equal keys must declare the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.ir.batch import flatten
from autopar.ir.build import training_graph
from autopar.ops.collectives import wire_bytes
from autopar.ops.context import Context
from autopar.ops.values import Setting
from autopar.search.builders import builder_named, names
from autopar.spec.cluster import ClusterSpec
from autopar.strategies.lowering import lower_plan
from tests.gloo.operations import Net, batch

CLUSTER = ClusterSpec.loads(
    "hosts: [{name: a, count: 2, devices: 2 x cpu}, {name: s, serves: true}]\nnetwork: {bandwidth: 1 Gbit/s}"
)


class Alike(nn.Module):
    """Layers that are alike but for where they stand, and tables of one size of which other rows are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(60, 8) for _ in range(3))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        x = sum(table(indices[:, : i + 1]).sum(1) for i, table in enumerate(self.tables))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        x = torch.cat([x, x * 2])
        found: torch.Tensor = self.heads[0](x) + self.heads[1](x[:6]).sum()
        return found


def _alike() -> tuple[nn.Module, Any, Any]:
    draw = torch.Generator().manual_seed(0)
    indices = torch.randint(0, 60, (12, 4), generator=draw)
    return Alike(), (indices, torch.zeros(24, 8)), F.mse_loss


def _odd() -> tuple[nn.Module, Any, Any]:
    return Net(), batch(0), F.cross_entropy


@pytest.mark.parametrize("make", [_odd, _alike])
def test_calls_with_equal_keys_declare_the_same(make: Callable[[], tuple[nn.Module, Any, Any]]) -> None:
    model, example, loss_fn = make()
    graph, n = training_graph(model, flatten(example), loss_fn), CLUSTER.world_size
    setting = Setting(n, moved_tensors=7, rounds=True)
    known: dict[Any, tuple[str, Any]] = {}
    seen = 0
    for late in (False, True):
        context = Context(n, late_parameters=late, sparse_update=True).on(CLUSTER)
        for name in names(rounded=True, late=late):
            groups = builder_named(name)(graph.parameters, context, CLUSTER)
            for call in lower_plan(groups, graph, context).calls:
                work = tuple(call.op.work(call, rank, setting) for rank in range(n))
                size = call.op.allocates(call, setting)
                memory = None if size is None else tuple(np.broadcast_to(size, n).tolist())
                passing = tuple(np.broadcast_to(call.op.passing_bytes(call, setting), n).tolist())
                declared = (work, memory, passing, wire_bytes(call, n))
                first, expected = known.setdefault(call.key, (name, declared))
                assert declared == expected, f"{call.op.name} in {name}, and in {first}"
                seen += 1
    assert seen > 5 * len(known) > 500
