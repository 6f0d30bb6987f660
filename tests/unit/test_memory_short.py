"""Where memory is short: which plans are tried, and what is said to help where none fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.cost_models import AnalyticCostModel
from autopar.errors import InfeasibleError
from autopar.ir.batch import flatten
from autopar.ir.build import training_graph
from autopar.ir.training_graph import TrainingGraph
from autopar.search import Budget, Problem, infeasible, search_result
from autopar.search.constraints import Constraints
from autopar.search.nearest import other_inputs
from autopar.search.seeds import built
from autopar.spec.cluster import ClusterSpec
from autopar.spec.topology import topology_of
from autopar.strategies import Context

BUDGET = Budget(evaluations=5)
ROWS, WIDTH = 40_000, 64


class Table(nn.Module):
    """10 MiB in a table of which a batch reads a few rows, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.table(words))
        return result


class Classes(nn.Module):
    """10 MiB in a layer over classes."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Linear(WIDTH, ROWS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.classes(x)
        return result


def graph(large: str) -> TrainingGraph:
    if large == "table":
        words = torch.randint(0, ROWS, (8, 2))
        return training_graph(Table(), flatten((words, torch.zeros(8, 2, 1))), nn.functional.mse_loss)
    batch = flatten((torch.randn(8, WIDTH), torch.randint(0, ROWS, (8,))))
    return training_graph(Classes(), batch, nn.functional.cross_entropy)


def hosts(memory: str) -> ClusterSpec:
    devices = f"{{kind: cpu, memory: {memory}}}"
    return ClusterSpec.loads(
        f"{{hosts: [{{name: a, count: 16, devices: {devices}}}], network: {{bandwidth: 1 Gbit/s}}}}"
    )


@pytest.mark.parametrize("large", ["table", "classes"])
def test_what_no_rank_can_gather_is_shared_out(large: str) -> None:
    """Gathered, the large parameter alone takes twice a device's memory, and its shard with all state half of it."""
    found = search_result(graph(large), hosts("5 MiB"), Context(16), budget=BUDGET)
    assert found.chosen.feasible


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"pin": {"table.*": "all_reduce"}},
            r"leaving out the pin 'table\.\*=all_reduce'",
        ),
        (
            {"forbid": ["row_sharded_table"]},
            r"allowing row_sharded_table",
        ),
        (
            {"pin": {"table.*": "all_reduce", "table.weight": "sharded_parameters"}},
            "leaving out all pins and allowing all strategies",
        ),
    ],
)
def test_constraints_without_which_a_plan_fits_are_said(asked: dict[str, Any], said: str) -> None:
    constraints = Constraints.of(**asked)
    with pytest.raises(
        InfeasibleError, match=f"With this it fits: {said}, as with the strategy 'sharded_tables_zero1'"
    ):
        search_result(graph("table"), hosts("5 MiB"), Context(16), constraints=constraints, budget=BUDGET)


def test_a_plan_by_name_says_which_plans_share_out_what_is_large() -> None:
    of = infeasible("ddp", [graph("table")], hosts("5 MiB"), Context(16))
    assert "With this it fits: the strategy 'sharded_tables_zero1' (" in str(of)


def many_samples() -> TrainingGraph:
    batch = flatten((torch.randn(64, WIDTH), torch.randint(0, ROWS, (64,))))
    return training_graph(Classes(), batch, nn.functional.cross_entropy)


def test_a_smaller_batch_with_which_a_plan_fits_is_said() -> None:
    """The scores that a rank computes take 10 MiB, and are fewer with fewer samples."""
    with pytest.raises(InfeasibleError, match=r"With this it fits: \d+ samples on each rank in place of 64 \("):
        search_result(many_samples(), hosts("5 MiB"), Context(16), budget=BUDGET)


def test_a_smaller_batch_may_fit_with_another_plan_than_the_leanest() -> None:
    cluster = hosts("5 MiB")
    problem = Problem(many_samples(), cluster, topology_of(cluster), Context(16).on(cluster), AnalyticCostModel())
    whole, shared = (built(problem, name) for name in ("ddp", "sharded_head_zero1"))
    assert list(other_inputs(problem, [whole])) == []
    assert "samples on each rank in place of 64" in str(next(other_inputs(problem, [whole, shared])))
