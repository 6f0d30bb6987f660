"""What is taken for a linear layer whose outputs can be shared out, and what is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import PlanError
from autopar.ir.batch import flatten
from autopar.ir.build import training_graph
from autopar.ir.tables import GraphTables
from autopar.ir.training_graph import Layer, TrainingGraph
from autopar.spec.plan import ParameterSlice, SyncGroup
from autopar.strategies import Context
from autopar.strategies.lowering import StepProgram, lower_plan


class Two(nn.Module):
    """Two layers, the second of which is used in the way that is asked for."""

    def __init__(self, use: Callable[[nn.Linear, torch.Tensor], torch.Tensor], bias: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.use = nn.Linear(5, 7, bias=bias), nn.Linear(7, 7, bias=bias), use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self.second, torch.relu_(self.first(x)))


def graph_of(model: nn.Module, *shape: int) -> TrainingGraph:
    shape = shape or (4, 5)
    return training_graph(model, flatten((torch.randn(*shape), torch.randn(*shape[:-1], 7))), F.mse_loss)


def layers_of(graph: TrainingGraph) -> dict[str, Layer]:
    return {p.name: p.layer for p in graph.parameters if p.layer is not None}


def lowered(graph: TrainingGraph, *names: str) -> StepProgram:
    members = tuple(ParameterSlice(name=name) for name in names)
    return lower_plan((SyncGroup(strategy="column_parallel_linear", members=members),), graph, Context(2))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4, 5), (2, 3, 5)])
def test_linear_layers_are_found(bias: bool, shape: tuple[int, ...]) -> None:
    graph = graph_of(Two(lambda layer, x: layer(x), bias), *shape)
    found = layers_of(graph)
    samples = 4 if len(shape) == 2 else 6
    assert {n: (x.samples, x.width, x.outputs) for n, x in found.items()} == {
        "first.weight": (samples, 5, 7),
        "second.weight": (samples, 7, 7),
    }
    assert found["first.weight"].given_gradient is None
    assert found["second.weight"].given_gradient is not None
    assert all((x.bias is not None) == bias for x in found.values())
    assert GraphTables.of(graph).graph().parameters == graph.parameters


@pytest.mark.parametrize(
    "use",
    [
        lambda layer, x: layer(layer(x)),
        lambda layer, x: layer(x) + layer.weight.sum(),
        lambda layer, x: x @ layer.weight + layer.bias,
        lambda layer, x: F.linear(x, layer.weight.exp(), layer.bias),
    ],
)
def test_a_weight_that_is_read_otherwise_is_none(use: Callable[[nn.Linear, torch.Tensor], torch.Tensor]) -> None:
    assert set(layers_of(graph_of(Two(use)))) == {"first.weight"}


class Given(nn.Module):
    """A layer that is given a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.layer = nn.Parameter(torch.zeros(4, 7)), nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given: torch.Tensor = self.layer(self.queries)
        return given + x.sum()


def test_a_layer_that_is_given_a_parameter_is_none() -> None:
    """What is handed back to it would be the parameter's gradient, which is sent as soon as it is complete."""
    assert not layers_of(graph_of(Given()))


def test_a_loss_in_sixteen_bits_has_none() -> None:
    batch = (torch.randn(4, 5, dtype=torch.bfloat16), torch.randn(4, 7, dtype=torch.bfloat16))
    graph = training_graph(Two(lambda layer, x: layer(x)).bfloat16(), flatten(batch), F.mse_loss)
    assert layers_of(graph) == {}


def test_neither_products_nor_the_gradient_are_computed() -> None:
    graph = graph_of(Two(lambda layer, x: layer(x)))
    program = lowered(graph, "second.weight")
    ops = [node.op for node in graph.compute if node.name in program.replaced]
    assert sorted(op for op in ops if "mm" in op) == ["addmm.default", "mm.default", "mm.default"]
    assert {"addmm.default", "mm.default"} == {n.op for n in graph.compute if n.name in program.handed}


def test_a_group_is_one_weight_and_nothing_else() -> None:
    graph = graph_of(Two(lambda layer, x: layer(x)))
    with pytest.raises(PlanError, match=r"no others: first\.weight, not first\.weight, second\.weight"):
        lowered(graph, "first.weight", "second.weight")
    with pytest.raises(PlanError, match="not the weight of a linear layer"):
        lowered(graph, "first.bias")


def test_errors_are_waited_for_as_late_as_they_are_needed() -> None:
    """By the first node that reads the gradient of what the layer is given; else, of a model's first layer, by the
    end."""
    graph = graph_of(Two(lambda layer, x: layer(x)))
    for name, needed in (("second.weight", layers_of(graph)["second.weight"].turn), ("first.weight", None)):
        program = lowered(graph, name)
        (errors,) = (c for c in program.calls if c.op.name == "layer.errors")
        (position,) = (p.position for p in program.placed if any(i.inputs[:1] == (errors,) for i in p.call.inputs[:1]))
        assert position == (len(graph.compute) - 1 if needed is None else needed)
