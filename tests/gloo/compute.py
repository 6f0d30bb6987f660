"""What the tests of compiled compute run on each rank: plans of several groups, compiled and as they are."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

import autopar
from autopar.runtime.compiling.compute import Compiler
from tests.tiers import ALL
from tests.unit.test_compute import Net, apart, batch, one_by_one

PLANS = ("PS", "sharded_tables_zero1", *(("zero1", "all_reduce_1MiB", "sharded") if ALL else ()))


def compiled_and_as_they_are(rank: int, n: int) -> dict[str, Any]:
    """Of each plan: how far parameters are apart after a few steps, how many groups there are, and whether the
    collectives come in the same order."""
    with mock.patch("autopar.api.Compiler", partial(Compiler, one_by_one)):
        return {plan: _one(plan, rank) for plan in PLANS}


def _one(plan: str, rank: int) -> dict[str, Any]:
    models = [Net(3, 0.2).double() for _ in range(2)]
    programs = []
    for model, is_compiled in zip(models, (False, True), strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(3)
        program = autopar.optimize(
            model,
            example_inputs=batch(0, 4 + rank),
            loss_fn=F.cross_entropy,
            optimizer=optimizer,
            strategy=plan,
            clip_grad_norm=0.5,
            compile=is_compiled,
        )
        for step in range(2):
            program.step(batch(10 * step + rank, 4 + rank))
        program.step(micro_batches=[batch(30 + rank, 4 + rank), batch(40 + rank, 3)])
        programs.append(program)
    with programs[0].gathered(), programs[1].gathered():
        distance = apart(*models)
    plain, compiled = (_collectives(p.graph_module) for p in programs)
    return {"distance": distance, "groups": len(programs[0].plan.groups), "same": plain == compiled, "sent": len(plain)}


def _collectives(module: torch.fx.GraphModule) -> list[str]:
    return [n.target.__name__ for n in module.graph.nodes if "collectives" in getattr(n.target, "__module__", "")]
