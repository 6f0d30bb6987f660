"""Prices are remembered by the key of a call: calls with equal keys must declare the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.nn.functional as F

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


def test_calls_with_equal_keys_declare_the_same() -> None:
    graph, n = training_graph(Net(), flatten(batch(0)), F.cross_entropy), CLUSTER.world_size
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
