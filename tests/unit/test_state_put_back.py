"""What a model holds in other things than plain attributes is as it was behind a plan, whatever ran meanwhile."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.ir.batch import flatten
from autopar.runtime.model.eager import kept_attributes
from autopar.runtime.model.held_values import held_values
from autopar.runtime.model.outputs import output_template


@dataclass(slots=True)
class Slots:
    runs: int = 0


class Tracker:
    def __init__(self) -> None:
        self.runs = 0


TRACKER = Tracker()
RUNS: int | None = None
ARRAY = np.zeros(1)


class Holds(nn.Linear):
    held: Any


class Counts(nn.Module):
    """What it computes depends on how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.other = nn.Linear(4, 3), nn.Linear(4, 3)

    def factor(self, x: torch.Tensor) -> Any:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (self.layer(x) + self.other(x)) / self.factor(x)
        return found


class InSlots(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.held = Slots()

    def factor(self, x: torch.Tensor) -> Any:
        self.held.runs += 1
        return self.held.runs


class InArray(Counts):
    """Could be captured, were the array not written to."""

    def __init__(self) -> None:
        super().__init__()
        self.held = np.zeros(2, np.float32)

    def factor(self, x: torch.Tensor) -> Any:
        self.held[0] += 1
        return torch.from_numpy(self.held[:1])


class InBytes(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.held = bytearray()

    def factor(self, x: torch.Tensor) -> Any:
        self.held.append(1)
        return len(self.held)


class InView(Counts):
    """In the memory of an object that is reached through a view alone, of numbers of another format."""

    def __init__(self) -> None:
        super().__init__()
        self.held = memoryview(bytearray(16)).cast("d"), memoryview(bytearray())

    def factor(self, x: torch.Tensor) -> Any:
        self.held[0][1] += 1
        return self.held[0][1]


class InClass(Counts):
    later: int
    runs, listed = 0, [0]

    def factor(self, x: torch.Tensor) -> Any:
        type(self).runs += 1
        self.listed.append(0)
        type(self).later = getattr(type(self), "later", 0) + 1
        return self.runs + len(self.listed) + self.later


class InGlobals(Counts):
    def factor(self, x: torch.Tensor) -> Any:
        global RUNS
        RUNS = 1 if RUNS is None else RUNS + 1
        TRACKER.runs += 1
        ARRAY[0] += 1
        return RUNS + TRACKER.runs + ARRAY.item()


class InGrownTensor(Counts):
    """By memory of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.held = torch.ones(1)

    def factor(self, x: torch.Tensor) -> Any:
        self.held.data = torch.cat([self.held.data, torch.ones(1)])
        return len(self.held)


class InSparse(Counts):
    """In sparse tensors, of which one gets more elements."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings(action="ignore"):  # PyTorch calls rows of its own a beta
            self.held = torch.zeros(3, 3).to_sparse(), torch.eye(3).to_sparse_csr()

    def factor(self, x: torch.Tensor) -> Any:
        grows, counts = self.held
        grows.add_(torch.eye(3).to_sparse())
        counts.values().add_(1)
        return grows._values().sum().item() + counts.values().sum().item()


class InLeaf(Counts):
    """In a tensor that requires a gradient, and is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [torch.ones(1, requires_grad=True)]

    def factor(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            self.held[0].add_(1)
        return self.held[0].item()


class InTeacher(Counts):
    """A moving average of weights, that is registered nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [nn.Linear(4, 3)]

    def factor(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            for teacher, p in zip(self.held[0].parameters(), self.layer.parameters(), strict=True):
                teacher.mul_(0.5).add_(p, alpha=0.5)
        return 3 + self.held[0](x).detach().mean()


class BehindData(Counts):
    """With more data beside it than is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.held = {"runs": {"all": [0]}}
        self.data = [(k, [k]) for k in range(12_000)]

    def factor(self, x: torch.Tensor) -> Any:
        self.held["runs"]["all"].append(0)
        return len(self.held["runs"]["all"])


class TakesTurns(Counts):
    """An iterator that gives its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.turns, self.listed = itertools.cycle([self.layer, self.other]), iter([self.layer, self.other] * 9)

    def factor(self, x: torch.Tensor) -> Any:
        return 2 + next(self.turns)(x).mean() + next(self.listed)(x).mean()


class SharesIterator(Counts):
    """One iterator, which two modules hold."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = itertools.count(1)
        self.inner = Holds(1, 1).requires_grad_(False)
        self.inner.held = self.ids

    def factor(self, x: torch.Tensor) -> Any:
        return next(self.ids) + 0.5 * next(self.inner.held)


class TakesFrom(Counts):
    def __init__(self, iterator: Iterator[Any]) -> None:
        super().__init__()
        self.held = iterator

    def factor(self, x: torch.Tensor) -> Any:
        return 1 + float(next(self.held))


class RegistersBuffer(Counts):
    """Registers a buffer as it first runs, and could be captured without it."""

    runs: torch.Tensor

    def factor(self, x: torch.Tensor) -> Any:
        if not hasattr(self, "runs"):
            self.register_buffer("runs", torch.zeros(()))
        self.runs += 1
        return self.runs


KINDS: dict[str, Callable[[], Counts]] = {
    kind.__name__: kind
    for kind in (
        InSlots,
        InArray,
        InBytes,
        InView,
        InSparse,
        InClass,
        InGlobals,
        InGrownTensor,
        InLeaf,
        InTeacher,
        BehindData,
        TakesTurns,
        SharesIterator,
        RegistersBuffer,
    )
} | {
    "keys": lambda: TakesFrom(iter(dict.fromkeys(range(99)))),
    "reversed": lambda: TakesFrom(reversed(range(99))),
    "accumulate": lambda: TakesFrom(itertools.accumulate(range(99))),
}


def trained(made: Callable[[], Counts], planned: bool) -> list[torch.Tensor]:
    global RUNS
    RUNS, TRACKER.runs, ARRAY[0], InClass.runs, InClass.listed = None, 0, 0, 0, [0]
    if hasattr(InClass, "later"):
        del InClass.later
    batches = [(torch.full((5, 4), 1 + 0.1 * k), torch.ones(5, 3)) for k in range(4)]
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    program = None
    if planned:
        with pytest.warns(autopar.AutoparWarning, match="runs eagerly"):
            program = autopar.optimize(model, example_inputs=batches[0], loss_fn=F.mse_loss, optimizer=optimizer)
    for x, y in batches:
        if program is None:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        else:
            program.step((x, y))
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_what_counts_runs_counts_steps(kind: str) -> None:
    for a, b in zip(trained(KINDS[kind], planned=True), trained(KINDS[kind], planned=False), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


def test_parameters_of_a_larger_network_are_not_copied_and_said_to_have_changed() -> None:
    model = Holds(4, 3)
    model.held = [nn.Linear(40, 30)]
    put_back = kept_attributes([model])
    put_back()
    with torch.no_grad():
        model.held[0].weight.add_(1)
    with pytest.warns(autopar.AutoparWarning, match="registered nowhere"):
        put_back()


def test_a_large_array_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.runtime.model.in_place.LARGEST", 15)
    model = Holds(4, 3)
    large, small = model.held = np.zeros(2), np.zeros(1)
    put_back = kept_attributes([model])
    large += 1
    small += 1
    put_back()
    assert large.tolist() == [1, 1] and small.tolist() == [0]


def test_a_large_tensor_is_not_copied_and_said_to_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.runtime.model.held_values.LARGEST", 15)
    model = Holds(4, 3)
    large, small = model.held = torch.zeros(4), torch.zeros(3)
    put_back = kept_attributes([model])
    small += 1
    put_back()
    assert small.tolist() == [0, 0, 0]
    large += 1
    with pytest.warns(autopar.AutoparWarning, match="writes to a tensor of 16 B that is registered nowhere"):
        put_back()


class LooksAtValues(Holds):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(next(self.held) * x.sum().item())


def test_an_iterator_is_where_it_was_behind_a_look_at_outputs_that_needs_values() -> None:
    model = LooksAtValues(4, 3)
    model.held = itertools.count()
    output_template(model, flatten((torch.ones(2, 4),)))
    assert next(model.held) == 0


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_tensors_without_values_have_none_to_put_back() -> None:
    indices, values = torch.zeros(2, 4, dtype=torch.int64, device="meta"), torch.zeros(4, device="meta")
    tensor = torch.sparse_coo_tensor(indices, values, (3, 3), device="meta", check_invariants=False)
    held_values([tensor], [])()
