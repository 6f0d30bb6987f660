"""Batches of whatever Python has: dataclasses, sets, slices and other objects, with tensors in them or beside them."""

from __future__ import annotations

import copy
import enum
import types
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparWarning, CaptureError
from autopar.ir.batch import flatten
from autopar.ir.listed import chosen
from tests.gloo.ranks import run_ranks
from tests.tiers import newer
from tests.unit.as_eager import train


def _x(seed: int = 0, rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


class Colour(enum.Enum):
    RED = 1


@dataclass
class Sample:
    x: torch.Tensor
    scale: float = 2.0
    more: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.x = self.x + 1  # which is not to be done again
        self.twice = 2 * self.x


@dataclass(frozen=True, slots=True)
class Frozen:
    of: Sample
    x: torch.Tensor


class Holds:
    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.twice, self.scale = x, 2 * x, 2.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2).double()

    def forward(self, batch: Any) -> torch.Tensor:
        found: torch.Tensor = self.layer(batch.x + batch.twice) * batch.scale
        return found


class Within(Net):
    def forward(self, batch: Any) -> torch.Tensor:
        found: torch.Tensor = super().forward(batch.of) + self.layer(batch.x)
        return found


class Beside(Net):
    """Is given something besides its tensor."""

    def forward(self, x: torch.Tensor, other: Any) -> torch.Tensor:  # type: ignore[override]
        scale = len(other) if isinstance(other, (set, frozenset, range)) else 2.0
        found = self.layer(x[other] if isinstance(other, slice) else x)
        factor: Any = found.new_tensor(other) if isinstance(other, np.ndarray) else scale
        return torch.mul(found, factor)


class Sets(Net):
    """Hands its result back in the batch."""

    def forward(self, batch: Any) -> None:  # type: ignore[override]
        batch.found = super().forward(batch)


