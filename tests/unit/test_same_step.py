"""Which ranks compute different things: all ranks see the same, also those that are not among them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.ir.batch import flatten
from autopar.ir.build import training_graph
from autopar.runtime.job.same_step import Described, _described, unlike_ranks

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("each", "found"),
    [
        (["4 a", "4 a", "3 b"], [None, None, None]),
        (["4 a", "1 b", "4 c"], [(0, 2), (0, 2), (2, 0)]),  # rank 1 waited for the others, which had raised
        (["4 a", "4 c", "4 a", "1 b"], [(0, 1), (1, 0), (2, 1), (0, 1)]),
    ],
)
def test_a_rank_of_another_shape_hears_of_two_that_differ(each: list[str], found: list[tuple[int, int] | None]) -> None:
    everyone = [Described([one[0]], one[2:], [], [], "") for one in each]
    assert [unlike_ranks(everyone, rank) for rank in range(len(each))] == found


class Slope(nn.Module):
    """Its loss reads how its layer's outputs change with the inputs, by forward-mode differentiation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both: Any = torch.func.jvp(self.layer, (x,), (torch.ones_like(x),))
        output, slope = both
        loss: torch.Tensor = output.square().mean() + slope.square().mean()
        return loss


def test_a_tangent_that_is_nothing_is_the_same_however_pytorch_makes_it() -> None:
    """By what a process had traced before, one rank had `_efficientzerotensor`: ranks seemed to differ."""
    batch = flatten({"x": torch.randn(4, 3)})
    graph = training_graph(Slope(), batch, None)
    before = _described(graph, batch)
    assert graph.joint is not None
    nodes = graph.joint.module.graph
    zeros = [n for n in nodes.find_nodes(op="call_function", target=aten.expand.default) if "zeros" in str(n.args[0])]
    assert zeros
    with nodes.inserting_before(zeros[0]):
        made = nodes.call_function(aten._efficientzerotensor.default, (zeros[0].args[1],))
    made.meta = dict(zeros[0].meta)
    zeros[0].replace_all_uses_with(made)
    nodes.erase_node(zeros[0])
    nodes.eliminate_dead_code()
    assert _described(graph, batch) == before


class Sum(nn.Module):
    """Reads one tensor several times, in an order that may be another on each rank."""

    def __init__(self, order: tuple[int, ...], factors: tuple[int, ...] = (2, 3, 4)) -> None:
        super().__init__()
        self.order, self.factors = order, factors
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        parts = {i: (x * self.factors[i]).sin() for i in self.order}
        loss: torch.Tensor = torch.cat([parts[i] for i in range(3)]).square().mean()
        return loss


def test_the_order_of_operators_and_of_sums_is_no_difference_but_a_factor_is() -> None:
    batch = flatten({"x": torch.randn(4, 3)})

    def nodes(*args: Any) -> str:
        return _described(training_graph(Sum(*args), batch, None), batch).nodes

    assert nodes((0, 1, 2)) == nodes((2, 0, 1)) == nodes((1, 2, 0))
    assert nodes((0, 1, 2)) != nodes((0, 1, 2), (3, 2, 4)), "the same factors, on other parts"
