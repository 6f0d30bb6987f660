"""Parts of a model that steps leave out: which they are, and what groups cost that such steps spare."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.cost_models import AnalyticCostModel
from autopar.ir.batch import flatten
from autopar.ir.branches import branches
from autopar.ir.build import model_fingerprint
from autopar.ir.outline import outline
from autopar.ir.seen import look
from autopar.ir.training_graph import TrainingGraph
from autopar.ops.context import Context
from autopar.search.builders import builder_named
from autopar.spec.plan import ParameterSlice, SyncGroup
from autopar.spec.topology import Topology
from autopar.strategies.lowering import lower_plan
from tests.unit.synthetic import cpu_hosts


class Chooses(nn.Module):
    """Sends what it is given to one of its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(3)])

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        found: torch.Tensor = self.experts[choice](self.first(x)).sum()
        return found


def chosen(choice: int = 1, **changed: Any) -> TrainingGraph:
    model, x = Chooses(), torch.ones(2, 64)
    seen = replace(look(lambda: [model(x, choice)], dict(model.named_parameters()), flatten(x)), **changed)
    return outline(model_fingerprint(model, None), flatten(x), seen, 0)


def test_experts_that_are_alike_may_be_left_out_those_least_often_that_were_used() -> None:
    found = {p.name: p.branch for p in chosen().parameters}
    assert found["first.weight"] is None
    left_out = {b.name: b.left_out for b in found.values() if b is not None}
    # Of three, one was used: 2/5 by Laplace's rule, which counts as one example beside the one that was seen.
    assert left_out == pytest.approx({"experts.0": 0.8, "experts.1": 0.3, "experts.2": 0.8})
    assert found["experts.1.0.weight"] == found["experts.1.1.bias"]


def test_ranks_examples_count_alike_and_the_innermost_part_counts() -> None:
    shapes = {f"layers.{i}.{name}": (4,) for i in range(2) for name in ("a", "b.0", "b.1")} | {"head": (4,)}
    found = branches(shapes, [["layers.1.a", "layers.1.b.0", "layers.1.b.1"], ["layers.0.b.0"]])
    assert "head" not in found
    assert [found[f"layers.{i}.a"].name for i in range(2)] == ["layers.0", "layers.1"]
    assert [found[f"layers.0.b.{i}"].name for i in range(2)] == ["layers.0.b.0", "layers.0.b.1"]
    assert found["layers.1.b.0"].name == "layers.1"
    assert found["layers.0.b.0"].left_out > found["layers.0.b.1"].left_out


def test_nothing_is_left_out_where_that_is_not_seen_or_not_foreseen() -> None:
    assert branches({"a.0": (1,), "a.1": (1,)}, [[], []]) == {}
    assert all(p.branch is None for p in chosen(foreseen=False).parameters)


def test_buckets_of_branches_hold_one_each() -> None:
    graph, context = chosen(), Context(2)
    groups = builder_named("branches")(graph.parameters, context, cpu_hosts(2))
    names = [sorted({m.name.rpartition(".")[0][:9] for m in g.members}) for g in groups]
    assert sorted(names) == [["experts.0"], ["experts.1"], ["experts.2"], ["first"]]


@pytest.mark.parametrize("n", [2, 3])
def test_a_group_costs_what_it_does_in_the_mean_over_steps(n: int) -> None:
    graph, topology = chosen(), Topology(cpu_hosts(n))
    pricer = AnalyticCostModel().pricer(graph, topology)

    def seconds(names: list[str], context: Context) -> float:
        group = SyncGroup(strategy="all_reduce", members=tuple(ParameterSlice(name=x) for x in names))
        return pricer.alone_s(lower_plan([group], graph, context))[0]

    context = Context(n)
    always = seconds(["experts.0.0.weight"], replace(context, clips=True))
    assert seconds(["experts.0.0.weight"], context) == pytest.approx(always * (1 - 0.8**n))
    assert seconds(["experts.1.0.weight"], context) == pytest.approx(always * (1 - 0.3**n))
    both = ["experts.0.0.weight", "experts.1.0.weight"]
    assert seconds(both, context) == pytest.approx(seconds(both, replace(context, clips=True)) * (1 - 0.24**n))
    mixed = ["experts.0.0.weight", "first.weight"]
    assert seconds(mixed, context) == seconds(mixed, replace(context, clips=True))
