"""What is taken for a head, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import PlanError
from autopar.ir.batch import flatten
from autopar.ir.build import training_graph
from autopar.ir.tables import GraphTables
from autopar.ir.training_graph import Head, TrainingGraph
from autopar.ops.head_shard import HeadShard
from autopar.spec.plan import ParameterSlice, SyncGroup
from autopar.strategies import Context
from autopar.strategies.lowering import lower_plan

CLASSES = 11


def flat(scores: torch.Tensor, target: torch.Tensor, **settings: Any) -> torch.Tensor:
    return F.cross_entropy(scores.reshape(-1, CLASSES), target.reshape(-1), **settings)


class Model(nn.Module):
    """Five words a sample, scored over the classes."""

    def __init__(self, bias: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, 6)
        self.head = nn.Linear(6, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(torch.tanh(self.table(words)))
        return scores


def graph_of(model: nn.Module, loss: Callable[..., torch.Tensor] = flat) -> TrainingGraph:
    batch = (torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 5, dtype=torch.int64))
    return training_graph(model, flatten(batch), loss)


def heads_of(graph: TrainingGraph) -> set[Head]:
    return {p.head for p in graph.parameters if p.head is not None}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("settings", [{}, {"ignore_index": 3}, {"reduction": "sum"}])
def test_a_linear_layer_and_its_cross_entropy_are_a_head(bias: bool, settings: dict[str, Any]) -> None:
    graph = graph_of(Model(bias), lambda s, t: 0.5 * flat(s, t, **settings))
    (head,) = heads_of(graph)
    assert (head.samples, head.width, head.classes) == (15, 6, CLASSES)
    assert (head.weight, head.bias) == ("head.weight", "head.bias" if bias else None)
    assert head.ignored == settings.get("ignore_index", -100)
    assert head.mean == (settings.get("reduction") != "sum")
    names = [n.name for n in graph.compute]
    replaced = set(head.replaced)
    assert replaced <= set(names)
    assert graph.by_name["head.weight"].gradient in replaced
    assert {n.name for n in graph.compute if n.op.startswith(("_log_softmax", "nll_loss"))} <= replaced
    assert names.index(head.hidden) <= head.begin < graph.backward_start <= head.turn
    assert {p.name for p in graph.parameters if p.head} == {head.weight, head.bias} - {None}
    again = GraphTables.model_validate_json(GraphTables.of(graph).model_dump_json()).graph()
    assert again.parameters == graph.parameters


def test_a_softmax_in_another_dtype_is_a_head() -> None:
    (head,) = heads_of(graph_of(Model().double(), lambda s, t: flat(s.float(), t)))
    assert head.dtype == "float32"


@pytest.mark.parametrize(
    "loss",
    [
        lambda s, t: flat(s, t) + s.square().mean(),
        lambda s, t: flat(s, t, weight=torch.ones(CLASSES)),
        lambda s, t: flat(s, t, reduction="none").mean(),
        lambda s, t: flat(s.tanh(), t),
        lambda s, t: F.cross_entropy(s.reshape(-1, 5 * CLASSES), t[:, 0]),
    ],
    ids=["read elsewhere", "weighted", "not reduced", "not linear", "choices among rows"],
)
def test_what_reads_or_changes_the_scores_makes_it_none(loss: Callable[..., torch.Tensor]) -> None:
    assert heads_of(graph_of(Model(), loss)) == set()


@pytest.mark.parametrize("settings", [{}, {"ignore_index": 3}, {"reduction": "sum"}])
def test_a_cross_entropy_with_smoothed_labels_has_its_sums_besides(settings: dict[str, Any]) -> None:
    graph = graph_of(Model(), lambda s, t: flat(s, t, label_smoothing=0.1, **settings))
    (head,) = heads_of(graph)
    assert head.log_sum is not None and head.log_sum_gradient is not None
    assert head.log_sum in head.replaced and head.log_sum_gradient not in head.replaced
    assert head.numbers == 4


def test_smoothed_labels_are_a_mean_over_the_targets_that_are_not_ignored() -> None:
    batch = flatten((torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 5, dtype=torch.int64)))
    target = torch.zeros(3, 5, dtype=torch.int64)
    target[1] = -100
    for smoothing in (0.0, 0.1):
        graph = training_graph(Model(), batch, partial(flat, label_smoothing=smoothing))
        assert graph.joint is not None and graph.joint.weight is not None
        weight = graph.joint.weight
        assert weight.of((batch.tensors[0], target)).item() == 10


def test_a_weight_that_is_also_looked_up_is_a_head_and_a_table() -> None:
    graph = graph_of(Model(tied=True))
    (head,) = heads_of(graph)
    parameter = graph.by_name[head.weight]
    assert parameter.head == head and parameter.table is not None and parameter.parts is None
    assert head.weight_gradient not in parameter.table.parts.replaced


def test_a_weight_that_is_frozen_or_also_read_makes_it_none() -> None:
    frozen, read = Model(), Model(tied=True)
    frozen.head.weight.requires_grad_(False)
    assert heads_of(graph_of(frozen)) == set()
    assert heads_of(graph_of(read, lambda s, t: flat(s, t) + read.table.weight.square().sum())) == set()


class Given(nn.Module):
    """Scores of what is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Parameter(torch.zeros(15, 6)), nn.Linear(6, CLASSES)

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.hidden)
        return scores


def test_a_head_that_is_given_a_parameter_is_none() -> None:
    assert not heads_of(graph_of(Given()))


def test_a_head_is_shared_out_with_its_bias_or_not_at_all() -> None:
    graph = graph_of(Model())
    rest = tuple(ParameterSlice(name=n) for n in ("table.weight", "head.bias"))
    groups = (
        SyncGroup(strategy="class_sharded_head", members=(ParameterSlice(name="head.weight"),)),
        SyncGroup(strategy="all_reduce", members=rest),
    )
    with pytest.raises(PlanError, match=r"head\.bias and head\.weight"):
        lower_plan(groups, graph, Context(2))
    sixteen = graph_of(Model().bfloat16(), flat)
    reason = "its softmax is computed in 16 bits"
    both = tuple(ParameterSlice(name=n) for n in ("head.weight", "head.bias"))
    with pytest.raises(PlanError, match=reason):
        lower_plan((SyncGroup(strategy="class_sharded_head", members=both),), sixteen, Context(2))


@pytest.mark.parametrize("target", [[0, 1, 2], [0, -1, 1], [-100, 1, 11]])
def test_a_target_that_is_no_class_is_refused_where_it_comes_from(target: list[int]) -> None:
    # Of two classes on three ranks, one rank keeps none, and would see nothing wrong.
    (head,) = heads_of(graph_of(Model()))
    classes = replace(head, classes=2)
    shard = HeadShard(classes, torch.randn(1, 6), None, 0, 3)
    hidden, counts = torch.randn(3, 6), torch.tensor([3, 3, 3])
    shard.samples(hidden, torch.tensor([0, -100, 1]), counts, torch.float32)
    with pytest.raises(IndexError, match=r"is not one of 2 classes"):
        shard.samples(hidden, torch.tensor(target), counts, torch.float32)
