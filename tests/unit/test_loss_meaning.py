"""What a batch shows of its loss, and what ranks conclude from what each has found."""

from __future__ import annotations

import queue
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import AutoparWarning
from autopar.ir.batch import flatten
from autopar.ir.batch_weight import UnreadWeight
from autopar.ir.build import training_graph
from autopar.ir.read_targets import weight_of
from autopar.runtime.compiled import Settings
from autopar.runtime.job.process_group import Group, Rendezvous
from autopar.runtime.losses.findings import Finding, agreed_ratios, conclude
from autopar.runtime.losses.meaning import LossMeaning
from autopar.runtime.losses.probe import PartLosses, part_losses
from autopar.runtime.uncaptured.look import look_at

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
BATCH = (torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, -100, 1, 0]))


class Model(nn.Module):
    """What must not be left otherwise: modes, statistics, a counter, a buffer that is replaced."""

    step: torch.Tensor

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 4), *layers, nn.Linear(4, 3))
        self.register_buffer("step", torch.zeros(()))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.step = self.step + 1
        x.mul_(2)
        scores: torch.Tensor = self.layers(x)
        return scores


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


class OnlyInTraining(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5, self.training)


class Raises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert len(x) == 6, "positions are of six samples"
        return x


def meaning(loss: Loss, given: Callable[[Any], float] | None = None) -> LossMeaning:
    model = nn.Linear(4, 3)
    alone = Group(0, 1, None, 60.0)
    return LossMeaning(model, loss, given, Rendezvous(alone), {}, torch.device("cpu"))


def found(loss: Loss, given: Callable[[Any], float] | None = None) -> Finding:
    m = meaning(loss, given)
    graph = training_graph(m.finder.model, flatten(BATCH), loss)
    assert graph.joint is not None and graph.joint.weight is not None
    return m.finder.find(graph.joint.weight, flatten(BATCH))


def test_running_parts_of_a_batch_leaves_everything_as_it_was() -> None:
    model = Model(nn.BatchNorm1d(4), nn.Dropout(0.5))
    model.layers[2].eval()
    modes = [m.training for m in model.modules()]
    state = {n: v.clone() for n, v in model.state_dict().items()}
    held, x = model.step, BATCH[0].clone()
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    assert isinstance(part_losses(model, F.cross_entropy, flatten((x, BATCH[1]))), PartLosses)
    assert modes == [m.training for m in model.modules()]
    assert model.calls == 0 and model.step is held and torch.equal(x, BATCH[0])
    assert all(torch.equal(v, state[n]) for n, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]
    assert np.random.get_state()[1].tolist() == generators[2]  # type: ignore[index]


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(4), nn.Dropout(0.5), OnlyInTraining()], ids=lambda x: type(x).__name__
)
def test_dropout_and_batch_statistics_do_not_make_it_a_loss_across_samples(layer: nn.Module) -> None:
    losses = part_losses(Model(layer), F.cross_entropy, flatten(BATCH))
    assert isinstance(losses, PartLosses)
    assert losses.is_mean((2, 3)) and losses.is_mean((2, 4)) is False and losses.is_sum() is False
    assert part_losses(Model(layer), F.cross_entropy, flatten((BATCH[0][:1], BATCH[1][:1]))) == (
        "the batch has fewer than two samples"
    )


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (Noise(), "random numbers"),
        (nn.BatchNorm1d(4, track_running_stats=False), "without running statistics"),
        (Raises(), "AssertionError"),
    ],
)
def test_what_cannot_be_seen_is_not_guessed(layer: nn.Module, why: str) -> None:
    losses = part_losses(Model(layer), F.cross_entropy, flatten(BATCH))
    assert isinstance(losses, str) and why in losses


def test_a_part_of_which_nothing_counts_has_no_loss() -> None:
    target = torch.tensor([-100, -100, 2, 1, 1, 0])
    losses = part_losses(Model(), F.cross_entropy, flatten((BATCH[0], target)))
    assert isinstance(losses, PartLosses)
    assert losses.is_mean((0, 4)) and losses.is_mean((1, 4)) is None


