"""Models that run eagerly: that their program ran them more often than they were asked for shows nowhere."""

from __future__ import annotations

import copy
import itertools
import logging
import pickle
import queue
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertModel

import autopar
from autopar.runtime.model.eager import kept_attributes
from autopar.runtime.model.held_state import held_within

RUNS = 0
HISTORY: list[float] = []


def counter() -> Callable[[], float]:
    count, listed = 0, [0]

    def counted() -> float:
        nonlocal count
        count, listed[0] = count + 1, listed[0] + 1
        return count + 0.5 * listed[0]

    return counted


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def outside() -> float:
    HISTORY.append(1.0)
    return len(HISTORY)


class Counts(nn.Module):
    """What it computes depends on how often it ran; by `item()` it cannot be captured."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.how = nn.Linear(4, 3), how
        self.total, self.window = torch.zeros(()), torch.zeros(3)[:1]
        self.cycle, self.listed = itertools.cycle([1.0, 2.0, 3.0]), iter([0.5 * k for k in range(1, 90)])
        self.count = counter()
        self.counted: Counter[str] = Counter()
        self.generated, self.mapped = (0.5 * k for k in range(1, 90)), [map(float, range(1, 90))]
        self.endless = itertools.cycle(k for k in (1.0, 2.0, 3.0))

    def factor(self) -> torch.Tensor | float:
        if self.how == "tensor":
            self.total += 1
            return self.total
        if self.how == "view":
            self.window.add_(1)
            return self.window
        if self.how == "cycle":
            return next(self.cycle)
        if self.how == "list iterator":
            return next(self.listed)
        if self.how in ("generated", "endless"):
            return next(getattr(self, self.how))  # type: ignore[no-any-return]
        if self.how == "counted":
            self.counted["runs"] += 1
            return self.counted["runs"]
        if self.how == "mapped":
            return next(self.mapped[0])
        return self.count() if self.how == "closure" else outside()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global RUNS
        if self.how == "global":
            RUNS += 1
            return self.layer(x) * RUNS + 0 * x.sum().item()  # type: ignore[no-any-return]
        return self.layer(x) * self.factor() + 0 * x.sum().item()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "how",
    [
        "tensor",
        "view",
        "cycle",
        "list iterator",
        "generated",
        "endless",
        "mapped",
        "counted",
        "closure",
        "global",
        "function",
    ],
)
def test_what_counts_runs_counts_steps(how: str) -> None:
    global RUNS
    x, y = torch.ones(5, 4), torch.ones(5, 3)
    found = []
    for planned in (False, True):
        RUNS = 0
        HISTORY.clear()
        model = Counts(how)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if planned:
            with pytest.warns(autopar.AutoparWarning, match="runs eagerly"):
                program = autopar.optimize(model, example_inputs=(x, y), loss_fn=F.mse_loss, optimizer=optimizer)
        for _ in range(3):
            if planned:
                program.step((x, y))
            else:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
        found.append(model.layer.weight.detach().clone())
    assert torch.allclose(found[0], found[1], rtol=1e-6, atol=0)


class Centred:
    """A loss that is no module, and counts its calls; by `item()` it cannot be captured."""

    def __init__(self) -> None:
        self.centre, self.calls = torch.zeros(3), 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(output - self.centre, target) + self.calls * output.mean() + 0 * output.sum().item()
        self.calls += 1
        with torch.no_grad():
            self.centre.mul_(0.9).add_(output.mean(0))
        return loss


def listing() -> Callable[..., torch.Tensor]:
    def loss(output: torch.Tensor, target: torch.Tensor, calls: list[int] = [0]) -> torch.Tensor:  # noqa: B006
        calls[0] += 1
        return F.mse_loss(output, target) * calls[0] + 0 * output.sum().item()

    return loss


def counting() -> Callable[..., torch.Tensor]:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls: int = getattr(loss, "calls", 0) + 1
        loss.calls = calls  # type: ignore[attr-defined]
        return F.mse_loss(output, target) * calls + 0 * output.sum().item()

    return loss


def wrapped() -> Callable[..., torch.Tensor]:
    return partial(lambda loss, output, target: loss(output, target), Centred())


def loading() -> Callable[..., torch.Tensor]:
    """With data of its own, which a loader's iterator and a generator give."""
    data = torch.arange(40.0)
    loaded = iter(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=2))
    drawn = (float(k) for k in data)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output * next(loaded)[0].mean(), target) + next(drawn) * output.mean()

    return loss


