"""What is taken for a table, which rows of it are exchanged when, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import PlanError
from autopar.ir.batch import flatten
from autopar.ir.build import training_graph
from autopar.ir.tables import GraphTables
from autopar.ir.training_graph import Table, TrainingGraph
from autopar.ops.row_shards import RowShards
from autopar.spec.plan import ParameterSlice, SyncGroup
from autopar.strategies import Context
from autopar.strategies.lowering import lower_plan, resolve

ROWS, WIDTH, WORDS = 11, 6, 5


class Model(nn.Module):
    """Words to numbers, by a way of looking them up."""

    def __init__(self, look_up: Callable[[nn.Embedding, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.look_up = look_up
        self.table = nn.Embedding(ROWS, WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(torch.tanh(self.look_up(self.table, words)))
        return result


def graph_of(model: nn.Module) -> TrainingGraph:
    words = torch.tensor([[1, 2, 3, 4, 5], [1, 1, 1, 1, 1], [6, 7, 8, 9, 10]])
    return training_graph(
        model, flatten(((words,), torch.zeros(3, 1))), lambda y, t: F.mse_loss(y.view(3, -1)[:, :1], t)
    )


def table_of(look_up: Callable[[nn.Embedding, torch.Tensor], torch.Tensor]) -> Table | None:
    return graph_of(Model(look_up)).by_name["table.weight"].table


def bags(table: nn.Embedding, words: torch.Tensor, **settings: Any) -> torch.Tensor:
    return F.embedding_bag(words, table.weight, **settings)


def test_a_lookup_says_how_many_rows_it_needs() -> None:
    table = table_of(lambda table, words: table(words).mean(1))
    assert table is not None
    (lookup,) = table.lookups
    assert (lookup.rows, lookup.distinct, lookup.known) == (15, 10, -1)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_are_lookups(mode: str) -> None:
    assert table_of(lambda table, words: bags(table, words, mode=mode)) is not None


@pytest.mark.parametrize(
    "look_up",
    [
        lambda table, words: table(words).mean(1) + table.weight.sum(0),
        lambda table, words: table(words).mean(1) @ (table.weight.t() @ table.weight),
        lambda table, words: bags(table, words, mode="sum", padding_idx=2),
        lambda table, words: bags(table, words, mode="max"),
        lambda table, words: F.embedding(words, table.weight * 2).mean(1),
    ],
    ids=["summed", "multiplied", "bags with padding", "maximum", "scaled"],
)
def test_what_is_read_otherwise_is_no_table(look_up: Any) -> None:
    assert table_of(look_up) is None


def test_indices_that_are_computed_from_the_batch_are_known_before_all_lookups() -> None:
    """So that one exchange serves all tables."""
    table = table_of(lambda table, words: table(words).mean(1) + table((words * 3 + 1) % ROWS).tanh().mean(1))
    assert table is not None
    assert max(k.known for k in table.lookups) < min(k.position for k in table.lookups)


def chosen_by(table: nn.Embedding, words: torch.Tensor) -> torch.Tensor:
    """The second lookup's indices follow from what the first has found."""
    first: torch.Tensor = table(words).mean(1)
    second: torch.Tensor = table(first.argmax(1) % ROWS)
    return first + second


def test_indices_that_follow_from_a_lookup_need_an_exchange_of_their_own() -> None:
    graph = graph_of(Model(chosen_by))
    group = resolve(0, SyncGroup(strategy="row_sharded_table", members=(ParameterSlice(name="table.weight"),)), graph)
    first, second = group.waves
    assert first.known < first.entries[0][1].position <= second.known < second.entries[0][1].position
    rest = SyncGroup(strategy="all_reduce", members=tuple(ParameterSlice(name=n) for n in ("out.weight", "out.bias")))
    program = lower_plan((group.spec, rest), graph, Context(3))
    assert [c.op.name for c in program.calls].count("all_to_all") == 6  # indices, rows, gradients; of each


def test_equal_indices_are_exchanged_once() -> None:
    graph = graph_of(Model(lambda table, words: table(words).mean(1) * table(words).tanh().mean(1)))
    table = graph.by_name["table.weight"].table
    assert table is not None
    group = resolve(0, SyncGroup(strategy="row_sharded_table", members=(ParameterSlice(name="table.weight"),)), graph)
    assert sum(len(wave.entries) for wave in group.waves) == 1


def test_the_tables_of_a_graph_are_kept_without_it() -> None:
    graph = graph_of(Model(chosen_by))
    again = GraphTables.model_validate_json(GraphTables.of(graph).model_dump_json()).graph()
    assert again.parameters == graph.parameters


def test_a_slice_of_a_table_is_refused() -> None:
    graph = graph_of(Model(lambda table, words: table(words).mean(1)))
    part = SyncGroup(
        strategy="row_sharded_table", members=(ParameterSlice(name="table.weight", start=0, stop=ROWS - 1),)
    )
    with pytest.raises(PlanError, match="the rows are shared out, not slices"):
        lower_plan((part,), graph, Context(2))


@pytest.mark.parametrize("index", [-1, ROWS])
def test_an_index_outside_of_the_table_is_said_by_the_rank_that_has_it(index: int) -> None:
    """Its owner would find another row for it, or fail in its place."""
    rows = RowShards([torch.zeros(6, WIDTH)], [ROWS], [[0]], rank=0, n=2)
    with pytest.raises(IndexError, match=f"table of {ROWS} rows"):
        rows.ask(0, [torch.tensor([3, index])], is_last=True)
