"""Which targets a mean cross-entropy counts, read off a run of the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from autopar.ir.batch import flatten
from autopar.ir.read_targets import TargetReader, weight_of

SCORES = torch.zeros(6, 5, requires_grad=True)
TARGET = torch.tensor([[1, 2, -100], [3, 0, -100]])


def count(loss: Callable[[torch.Tensor], torch.Tensor]) -> tuple[str, float]:
    """In which unit the batch counts, and how much."""
    batch = flatten({"target": TARGET.clone()})
    with TargetReader(batch) as reader:
        tensors = batch.copied()
        reader.begin(tensors)
        reader.end(loss(tensors[0]))
    weight = weight_of(batch, reader.found)
    return weight.unit, float(weight.of_batch(batch, {}, torch.device("cpu")))


def entropy(target: torch.Tensor, scores: torch.Tensor = SCORES, **settings: object) -> torch.Tensor:
    return F.cross_entropy(scores[: target.numel()], target.reshape(-1), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (entropy, 4),
        (lambda t: entropy(t.clone(), label_smoothing=0.1), 4),
        (lambda t: 0.5 * entropy(t[:, 1:]) + SCORES.square().mean(), 2),
        (lambda t: entropy(F.pad(t, (0, 1), value=-100)[..., 1:].contiguous()), 2),
    ],
)
def test_targets_that_count_are_read(loss: Callable[[torch.Tensor], torch.Tensor], expected: float) -> None:
    assert count(loss) == ("targets that are not ignored", expected)


@pytest.mark.parametrize(
    "loss",
    [
        lambda t: entropy(t, reduction="sum"),
        lambda t: entropy(t, weight=torch.ones(5)),
        lambda t: entropy(t[:, :2]),  # 2 may be a size
        lambda t: entropy(t.view(-1)[1:]),
        lambda t: entropy(t.masked_fill_(t == 0, -100)),
        lambda t: SCORES.square().mean() + entropy(t),
        lambda t: entropy(t).exp(),
        lambda t: entropy(t) * (t != -100).sum() / len(t),  # a sum of targets, a mean of samples
        lambda t: entropy(t) * int((t != -100).sum()) / len(t),
        lambda t: entropy(t).mul((t != -100).sum().item() / len(t)),
        lambda t: SCORES.square().mean(),
        lambda t: entropy(t).detach(),
    ],
)
def test_what_is_not_understood_counts_by_its_samples(loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert count(loss) == ("samples", 2)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda t: entropy(t, weight=torch.ones(5)), "weights its classes"),
        (lambda t: entropy(t.masked_fill(t == 0, -100).view(-1)), "leaves some out"),
        (lambda t: entropy(t.masked_fill_(t == 0, -100)), "leaves some out"),
        (lambda t: entropy(torch.where(t == 0, -100, t)), "leaves some out"),
        (lambda t: entropy(t[t != -100]), "leaves some out"),
        (lambda t: (entropy(t, reduction="none") * (t != 0).view(-1)).sum() / (t != 0).sum(), "the count of a mask"),
        (lambda t: entropy(t[:, :2]), ""),
        (lambda t: SCORES.square().mean() / 2, ""),
        (lambda t: SCORES.square().mean() + SCORES.sum() / SCORES.shape[0], ""),
    ],
)
def test_it_is_said_what_the_loss_may_be_a_mean_over(loss: Callable[[torch.Tensor], torch.Tensor], said: str) -> None:
    batch = flatten({"target": TARGET.clone()})
    with TargetReader(batch) as reader:
        tensors = batch.copied()
        reader.begin(tensors)
        reader.end(loss(tensors[0]))
    assert reader.found == () and (said in reader.unread if said else reader.unread == "")