def _as_alone(net: nn.Module, batches: list[tuple[Any, ...]], before: nn.Module | None = None, **settings: Any) -> None:
    """The gradients of a drop-in module are those of the model itself, and so are those of a layer that stands before
    it, and makes what it is given."""
    eager, eager_before = copy.deepcopy((net, before))
    module = autopar.optimize(net, example_inputs=batches[0], **settings)
    for model, first in ((module, before), (eager, eager_before)):
        for batch in batches:
            if first is not None:
                batch = tuple(type(b)(first(b.x)) for b in batch)
            out = model(*batch)
            _loss(batch[0].found if out is None else out, torch.ones(1, 2).double()).backward()
    for a, b in zip(net.parameters(), eager.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.allclose(a.grad, b.grad, rtol=1e-12)
    if before is not None and eager_before is not None:
        for a, b in zip(before.parameters(), eager_before.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None and torch.allclose(a.grad, b.grad, rtol=1e-12)


@pytest.mark.parametrize("capture", [pytest.param("always", marks=newer), "never"])
def test_tensors_in_dataclasses_are_inputs_like_others(capture: Any) -> None:
    _as_alone(Net(), [(Sample(_x(i)),) for i in range(3)], nn.Linear(4, 4).double(), capture=capture)
    _as_alone(Within(), [(Frozen(Sample(_x(i)), _x(7)),) for i in range(3)], capture=capture)
    batches = [(Sample(_x(i)), _x(9)[:, :2]) for i in range(3)]
    train(Net(), batches, loss_fn=_loss, capture=capture)


def test_dataclasses_say_where_their_tensors_lie_and_list_samples_as_dicts_do() -> None:
    batch = flatten({"a": [Frozen(Sample(_x(), more=[_x()]), _x())]})
    places = ("of.x", "of.more[0]", "of.twice", "x")
    assert batch.names == tuple(f"batch['a'][0].{place}" for place in places)
    listed = {"images": [_x()] * 3, "targets": [Sample(_x(rows=2))] * 3}
    assert flatten(listed).size == 3 and flatten(chosen(listed, 3, [1])).size == 1
    of_one = Sample(_x(rows=2))
    of_one.twice = of_one  # type: ignore[assignment]
    assert flatten(of_one).size == len(chosen(of_one, 2, [1, 0]).x) == 2, (
        "what holds itself is not looked into for ever"
    )


@newer
def test_a_dataclass_that_the_model_sets_is_handed_back() -> None:
    with pytest.warns(AutoparWarning, match="sets 'found' of a dataclass in its batch.*runs eagerly"):
        _as_alone(Sets(), [(Sample(_x(i)),) for i in range(3)])


@pytest.mark.parametrize("other", [slice(1, 4), slice(None), {"a", "b"}, frozenset("abc"), range(3), Colour.RED, None])
def test_what_is_no_tensor_is_part_of_the_graph(other: Any) -> None:
    _as_alone(Beside(), [(_x(i), other) for i in range(3)], capture="always")
    train(Beside(), [((_x(i), other), _x(9)[:1, :2]) for i in range(3)], loss_fn=_loss, capture="always")


def test_values_that_differ_are_told_apart() -> None:
    pairs = [({1}, {1.0}), (slice(0), slice(0.0)), (range(0, 3, 2), range(0, 4, 2)), ({1}, frozenset({1}))]
    for one, other in pairs:
        first, second = (flatten((_x(), value)).signature for value in (one, other))
        assert first != second and first == flatten((_x(), copy.deepcopy(one))).signature


@pytest.mark.parametrize("kind", [Holds, lambda x: types.SimpleNamespace(x=x, twice=2 * x, scale=2.0)])
def test_a_batch_whose_tensors_no_graph_sees_is_run_on_eagerly(kind: Any) -> None:
    """A graph would hold on to them, and no gradient would flow to what has made them."""
    with pytest.warns(AutoparWarning, match="the batch holds an object of type .*runs eagerly"):
        _as_alone(Net(), [(kind(_x(i)),) for i in range(3)])
    with pytest.raises(CaptureError, match="the batch holds an object of type"):
        autopar.optimize(Net(), example_inputs=(kind(_x()),), capture="always")
    if kind is Holds:
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            _as_alone(Net(), [(Holds(_x(i)),) for i in range(2)], nn.Linear(4, 4).double())


def test_an_array_of_numpy_is_run_on_eagerly() -> None:
    with pytest.warns(AutoparWarning, match=r"an object of type numpy\.ndarray, which cannot be told"):
        _as_alone(Beside(), [(_x(i), np.full((5, 1), i + 1.0)) for i in range(3)])


class OfRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(_x(9, 4)[:, :2].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.sparse.mm(x, self.table)
        return found


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_batches_are_run_on_eagerly(layout: torch.layout) -> None:
    with pytest.warns(AutoparWarning, match="it reads a sparse tensor"):
        _as_alone(OfRows(), [(_x(i).relu().to_sparse(layout=layout),) for i in range(3)])


def ranks(rank: int, n: int) -> list[float]:
    """How far from one process on the global batch: of dataclasses, of objects, and of these in turns."""
    found = []
    for kinds in ((Sample, Sample), (Holds, Holds), (Sample, Holds)):
        net, rows = Net(), [2, 3][:n]
        eager = copy.deepcopy(net)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            module = autopar.optimize(net, example_inputs=kinds[0](_x(0, rows[rank])))
            for i in range(3):
                own = [kinds[(i + r) % 2 if i else 0](_x(9 * i + r, rows[r])) for r in range(n)]
                for model in (net, eager):
                    model.zero_grad()
                module(own[rank]).square().mean().backward()
                torch.cat([eager(b) for b in own]).square().mean().backward()
                pairs = zip(net.parameters(), eager.parameters(), strict=True)
                found.append(max(float((a.grad - b.grad).abs().max()) for a, b in pairs))  # type: ignore[operator]
        assert not any("is not the mean" in str(w.message) for w in said)
    return found


def test_ranks_have_the_gradient_of_one_process() -> None:
    for found in run_ranks(2, ranks):
        assert max(found) < 1e-12


class _SetsEntries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        batch["hidden"]["last"] = self.layer(batch["x"])
        batch["all"].append(batch["hidden"]["last"])
        return batch["hidden"]["last"].sum()  # type: ignore[no-any-return]


def test_what_a_captured_module_does_not_set_in_its_batch_is_said() -> None:
    module = autopar.optimize(_SetsEntries(), example_inputs=({"x": torch.ones(2, 4), "hidden": {}, "all": []},))
    given: dict[str, Any] = {"x": torch.ones(2, 4), "hidden": {}, "all": []}
    with pytest.warns(autopar.AutoparWarning, match=r"sets batch\['hidden'\]\['last'\] in what it is given") as said:
        for _ in range(2):
            module(given).backward()
    assert len([w for w in said if "in what it is given" in str(w.message)]) == 1
    assert given["hidden"] == {}