def behind_a_network() -> Callable[..., torch.Tensor]:
    """A network that is registered nowhere, with running statistics, and a layer whose gradients add up."""
    torch.manual_seed(1)
    norm, layer = nn.BatchNorm1d(3), nn.Linear(3, 3)
    features = nn.Sequential(norm, layer)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        slope = 0.0 if layer.weight.grad is None else layer.weight.grad.abs().sum().item()
        assert norm.running_mean is not None
        return F.mse_loss(features(output), target) + (norm.running_mean.mean() + slope) * output.mean()

    return loss


@pytest.mark.parametrize("made", [Centred, listing, counting, wrapped, loading, behind_a_network])
def test_what_a_loss_counts_that_is_no_module_counts_steps(made: Callable[[], Callable[..., torch.Tensor]]) -> None:
    x, y = torch.ones(5, 4), torch.ones(5, 3)
    eager, eagerly = nn.Linear(4, 3), made()
    model, loss_fn = copy.deepcopy(eager), made()
    alone, optimizer = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (eager, model))
    with pytest.warns(autopar.AutoparWarning, match="runs eagerly"):
        program = autopar.optimize(model, example_inputs=(x, y), loss_fn=loss_fn, optimizer=optimizer)
    for _ in range(3):
        alone.zero_grad()
        expected = eagerly(eager(x), y)
        expected.backward()
        alone.step()
        torch.testing.assert_close(program.step((x, y)), expected.detach())
    torch.testing.assert_close(model.weight, eager.weight)


class Trainer:
    """Its loss names what it counts in, by a method and a property, and nothing of what else it holds."""

    def __init__(self) -> None:
        self.calls, self.data, self.queue, self.named = 0, [torch.zeros(1000)], [torch.zeros(2)], 0

    @property
    def factor(self) -> int:
        return self.calls

    def count(self) -> None:
        self.calls += 1
        self.last = [self.calls for _ in range(2)]
        setattr(self, "named", getattr(self, "named") + 1)  # noqa: B009, B010

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.count()
        return F.mse_loss(output, target) * self.factor


def test_of_the_object_of_a_loss_what_the_loss_names_is_put_back() -> None:
    trainer = Trainer()
    tensors, back = held_within([trainer.loss])
    trainer.loss(torch.ones(2), torch.zeros(2))
    trainer.queue.append(torch.ones(2))  # as another thread does meanwhile
    for one in back:
        one()
    assert not tensors and trainer.calls == trainer.named == 0
    assert not hasattr(trainer, "last") and len(trainer.queue) == 2


class Criterion(nn.Module):
    """A criterion that reads what it writes: a buffer, statistics of batch normalization, and a number of Python's."""

    center: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(2))
        self.normalized = nn.BatchNorm1d(2, affine=False)
        self.calls = 0

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss = F.mse_loss(output - self.center, target) * (1 + 0.1 * self.calls)
        self.center = 0.9 * self.center + 0.1 * self.normalized(output).detach()[0]
        return loss + 0 * self.normalized.running_mean.sum()  # type: ignore[union-attr]


class OfCriterion:
    def __init__(self, criterion: nn.Module) -> None:
        self.of, self.data = {"main": criterion}, [nn.BatchNorm1d(2)]

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> Any:
        return self.parts(output, target)[0]

    def parts(self, output: torch.Tensor, target: torch.Tensor) -> list[Any]:
        return [criterion(output, target) for criterion in self.of.values()]


def called(criterion: nn.Module, output: torch.Tensor, target: torch.Tensor) -> Any:
    return criterion(output, target)


def around(trainer: OfCriterion) -> Callable[..., Any]:
    return lambda output, target: trainer.loss(output, target)


GLOBAL: list[nn.Module] = []


def by_a_global(criterion: nn.Module) -> Callable[..., Any]:
    GLOBAL[:] = [criterion]
    return lambda output, target: GLOBAL[0](output, target)


REACHES: dict[str, Callable[[Any], Any]] = {
    "closure": lambda one: lambda output, target: one(output, target),
    "partial": lambda one: partial(called, one),
    "method": lambda one: OfCriterion(one).loss,
    "a method that a closure names": lambda one: around(OfCriterion(one)),
    "its own method": lambda one: one.forward,
    "global": by_a_global,
}


