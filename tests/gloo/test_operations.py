"""Every operation, run: what it declares of its value, its memory and its arithmetic is what it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F

import autopar
from autopar import ClusterSpec, Plan
from autopar.spec.plan import SyncGroup
from autopar.spec.plan_parts import TIMING
from tests.gloo.operations import Net, batch, differences
from tests.gloo.ranks import run_ranks

NAMES = ("table.weight", "inner.weight", "inner.bias", "head.weight", "head.bias")
PLANS: dict[str, list[tuple[str, tuple[str, ...], dict[str, Any]]]] = {
    "replicas": [
        ("sparse_rows", ("table.weight",), {}),
        ("sufficient_factors", ("inner.weight",), {}),
        ("all_reduce", ("inner.bias", "head.weight"), {"wire": "bfloat16"}),
        ("parameter_server", ("head.bias",), {"owner": 1}),
    ],
    "shards": [
        ("row_sharded_table", ("table.weight",), {}),
        ("column_parallel_linear", ("inner.weight",), {}),
        ("class_sharded_head", ("head.weight", "head.bias"), {}),
        ("partitioned_parameter_server", ("inner.bias",), {}),
    ],
    "gathered": [("sharded_parameters", NAMES, {})],
    "sparsified": [
        ("top_k", ("table.weight", "inner.bias"), {"density": 0.1}),
        ("random_k", ("inner.weight",), {"density": 0.1, "chunk": 7}),
        ("dgc", ("head.weight", "head.bias"), {"chunk": 10}),
    ],
    "compressed": [
        ("power_sgd", ("table.weight", "inner.bias", "head.weight"), {"rank": 2}),
        ("power_sgd", ("inner.weight", "head.bias"), {}),
    ],
    "in few bits": [
        ("quantized", ("table.weight", "inner.bias"), {"bits": 4, "rotated": True, "exchange": "parts"}),
        ("scaled_sign", ("inner.weight",), {"exchange": "gather"}),
        ("terngrad", ("head.weight", "head.bias"), {"exchange": "parts"}),
    ],
    "frozen": [
        ("one_bit_adam", ("table.weight", "inner.bias"), {"from_step": 2, "exchange": "parts"}),
        ("one_bit_adam", ("inner.weight",), {"from_step": 1, "exchange": "gather"}),
        ("all_reduce", ("head.weight", "head.bias"), {}),
    ],
    "differences": [
        ("weight_differences", ("inner.bias", "table.weight", "inner.weight"), {"block": 64}),
        ("weight_differences", ("head.weight",), {"bits": 4, "block": 16, "rotated": True}),
        ("all_reduce", ("head.bias",), {}),
    ],
    "timed": [
        ("all_reduce", ("table.weight", "inner.bias"), {"every": 2}),
        ("partitioned_parameter_server", ("inner.weight",), {"delay": 2}),
        ("all_reduce", ("head.weight", "head.bias"), {"delay": 1, "wire": "bfloat16"}),
    ],
}


def plan_of(groups: list[tuple[str, tuple[str, ...], dict[str, Any]]], n: int) -> str:
    made = autopar.plan(Net(), ClusterSpec.local(n), example_inputs=batch(0), loss_fn=F.cross_entropy, strategy="ddp")
    chosen = tuple(
        SyncGroup.model_validate(
            {
                "strategy": strategy,
                "members": [{"name": name} for name in names],
                "options": {k: v for k, v in said.items() if k not in TIMING},
                **{k: v for k, v in said.items() if k in TIMING},
            }
        )
        for strategy, names, said in groups
    )
    plan: Plan = made.model_copy(update={"groups": chosen, "fidelity": "local"})
    return plan.model_dump_json()


@pytest.mark.parametrize("name", PLANS)
def test_operations_do_what_they_declare(name: str) -> None:
    n, optimizer = 2, "Adam" if name == "frozen" else "SGD"
    for rank, found in enumerate(run_ranks(n, differences, plan_of(PLANS[name], n), optimizer)):
        *wrong, ran = found
        assert not wrong, f"rank {rank}: {wrong}"
        assert len(ran.split(",")) > 3
