"""What gradients are made of, as found in the joint graph."""

from __future__ import annotations

import torch
from torch import nn

from autopar.ir.batch import flatten
from autopar.ir.build import training_graph
from autopar.ir.tables import GraphTables
from autopar.ir.training_graph import TrainingGraph
from autopar.testing import lookups


def _graph(samples: int = 4, seed: int = 1) -> TrainingGraph:
    torch.manual_seed(0)
    model = lookups.Lookups().double().train()
    return training_graph(model, flatten(lookups.batch(samples, seed)), nn.functional.mse_loss)


def test_tables_bags_and_products_are_found() -> None:
    found = {p.name: p.structure for p in _graph().parameters}
    assert {n for n, s in found.items() if s == "rows"} == {
        "table.weight",
        "small.weight",
        "sums.weight",
        "means.weight",
    }
    assert {n for n, s in found.items() if s == "factors"} == {"twice.weight", "turned", "out.weight"}
    assert {n for n, s in found.items() if s == "dense"} == {"twice.bias", "out.bias"}


def test_rows_are_counted_in_the_example_batch() -> None:
    samples = 4
    words, _ = lookups.batch(samples, 1)
    parts = _graph(samples).by_name["table.weight"].parts
    assert parts is not None
    looked_up = torch.cat([words.flatten(), (words * 3 % lookups.ROWS).flatten()])
    assert (parts.rows, parts.distinct) == (looked_up.numel(), len(set(looked_up.tolist())))
    assert [t.padding for t in parts.terms] == [0, 0]
    one_word = _graph(samples, seed=3).by_name["sums.weight"].parts
    assert one_word is not None
    assert one_word.distinct == 1


def test_a_layer_used_twice_has_both_products() -> None:
    samples = 4
    parts = _graph(samples).by_name["twice.weight"].parts
    assert parts is not None
    assert len(parts.terms) == 2
    assert parts.rows == 2 * samples * lookups.WORDS
    assert (parts.left_width, parts.right_width) == (8, 8)


def test_a_table_tied_to_a_head_is_dense() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 4)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.table(words).mean(1) @ self.table.weight.t()
            return scores

    batch = (torch.randint(0, 20, (3, 5)), torch.randint(0, 20, (3,)))
    graph = training_graph(Tied(), flatten(batch), nn.functional.cross_entropy)
    assert [p.structure for p in graph.parameters] == ["dense"]


def test_a_gradient_that_is_scaled_by_frequency_is_dense() -> None:
    model = nn.Sequential(nn.Embedding(20, 4, scale_grad_by_freq=True), nn.Flatten())
    batch = (torch.randint(0, 20, (3, 5)), torch.randn(3, 20))
    graph = training_graph(model, flatten(batch), nn.functional.mse_loss)
    assert [p.structure for p in graph.parameters] == ["dense"]


def test_tables_of_a_graph_keep_the_parts() -> None:
    graph = _graph()
    assert GraphTables.model_validate_json(GraphTables.of(graph).model_dump_json()).graph() == graph