def test_each_part_is_run_from_the_same_state() -> None:
    class Warms(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = super().forward(x) * self.step * self.calls
            return scores

    losses = part_losses(Warms(), F.cross_entropy, flatten(BATCH))
    assert isinstance(losses, PartLosses) and losses.is_mean((2, 3))
    left = queue.SimpleQueue[float]()  # which cannot be put back
    for k in (1.0, 2.0, 3.0, 4.0):
        left.put(k)
    said = part_losses(Model(), lambda s, t: F.cross_entropy(s, t) * left.get(), flatten(BATCH))
    assert isinstance(said, str) and "run once more" in said


def per_target(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """No graph shows it, and a part of which nothing counts loses 0."""
    return F.cross_entropy(scores, target, reduction="sum") / max(1, int((target != -100).sum()))


@pytest.mark.parametrize("first", [-100, 1])
def test_a_part_that_loses_nothing_does_not_make_the_loss_a_sum(first: int) -> None:
    target = torch.tensor([-100, -100, first, 1, -100, 0])
    f = meaning(per_target).finder.find(UnreadWeight("samples", is_sum=True), flatten((BATCH[0], target)))
    is_sum, said = conclude([f], 2, False)
    assert not is_sum and "is not the mean of what its parts lose" in str(said)
    nothing = torch.full((6,), -100)
    f = meaning(per_target).finder.find(UnreadWeight("samples", is_sum=True), flatten((BATCH[0], nothing)))
    is_sum, said = conclude([f], 2, False)
    assert not is_sum and "is not known" in str(said)


def test_an_eager_loss_that_weights_its_classes_is_not_known_though_one_sample_shows_nothing() -> None:
    def weighted(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(scores, target, weight=torch.tensor([0.1, 1.0, 2.0]))

    batch = flatten((BATCH[0][:1], BATCH[1][:1]))
    for loss, said in ((weighted, "its cross-entropy weights its classes"), (F.cross_entropy, None)):
        seen = look_at(nn.Linear(4, 3), batch, Settings(loss_fn=loss), "step")
        finding = meaning(loss).finder.find(weight_of(batch, seen.targets, seen.unread), batch)
        _, problem = conclude([finding, finding], 2, False)
        assert problem is None if said is None else said in str(problem)


def test_an_eager_batch_of_tensors_of_many_sizes_is_said_once_to_count_by_its_first() -> None:
    read = UnreadWeight("samples", is_sum=True)
    graphs: Any = {"x": torch.randn(10, 4), "y": torch.randn(3, 3)}
    m = LossMeaning(nn.Linear(4, 3), None, None, Rendezvous(Group(0, 1, None, 60.0)), {}, torch.device("cpu"))
    finding = m.finder.find(read, flatten(graphs))
    _, said = conclude([finding], 2, False)
    assert "differ in dimension 0 (10, 3)" in str(said)
    assert conclude([finding, Finding(3, True, True, looks_like_mean=True)], 2, False) == (False, None)
    with pytest.warns(AutoparWarning, match="differ in dimension 0"):
        assert m.weigh(read, flatten(graphs), graphs) == 10
    assert m.weigh(read, flatten(graphs), graphs) == 10


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (F.cross_entropy, (True, False)),
        (lambda s, t: F.cross_entropy(s, t, weight=torch.tensor([1.0, 2.0, 3.0])), (True, False)),
        (lambda s, t: F.cross_entropy(s, t, reduction="sum"), (False, True)),
        (lambda s, t: s.square().sum() / 6, (False, True)),
        (lambda s, t: s.square().sum() / len(s), (True, False)),
        (lambda s, t: F.cross_entropy(s @ s.T, torch.arange(len(s))), (False, False)),
        (lambda s, t: -s.mean(1).softmax(0).log().mean(), (False, False)),
        (lambda s, t: F.relu(s.mean(1)[:, None] - s.mean(1)[None]).mean(), (False, False)),
        (lambda s, t: s.square().mean() + F.cross_entropy(s, t), (None, False)),
    ],
    ids=["mean", "class weights", "sum", "by a number", "by the size", "negatives", "softmax", "pairs", "two counts"],
)
def test_the_first_batch_shows_what_the_loss_is(loss: Loss, expected: tuple[bool | None, bool]) -> None:
    f = found(loss)
    assert (f.looks_like_mean, f.looks_like_sum) == expected, f


@pytest.mark.parametrize(
    ("given", "fits"), [(lambda b: float((b[1] != -100).sum()), True), (lambda b: len(b[1]), False)]
)
def test_a_weight_that_is_given_is_held_against_the_first_batch(given: Callable[[Any], float], fits: bool) -> None:
    f = found(F.cross_entropy, given)
    assert f.looks_like_mean is fits
    is_sum, said = conclude([f], 2, given=True)
    assert not is_sum and (said is None) == fits
    assert fits or "counts by what weight= returns" in str(said)


def test_ranks_conclude_the_same_from_what_each_has_found() -> None:
    either, mean, total = Finding(6, True, True), Finding(6), Finding(5, False, True)
    assert conclude([either, either], 2, False) == (False, None)
    assert conclude([either, total], 2, False)[0] and "is a sum over the batch" in str(
        conclude([either, total], 2, False)[1]
    )
    assert conclude([either, mean], 2, False) == (False, None)
    assert "a mean over the batch on some ranks" in str(conclude([mean, total], 2, False)[1])
    seen = Finding(6, True, True, looks_like_mean=False, looks_like_sum=True)
    assert conclude([either, seen], 2, False)[0]
    neither = Finding(6, True, True, looks_like_mean=False, looks_like_sum=False)
    assert "is not the mean" in str(conclude([either, neither], 2, False)[1])
    assert conclude([Finding(6, False, False, problem="is odd"), mean], 2, False)[1] is not None
    assert conclude([total], 1, False) == (True, None)


def test_ratios_agree_where_no_two_differ() -> None:
    assert agreed_ratios([(2.0, None), (2.0, 3.0), (None, 3.0)]) == (2.0, 3.0)
    assert agreed_ratios([(2.0,), (2.5,)]) is None
    assert agreed_ratios([(2.0,), ()]) is None


def test_a_batch_of_graphs_counts_by_what_the_loss_is_given_as_target() -> None:
    """No graph of the model shows what the loss is a mean over, and the first tensor has a row for each node."""
    read = UnreadWeight("samples", is_sum=True)
    nodes, edges, labels = torch.randn(10, 4), torch.zeros(2, 7, dtype=torch.long), torch.tensor([0, 1, 2])
    graphs: Any = ({"x": nodes, "edges": edges}, labels)
    m = meaning(F.cross_entropy)
    assert m.weigh(read, flatten(graphs), graphs) == 3
    assert m.weigh(read, flatten(BATCH), BATCH) == 6
    whole = ({"x": nodes}, torch.zeros(()))
    assert m.weigh(read, flatten(whole), whole) == 10


def test_a_single_graph_is_not_taken_apart_into_its_nodes() -> None:
    """Its target, with one row, is no tensor that all samples share."""

    class Pooled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum(0, keepdim=True).square()

    m = LossMeaning(Pooled(), F.mse_loss, None, Rendezvous(Group(0, 1, None, 60.0)), {}, torch.device("cpu"))
    batch = flatten((torch.randn(6, 1), torch.zeros(1, 1)))
    finding = m.finder.find(UnreadWeight("samples", is_sum=True), batch)
    assert finding.looks_like_mean is None and "target" in finding.seen


class Recurrent(nn.Module):
    """Its batches have time in dimension 0, unless it is told otherwise."""

    def __init__(self, batch_first: bool = False) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 4, batch_first=batch_first), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.rnn(x)[0])
        return scores


@pytest.mark.parametrize("samples, expected", [(6, True), (1, None)])
def test_sequences_whose_first_dimension_is_time_are_taken_apart_in_the_second(
    samples: int, expected: bool | None
) -> None:
    alone = Group(0, 1, None, 60.0)
    batch = flatten((torch.randn(4, samples, 3), torch.randn(4, samples, 2)))
    for model, loss, looks in (
        (Recurrent(), F.mse_loss, expected),
        (Recurrent(), lambda o, t: F.mse_loss(o, t) + o.std((0, 1), correction=0).mean(), False if expected else None),
        (Recurrent(batch_first=True), lambda o, t: F.mse_loss(o - o.mean(0), t), False),
    ):
        m = LossMeaning(model, loss, None, Rendezvous(alone), {}, torch.device("cpu"))
        graph = training_graph(model, batch, loss)
        assert graph.joint is not None and graph.joint.weight is not None
        assert m.finder.find(graph.joint.weight, batch).looks_like_mean is looks
