"""Local improvement: its moves, and the choice between candidates."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.cost_models import AnalyticCostModel, Estimate
from autopar.errors import PlanError
from autopar.ir.batch import flatten
from autopar.ir.build import training_graph as capture
from autopar.search.base import Candidate, Problem, choose
from autopar.search.builders import builder_named, fuse
from autopar.search.builders.common import issue_order
from autopar.search.moves import Choice, Groups, Neighbourhood, merged
from autopar.search.searchers.borders import moved
from autopar.spec.plan import Fidelity, ParameterSlice, SyncGroup, partition_problems
from autopar.spec.topology import Topology
from autopar.strategies import Context
from autopar.strategies.lowering import lower_plan
from tests.unit.synthetic import cpu_hosts, training_graph

CLUSTER = cpu_hosts(4)


def problem(fidelity: Fidelity = "exact", dtypes: tuple[str, ...] = (), **context: bool) -> Problem:
    graph = training_graph(dtypes=dtypes)
    allowed = Context(4, **context)  # type: ignore[arg-type]
    return Problem(graph, CLUSTER, Topology(CLUSTER), allowed, AnalyticCostModel(), fidelity)


def seed(name: str, of: Problem) -> Groups:
    return builder_named(name)(of.graph.parameters, of.context, of.cluster)


@pytest.mark.parametrize("name", ["ddp", "PartitionedPS", "RandomAxisPartitionAR"])
@pytest.mark.parametrize("move", ["switch", "switch_all", "switch_run", "merge", "split", "shift", "rebucket"])
def test_a_move_keeps_every_parameter_in_one_place(name: str, move: str) -> None:
    of = problem(dtypes=("float32", "bfloat16"))
    near, draw = Neighbourhood(of), random.Random(1)
    single = [g.model_copy(update={"members": (m,)}) for g in seed(name, of) for m in g.members]
    groups, made = fuse(single, of.graph.parameters, 5 << 20), 0
    for _ in range(40):
        changed: Groups | None = getattr(near, move)(groups, draw)
        if changed is not None:
            made += changed != groups
            assert partition_problems(changed, of.graph.model.parameters) == []
            lower_plan(changed, of.graph, of.context)
    assert made > 0


def test_neighbours_come_in_the_order_of_gradients() -> None:
    of = problem()
    near, draw = Neighbourhood(of), random.Random(2)
    groups = seed("ddp", of)
    for _ in range(60):
        groups = near.neighbour(groups, draw) or groups
        ready = [g.ready for g in lower_plan(groups, of.graph, of.context).groups]
        assert ready == sorted(ready)


def test_choices_are_what_strategies_offer_within_the_fidelity() -> None:
    exact, rounded = Neighbourhood(problem()), Neighbourhood(problem("rounded"))
    assert [str(c) for c in exact.choices["all_reduce"]] == ["all_reduce"]
    assert len(exact.choices["parameter_server"]) == 4
    wires = {c.options.get("wire", "same") for c in rounded.choices["all_reduce"]}
    assert wires == {"same", "bfloat16"}, "float16 takes as long, and does not hold small gradients"


@pytest.mark.parametrize(
    "strategy", ["partitioned_parameter_server", "parameter_server", "sharded_parameters", "hierarchical_all_reduce"]
)
def test_every_option_is_offered_with_narrow_numbers_too(strategy: str) -> None:
    exact, rounded = (Neighbourhood(of).choices[strategy] for of in (problem(), problem("rounded")))
    assert [c for c in rounded if "wire" not in c.options] == exact
    assert [{k: v for k, v in c.options.items() if k != "wire"} for c in rounded[1::2]] == [c.options for c in exact]
    assert {c.options.get("wire", "same") for c in rounded[:2]} == {"same", "bfloat16"}, "the first few hold both kinds"


def test_a_switch_respects_what_a_strategy_can_do() -> None:
    of = problem(elementwise_update=False)
    near, draw = Neighbourhood(of), random.Random(3)
    for _ in range(60):
        for group in near.switch(seed("ddp", of), draw) or ():
            assert group.strategy != "partitioned_parameter_server"


def test_tuning_changes_options_and_no_strategy() -> None:
    of = problem()
    near, draw = Neighbourhood(of), random.Random(4)
    groups, seen = seed("PartitionedPS", of), set()
    for _ in range(40):
        changed = near.tune(groups, draw)
        assert changed is not None
        assert [(g.strategy, g.members) for g in changed] == [(g.strategy, g.members) for g in groups]
        seen |= {tuple(sorted(g.options.items())) for g in changed}
    assert len(seen) > 1
    assert near.tune(seed("ddp", of), draw) is None, "an exact all-reduce has one set of options"


def test_dtypes_are_not_merged() -> None:
    of = problem(dtypes=("float32", "bfloat16"))
    near = Neighbourhood(of)
    groups = seed("all_reduce_one_bucket", of)
    assert len(groups) == 2
    assert all(near.merge(groups, random.Random(i)) is None for i in range(10))
    # A neighbour is the next group of the same dtype, whatever lies between.
    alternating = seed("all_reduce_1MiB", of)
    assert merged(alternating, 0, near.table) is not None


def candidate(step_time_s: float, groups: int) -> Candidate:
    estimate = Estimate(step_time_s, 0.1, 0.0, 0.0, (0,), (0,), (0,), 0.5, "guessed")
    one = SyncGroup(strategy="all_reduce", members=(ParameterSlice(name="w"),))
    return Candidate(f"{step_time_s} in {groups}", (one,) * groups, estimate)


def test_the_fastest_wins_but_for_ties() -> None:
    fast, simple, slow = candidate(1.000, 20), candidate(1.004, 3), candidate(1.02, 1)
    # All three beat the best seed: the tie goes to the simpler one.
    assert choose([fast, simple, slow], limit_s=2.0) is simple
    # The best seed itself is not given up for a plan that is slower, however little.
    assert choose([fast, simple, slow], limit_s=1.000) is fast
    assert choose([slow, fast], limit_s=2.0) is fast


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(6, 6) for _ in range(6)))
        self.head = nn.Linear(6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.body(x))
        return scores


def test_moves_leave_groups_whole_that_hold_a_layer() -> None:
    """A head with its bias and a layer's weight: cut, merged or fused with others, no plan could be used."""
    batch = flatten((torch.randn(4, 6), torch.randint(10, (4,))))
    graph = capture(Classifier(), batch, F.cross_entropy)
    of = Problem(graph, CLUSTER, Topology(CLUSTER), Context(4), AnalyticCostModel())
    near, draw = Neighbourhood(of), random.Random(5)
    layers = {"class_sharded_head": ("head.weight", "head.bias"), "column_parallel_linear": ("body.1.weight",)}
    held = [m for names in layers.values() for m in names]
    rest = [SyncGroup(strategy="all_reduce", members=(ParameterSlice(name=n),)) for n in near.table if n not in held]
    own = [SyncGroup(strategy=s, members=tuple(ParameterSlice(name=n) for n in names)) for s, names in layers.items()]
    groups = issue_order((*own, *rest), near.parameters)
    made = 0
    for _ in range(300):
        move = draw.choice([near.split, near.shift, near.merge, near.rebucket, near.switch, near.switch_all])
        changed = move(groups, draw) if draw.random() < 0.8 else moved(groups, 0.5, near, draw)
        if changed is not None:
            made += changed != groups
            assert partition_problems(changed, graph.model.parameters) == []
            try:
                lower_plan(changed, graph, of.context)
            except PlanError as e:  # as for factors, of a bias
                assert "cannot use" in str(e)
                continue
            if all(group in changed for group in own):
                groups = changed
    assert made > 50
    everything = SyncGroup(strategy="all_reduce", members=tuple(ParameterSlice(name=n) for n in near.table))
    parts = near.followed(Choice("class_sharded_head", {}), everything)
    assert [sorted(m.name for m in part.members) for part in parts] == [
        ["head.bias", "head.weight"],
        sorted(n for n in near.table if not n.startswith("head")),
    ]
    columns = near.followed(Choice("column_parallel_linear", {}), everything)
    assert [len(part.members) for part in columns] == [1] * 7 + [7]
    assert not near.possible(
        Choice("class_sharded_head", {}), own[0].model_copy(update={"members": own[0].members[:1]})
    )
