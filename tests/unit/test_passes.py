"""The list of passes: each optional one can be left out, and a pass of one's own runs among them."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import PlanError
from autopar.ir.batch import flatten
from autopar.ir.build import training_graph
from autopar.ir.passes import BEFORE, BEHIND, EVERY, Pass, Passes
from autopar.ir.training_graph import TrainingGraph

OPTIONAL = [p.name for p in (*BEFORE, *BEHIND) if p.optional]
BATCH = (torch.arange(12).view(4, 3) % 7, torch.tensor([0, 1, 2, 1]))


class Net(nn.Module):
    """Of each pass something to do: a lookup, views of views, a softmax with a product behind it, memory to reuse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.key = nn.Linear(6, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.table(words)
        scores = torch.softmax(x @ self.key(x).transpose(1, 2), -1) * torch.sigmoid(x @ x.transpose(1, 2))
        x = x + self.table((words + 1) % 7)
        found: torch.Tensor = self.out(torch.relu((scores @ x).view(4, -1, 6).view(4, 3, 6).mean(1) + 1.0))
        return found


@cache
def captured(passes: Passes = EVERY) -> TrainingGraph:
    torch.manual_seed(5)
    return training_graph(Net().double(), flatten(BATCH), F.cross_entropy, passes=passes)


def results(graph: TrainingGraph) -> list[torch.Tensor]:
    """The loss, and the gradients by parameter."""
    torch.manual_seed(5)
    model = Net().double()
    joint = graph.joint
    assert joint is not None
    given: dict[str, Any] = {
        "parameter": dict(model.named_parameters()),
        "batch": dict(enumerate(flatten(BATCH).tensors)),
        "tangent": {0: torch.ones((), dtype=torch.float64)},
    }
    found = joint.module(*(given[kind][key].detach().clone() for kind, key in joint.inputs))
    return [t for t in found if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("name", OPTIONAL)
def test_a_pass_that_is_left_out_changes_no_number(name: str) -> None:
    graph = captured(Passes(without=(name,)))
    assert name in [d.name for d in captured().passes]
    assert name not in [d.name for d in graph.passes]
    for with_it, without in zip(results(captured()), results(graph), strict=True):
        assert torch.equal(with_it, without)


def test_most_passes_have_something_to_do() -> None:
    """So that leaving them out shows something."""
    idle = [d.name for d in captured().passes if d.name in OPTIONAL and not d.added + d.removed + d.changed + d.moved]
    assert set(idle) <= {"views folded again"}


def test_only_optional_passes_can_be_left_out() -> None:
    with pytest.raises(PlanError, match="no pass 'dropout' can be left out"):
        Passes(without=("dropout",))
    with pytest.raises(PlanError, match="did you mean 'memory reused'"):
        Passes(without=("memory resued",))


def test_what_is_no_pass_is_refused() -> None:
    mine = Pass("mine", "does nothing", lambda joint, capture: joint)
    for wrong in ({"also": mine}, {"also": (len,)}, {"without": "identities"}):
        with pytest.raises(PlanError, match="expected Passes"):
            Passes(**wrong)


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (lambda joint, capture: None, "it returned NoneType"),
        (lambda joint, capture: 1 / 0, "ZeroDivisionError"),
        (lambda joint, capture: joint.module.graph.erase_node(next(iter(joint.module.graph.nodes))), "RuntimeError"),
    ],
)
def test_a_pass_of_ones_own_that_fails_is_named(run: Any, says: str) -> None:
    with pytest.raises(PlanError, match=rf"the pass 'mine', which is your own, failed: .*{says}"):
        captured(Passes(also=(Pass("mine", "fails", run),)))
