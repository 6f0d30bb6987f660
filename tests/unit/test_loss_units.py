"""Batches that count as others did, of whose shapes a graph shows less; and losses that become others as training goes
on. Micro-batches of one process are weighed as those of several ranks are."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.ir.batch import Batch
from autopar.ir.batch_weight import BatchWeight
from autopar.runtime.losses.finder import Finder
from autopar.runtime.losses.findings import Finding, PerSample, units_differ

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def squeezed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of one sample, its graph shows a mean over elements."""
    return (output.squeeze() - target.squeeze()).square().mean(-1).mean()


def one_by_one(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.stack([(a - b).square().mean() for a, b in zip(output, target, strict=True)]).mean()


def batch(seed: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=g).double(), torch.randn(size, 3, generator=g).double()


def trained(
    loss: Loss,
    sizes: Sequence[Sequence[int]],
    before: Callable[[int], None] = lambda step: None,
    capture: Literal["auto", "never"] = "auto",
) -> tuple[float, list[str]]:
    """How far parameters are from those of steps on whole batches, after steps on micro-batches of these sizes; and
    what was said."""
    torch.manual_seed(0)
    mine = nn.Linear(4, 3).double()
    other = copy.deepcopy(mine)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (mine, other)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", autopar.AutoparWarning)
        program = autopar.optimize(
            mine,
            example_inputs=batch(0, sizes[0][0]),
            optimizer=optimizers[0],
            loss_fn=loss,
            check="never",
            capture=capture,
        )
        for step, each in enumerate(sizes):
            before(step)
            parts = [batch(10 * step + i, size) for i, size in enumerate(each)]
            program.step(micro_batches=parts)
            x, y = (torch.cat(p) for p in zip(*parts, strict=True))
            optimizers[1].zero_grad()
            loss(other(x), y).backward()
            optimizers[1].step()
    texts = [str(w.message) for w in said if issubclass(w.category, autopar.AutoparWarning)]
    pairs = zip(mine.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs), texts


@pytest.mark.parametrize("sizes", [[(1, 5)], [(3, 3), (1, 3)], [(1, 1), (1, 5)]], ids=str)
@pytest.mark.parametrize("loss", [squeezed, one_by_one])
def test_a_batch_of_one_sample_counts_as_one(loss: Loss, sizes: list[tuple[int, int]]) -> None:
    distance, said = trained(loss, sizes)
    assert distance <= 1e-12
    assert len(said) == 1 and any(w in said[0] for w in ("ounts by its samples", "A batch of"))


@pytest.mark.parametrize("sizes", [[(3, 2, 1)], [(1, 2)], [(2, 2), (3, 1)]], ids=str)
def test_what_is_taken_out_of_the_only_sample_is_that_samples(sizes: list[tuple[int, ...]]) -> None:
    def scaled(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output * output[:, 0].squeeze(0)[..., None] - target).square().mean()

    distance, said = trained(scaled, sizes)
    assert distance <= 1e-12 and said == []


@pytest.mark.parametrize("sizes", [[(3, 2, 4)], [(2, 3)], [(4, 4), (2, 4)]], ids=str)
def test_a_batch_of_which_a_graph_shows_nothing_counts_as_much_as_others(sizes: list[tuple[int, ...]]) -> None:
    """By elements, as the others, and not by samples beside them."""

    def two_by_themselves(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return one_by_one(output, target) if len(output) == 2 else F.mse_loss(output, target)

    distance, said = trained(two_by_themselves, sizes)
    assert distance <= 1e-12
    assert len(said) == 1 and "counts by its samples, each as much as in other batches" in said[0]


def test_a_batch_of_which_nothing_counts_says_nothing_of_others() -> None:
    def masked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        kept = (target[:, :1] > (9 if len(target) == 3 else -9)).double().expand_as(output)
        each = (output - target).square() * kept
        return one_by_one(output, target) if len(output) == 2 else each.sum() / kept.sum().clamp(min=1)

    torch.manual_seed(0)
    net = nn.Linear(4, 3).double()
    eager = copy.deepcopy(net)
    parts = [batch(i, size) for i, size in enumerate((3, 2))]
    with pytest.warns(autopar.AutoparWarning, match="takes single samples"):
        program = autopar.optimize(
            net, example_inputs=parts[0], optimizer=torch.optim.SGD(net.parameters(), lr=0.1), loss_fn=masked
        )
        program.step(micro_batches=parts)
    x, y = parts[1]
    F.mse_loss(eager(x), y).backward()
    for p, q in zip(net.parameters(), eager.parameters(), strict=True):
        assert q.grad is not None and torch.allclose(p, q - 0.1 * q.grad, rtol=1e-12)


def test_batches_of_one_size_are_as_before() -> None:
    distance, said = trained(F.mse_loss, [(1, 5), (3, 3), (1, 1)])
    assert distance <= 1e-12 and said == []


class Warmup:
    factor = 0.0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(output, target)
        if self.factor:
            loss = loss + self.factor * F.cosine_similarity(output[:, None], output[None], dim=-1).mean()
        return loss


def test_a_term_across_samples_is_seen_when_it_is_switched_on() -> None:
    loss = Warmup()
    distance, said = trained(loss, [(3, 3)] * 4, lambda step: setattr(loss, "factor", 1.0 if step >= 2 else 0.0))
    assert distance > 1e-5 and len(said) == 1 and "is not the mean of what its parts lose" in said[0]


class OfABuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Buffer(torch.zeros((), dtype=torch.float64))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target) + self.factor * F.cosine_similarity(output[:, None], output[None], -1).mean()


@pytest.mark.parametrize("capture", ["auto", "never"])
def test_a_term_across_samples_that_no_graph_shows_is_seen_from_time_to_time(
    capture: Literal["auto", "never"],
) -> None:
    loss, sizes = OfABuffer(), [(3, 3)] * 9
    assert trained(loss, sizes, capture=capture)[1] == []
    distance, said = trained(
        loss, sizes, lambda step: setattr(loss, "factor", torch.tensor(step >= 5, dtype=torch.float64)), capture
    )
    assert distance > 1e-5 and len(said) == 1 and "is not the mean of what its parts lose" in said[0]


def test_batches_of_other_sizes_are_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int | None] = []
    find = Finder.find

    def counted(finder: Finder, weight: BatchWeight, batch: Batch) -> Finding:
        looked.append(batch.size)
        return find(finder, weight, batch)

    monkeypatch.setattr(Finder, "find", counted)
    trained(F.mse_loss, [(3, 3), (4, 2), (5, 1)])
    assert looked == [3]


def test_units_that_differ_are_named_with_their_ranks() -> None:
    elements, samples = Finding(4, unit="elements", per_sample=3), Finding(4, unit="elements", per_sample=1)
    assert units_differ([elements, elements]) is None and units_differ([Finding(0), elements]) is None
    assert units_differ([elements, samples]) is None  # sequences of one element
    said = units_differ([elements, Finding(4, unit="targets")])
    assert "over elements on rank 0" in str(said) and "over targets on rank 1" in str(said)
    one = Finding(1, unit="elements", per_sample=3)
    assert units_differ([one, elements]) is None and "rank 0, with one sample" in str(units_differ([one, samples]))


def test_later_batches_are_held_to_what_a_sample_had() -> None:
    several, one = Finding(4, per_sample=1), Finding(1, per_sample=3)
    held, of_one = PerSample.agreed([several, Finding(1, per_sample=1)]), PerSample.agreed([one, one])
    assert held is not None and held.of(3, 1) == 1 and held.of(12, 4) == 12
    assert of_one is not None and of_one.of(5, 5) == 15 and of_one.of(10, 5) == 10
    assert PerSample.agreed([Finding(4, per_sample=3)]) is None and PerSample.agreed([Finding(4)]) is None