@pytest.mark.parametrize("reaches", REACHES)
def test_a_module_that_a_loss_function_reaches_is_put_back(reaches: str) -> None:
    model, other, criterion, others = nn.Linear(4, 2), nn.Linear(4, 2), Criterion(), Criterion()
    other.load_state_dict(model.state_dict())
    optimizer, alone = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    batches = [(torch.randn(3, 4), torch.randn(3, 2)) for _ in range(3)]
    loss = REACHES[reaches](criterion)
    with pytest.warns(autopar.AutoparWarning, match=r"(sets buffers of a module|calls' from)[^$]*runs eagerly"):
        program = autopar.optimize(model, optimizer=optimizer, example_inputs=batches[0], loss_fn=loss, strategy="ddp")
    for x, y in batches:
        alone.zero_grad()
        expected = others(other(x), y)
        expected.backward()
        alone.step()
        torch.testing.assert_close(program.step((x, y)), expected.detach())
    torch.testing.assert_close(dict(criterion.state_dict()), dict(others.state_dict()))
    assert criterion.calls == others.calls == 3


def test_of_what_a_loss_function_reaches_only_what_it_names_is_kept() -> None:
    criterion = Criterion()
    tensors, _ = held_within([OfCriterion(criterion).loss], ())
    assert {id(t) for t in tensors} == {id(b) for b in criterion.buffers()}


def test_an_iterator_that_can_be_copied_still_can() -> None:
    model = nn.Linear(4, 3)
    model.pairs = zip([1.0, 2.0, 3.0], itertools.count())  # type: ignore[assignment]
    put_back = kept_attributes([model])
    assert next(model.pairs) == (1.0, 0)  # type: ignore[call-overload]
    put_back()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert list(copied.pairs) == [(1.0, 0), (2.0, 1), (3.0, 2)]  # type: ignore[arg-type]
    assert next(model.pairs) == (1.0, 0)  # type: ignore[call-overload]


class Overrides(OrderedDict[str, Any]):
    """Holds kinds of modules, and gives modules, as `ACT2FN` of Transformers does; it takes strings for keys alone."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key.lower(), value)

    def values(self) -> Any:
        return [self[key] for key in self]


class OfStars(list[Any]):
    def __iter__(self) -> Any:
        return (f"*{value}" for value in super().__iter__())


class Feed(queue.Queue[float]):
    """One of a user's own."""


def test_what_threads_change_meanwhile_is_not_put_back() -> None:
    model = nn.Linear(4, 3)
    feed, log = Feed(), logging.getLogger(__name__)
    model.feed, model.log = feed, log  # type: ignore[assignment]
    put_back = kept_attributes([model])
    feed.put(1.0)
    name = f"{__name__}.{id(model)}"
    child = logging.getLogger(name)
    put_back()
    assert feed.get(timeout=0) == 1.0
    assert logging.getLogger(name) is child


def test_containers_that_give_something_else_than_they_hold_hold_what_they_held() -> None:
    model = nn.Linear(4, 3)
    table, stars = Overrides(relu=nn.ReLU, gelu=nn.GELU), OfStars(["a", "b"])
    table.move_to_end("relu")
    model.table, model.stars = table, stars  # type: ignore[assignment]
    put_back = kept_attributes([model])
    table["tanh"] = nn.Tanh
    stars.append("c")
    for _ in range(2):  # once changed, once as it was
        put_back()
        assert list(OrderedDict.items(table)) == [("gelu", nn.GELU), ("relu", nn.ReLU)]
        assert list(list.__iter__(stars)) == ["a", "b"]


def test_the_table_of_activations_still_makes_them_behind_a_plan() -> None:
    config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=16)
    ids = torch.arange(8).reshape(2, 4)
    for _ in range(2):  # the first leaves the table behind
        model = BertModel(config, add_pooling_layer=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        program = autopar.optimize(
            model, optimizer=optimizer, example_inputs=(ids, ids), loss_fn=of_hidden_states, strategy="ddp"
        )
        assert torch.isfinite(program.step((ids, ids)))


def of_hidden_states(output: Any, target: torch.Tensor) -> torch.Tensor:
    return output.last_hidden_state.square().mean()  # type: ignore[no-any-return]
