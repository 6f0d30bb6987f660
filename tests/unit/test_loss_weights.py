"""Losses, and how much a batch counts in each: shares of uneven parts of a batch give the whole batch's gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.ir.batch import flatten
from autopar.ir.batch_weight import BatchWeight
from autopar.ir.build import training_graph
from autopar.ir.capture import JointGraph, capture_joint
from autopar.ir.passes import EVERY, Capture, run_passes
from autopar.ir.weights import batch_weight

CLASSES, LENGTH = 5, 3
Loss = Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]


class Scores(nn.Module):
    """Scores of every word of a sample over the classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, CLASSES)
        self.temperature = nn.Parameter(torch.tensor([0.3]))

    def forward(self, x: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layer(x)
        return scores


MODEL = Scores().double()
CLASS_WEIGHTS = torch.tensor([1.0, 0.5, 2.0, 3.0, 0.25], dtype=torch.float64)


def batch(sizes: Iterable[int] = (2, 4)) -> dict[str, torch.Tensor]:
    n = sum(sizes)
    g = torch.Generator().manual_seed(3)
    target = torch.randint(0, CLASSES, (n, LENGTH), generator=g)
    target[0, 1:] = -100
    target[1, 0] = -100
    return {
        "x": torch.randn(n, LENGTH, 4, generator=g, dtype=torch.float64),
        "target": target,
        "label": torch.randint(0, CLASSES, (n,), generator=g),
        "y": torch.randn(n, LENGTH, CLASSES, generator=g, dtype=torch.float64),
        "p": torch.rand(n, LENGTH, CLASSES, generator=g, dtype=torch.float64),
        "mask": (torch.rand(n, LENGTH, generator=g) < 0.5).double() + torch.eye(n, LENGTH).double(),
    }


def words(reduction: str = "mean", **settings: Any) -> Loss:
    return lambda s, b: F.cross_entropy(s.view(-1, CLASSES), b["target"].view(-1), reduction=reduction, **settings)


def each(s: torch.Tensor, b: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(s.transpose(1, 2), b["target"].clamp(min=0), reduction="none")


def l2() -> torch.Tensor:
    return 1e-2 * sum((p.square().sum() for p in MODEL.parameters()), torch.zeros((), dtype=torch.float64))


def of(loss: Callable[..., torch.Tensor], against: str = "y", **settings: Any) -> Loss:
    return lambda s, b: loss(s, b[against], **settings)


MEANS: dict[str, Loss] = {
    "cross-entropy": words(),
    "its mean": lambda s, b: words()(s, b).mean(),
    "its half": lambda s, b: 0.5 * words()(s, b),
    "divided by four": lambda s, b: words()(s, b) / 4,
    "with l2": lambda s, b: words()(s, b) + l2(),
    "with a learned scale": lambda s, b: words()(s, b) * torch.exp(-MODEL.temperature) + MODEL.temperature,
    "smoothed": words(label_smoothing=0.1),
    "class weights": words(weight=CLASS_WEIGHTS),
    "smoothed, class weights": words(weight=CLASS_WEIGHTS, label_smoothing=0.1),
    "of images": lambda s, b: F.cross_entropy(s.transpose(1, 2), b["target"]),
    "images, class weights": lambda s, b: F.cross_entropy(s.transpose(1, 2), b["target"], weight=CLASS_WEIGHTS),
    "probabilities": lambda s, b: F.cross_entropy(s.transpose(1, 2), b["p"].transpose(1, 2)),
    "nll": lambda s, b: F.nll_loss(s.log_softmax(-1).mean(1), b["label"]),
    "sum over count": lambda s, b: words("sum")(s, b) / (b["target"] != -100).sum(),
    "masked": lambda s, b: (each(s, b) * b["mask"]).sum() / b["mask"].sum(),
    "masked, clamped": lambda s, b: (each(s, b) * b["mask"]).sum() / b["mask"].sum().clamp(min=1),
    "masked, epsilon": lambda s, b: (each(s, b) * b["mask"]).sum() / (b["mask"].sum() + 1e-12),
    "masked, maximum": lambda s, b: (each(s, b) * b["mask"]).sum() / torch.maximum(b["mask"].sum(), torch.ones(())),
    "masked, reciprocal": lambda s, b: (each(s, b) * b["mask"]).sum() * (1 / b["mask"].sum()),
    "masked, normalised before": lambda s, b: (each(s, b) * (b["mask"] / b["mask"].sum())).sum(),
    "masked, two means": lambda s, b: (each(s, b) * b["mask"]).mean() / b["mask"].mean(),
    "masked, all ones": lambda s, b: (each(s, b) * torch.ones_like(b["mask"])).sum() / torch.ones_like(b["mask"]).sum(),
    "masked, those left": lambda s, b: words("sum")(s, b) / (b["target"].numel() - (b["target"] == -100).sum()),
    "masked, per sample": lambda s, b: ((each(s, b) * b["mask"]).sum(1) / b["mask"].sum(1).clamp(min=1)).mean(),
    "sum over samples": lambda s, b: (s - b["y"]).square().sum() / len(s),
    "sum over elements": lambda s, b: (s - b["y"]).abs().sum() / s.numel(),
    "mse": of(F.mse_loss),
    "mse, broadcast": lambda s, b: F.mse_loss(s.mean((1, 2)), b["y"][:, 0, 0]),
    "l1": of(F.l1_loss),
    "smooth l1": of(F.smooth_l1_loss),
    "huber": of(F.huber_loss, delta=0.5),
    "bce": lambda s, b: F.binary_cross_entropy(s.sigmoid(), b["p"]),
    "bce, weights": lambda s, b: F.binary_cross_entropy(s.sigmoid(), b["p"], weight=b["y"].abs()),
    "bce with logits": of(F.binary_cross_entropy_with_logits, "p"),
    "bce with logits, weights": of(F.binary_cross_entropy_with_logits, "p", pos_weight=CLASS_WEIGHTS),
    "bce, written out": lambda s, b: (F.softplus(s) - s * b["p"]).mean(),
    "kl": lambda s, b: F.kl_div(s.log_softmax(-1), b["p"], reduction="none").mean(),
    "kl, batchmean": lambda s, b: F.kl_div(s.log_softmax(-1), b["p"], reduction="batchmean"),
    "soft margin": lambda s, b: F.soft_margin_loss(s, b["y"].sign()),
    "multilabel soft margin": lambda s, b: F.multilabel_soft_margin_loss(s[:, 0], (b["p"][:, 0] > 0.5).double()),
    "multi margin": lambda s, b: F.multi_margin_loss(s[:, 0], b["label"]),
    "hinge embedding": lambda s, b: F.hinge_embedding_loss(s, b["y"].sign()),
    "margin ranking": lambda s, b: F.margin_ranking_loss(s[..., 0], s[..., 1], b["y"][..., 0].sign()),
    "cosine embedding": lambda s, b: F.cosine_embedding_loss(s[:, 0], b["y"][:, 0], b["y"][:, 1, 0].sign()),
    "triplet": lambda s, b: F.triplet_margin_loss(s[:, 0], b["y"][:, 0], b["y"][:, 1]),
    "gaussian nll": lambda s, b: 0.5 * (b["p"].log() + (s - b["y"]).square() / b["p"].clamp(min=0.1)).mean(),
    "poisson nll": lambda s, b: F.poisson_nll_loss(s, b["p"]),
    "mean of means, samples outside": lambda s, b: (s - b["y"]).square().mean(1).mean(),
    "mean of means, samples inside": lambda s, b: (s - b["y"]).square().mean(0).mean(),
    "mean of sums": lambda s, b: (s - b["y"]).square().sum((1, 2)).mean(0),
    "negative": lambda s, b: -F.cosine_similarity(s, b["y"], dim=-1).mean(),
    "two of the same": lambda s, b: F.mse_loss(s, b["y"]) + 0.3 * F.l1_loss(s, b["p"]),
    "two, stacked": lambda s, b: torch.stack([F.mse_loss(s, b["y"]), F.l1_loss(s, b["p"])]).mean(),
    "two, over words and samples": lambda s, b: F.mse_loss(s, b["y"]) + F.cross_entropy(s[:, 0], b["label"]),
    "in float32": lambda s, b: words()(s, b).to(torch.float32).double() * 0 + words()(s, b),
    "one value": lambda s, b: words()(s, b).reshape(1),
}
SUMS: dict[str, Loss] = {
    "cross-entropy": words("sum"),
    "class weights": words("sum", weight=CLASS_WEIGHTS),
    "a tenth of it": lambda s, b: words("sum")(s, b) / 10,
    "mse": of(F.mse_loss, reduction="sum"),
    "sum of everything": lambda s, b: (s - b["y"]).abs().sum(),
    "sum of samples' means": lambda s, b: (s - b["y"]).abs().mean((1, 2)).sum(),
    "two sums": lambda s, b: (s - b["y"]).abs().sum() + 2 * words("sum")(s, b),
    "stacked": lambda s, b: torch.stack([(s - b["y"]).abs().sum(), s.square().sum()]).sum(),
}
UNKNOWN: dict[str, tuple[str, Loss]] = {
    "root": ("through 'sqrt'", lambda s, b: F.mse_loss(s, b["y"]).sqrt()),
    "product": ("multiplies values of the whole batch", lambda s, b: F.mse_loss(s, b["y"]) * words()(s, b)),
    "sum and mean": ("adds a sum over the batch to a mean", lambda s, b: s.abs().sum() + words()(s, b)),
    "sum and l2": ("that is not summed over the batch", lambda s, b: s.abs().sum() + l2()),
    "centred": ("compares each sample with a value of the whole batch", lambda s, b: (s - s.mean()).square().mean()),
    "centred by column": ("compares each", lambda s, b: (s - s.mean(0)).square().mean()),
    "norm": ("by 'linalg_vector_norm'", lambda s, b: (s - b["y"]).norm()),
    "largest": ("by 'amax'", lambda s, b: s.amax()),
    "learned count": ("that is no count", lambda s, b: s.square().sum() / s.sigmoid().sum()),
    "one sample": ("takes single samples", lambda s, b: s[0].square().mean()),
}


LOSSES: dict[str, dict[str, Loss]] = {
    "means": MEANS,
    "sums": SUMS,
    "unknown": {n: loss for n, (_, loss) in UNKNOWN.items()},
}


def part(data: dict[str, torch.Tensor], begin: int, end: int) -> dict[str, torch.Tensor]:
    return {k: v[begin:end].clone() for k, v in data.items()}


PARTS = (part(batch(), 0, 2), part(batch(), 2, 6))


class Losses(nn.Module):
    """All of the losses at once, so that they are captured in one go."""

    def __init__(self, losses: dict[str, Loss]) -> None:
        super().__init__()
        self.model = MODEL
        self.losses = losses

    def forward(self, **data: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = self.model(**data)
        return tuple(loss(scores, data) for loss in self.losses.values())


@lru_cache
def captured(kind: str, which: int) -> JointGraph:
    joint = capture_joint(Losses(LOSSES[kind]), flatten(PARTS[which]), mode="module")
    return run_passes(EVERY.before(), joint, Capture("module", None))[0]


def weight_of(kind: str, name: str, which: int) -> BatchWeight:
    joint, place = captured(kind, which), list(LOSSES[kind]).index(name)
    return batch_weight(replace(joint, outputs=(joint.outputs[place],)), len(PARTS[which]["x"]))


def gradient(loss: Loss, data: dict[str, torch.Tensor]) -> torch.Tensor:
    found = torch.autograd.grad(loss(MODEL(**data), data).reshape(()), list(MODEL.layer.parameters()))
    return torch.cat([g.flatten() for g in found])


def gradient_of_parts(loss: Loss, shares: list[float]) -> torch.Tensor:
    return torch.stack([s * gradient(loss, p) for s, p in zip(shares, PARTS, strict=True)]).sum(0)


@pytest.mark.parametrize("name", MEANS)
def test_shares_of_a_mean_give_the_gradient_of_the_whole_batch(name: str) -> None:
    found = [weight_of("means", name, which) for which in range(2)]
    assert all(w.is_mean and w.problem is None for w in found), found
    given = [flatten(p).tensors for p in PARTS]
    weights = [float(w.of(t)) for w, t in zip(found, given, strict=True)]
    others = [[float(o.of(t)) / weight for o in w.others] for w, t, weight in zip(found, given, weights, strict=True)]
    assert others[0] == others[1], "a sum of several means is right while their counts are to each other as elsewhere"
    shares = [w / sum(weights) for w in weights]
    loss = MEANS[name]
    torch.testing.assert_close(gradient_of_parts(loss, shares), gradient(loss, batch()), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", SUMS)
def test_parts_of_a_sum_count_whole(name: str) -> None:
    for which in range(2):
        found = weight_of("sums", name, which)
        assert found.is_sum and not found.is_mean and found.problem is None, found
    loss = SUMS[name]
    torch.testing.assert_close(gradient_of_parts(loss, [1, 1]), gradient(loss, batch()), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_one_weight_cannot_say_is_named_with_its_line(name: str) -> None:
    found = weight_of("unknown", name, 1)
    assert found.problem is not None and UNKNOWN[name][0] in found.problem, found
    assert not found.is_mean and not found.is_sum and found.constant == 4
    assert f"{__file__}:" in found.where


def test_counts_that_are_not_to_each_other_as_elsewhere_are_kept() -> None:
    weight = weight_of("means", "two, over words and samples", 1)
    assert weight.constant == 60
    assert [w.of(flatten(PARTS[1]).tensors).item() for w in weight.others] == [4]
    assert not weight_of("means", "two of the same", 1).others


def test_a_smoothed_loss_has_one_count() -> None:
    assert not weight_of("means", "smoothed", 0).others
    assert weight_of("means", "smoothed", 0).of(flatten(PARTS[0]).tensors) == 3


@pytest.mark.parametrize("nothing", ["no samples", "nothing counts"])
@pytest.mark.parametrize(
    "name",
    ["cross-entropy", "with a learned scale", "masked", "masked, reciprocal", "masked, normalised before", "mse"],
)
def test_a_batch_without_a_share_has_gradients_of_0(name: str, nothing: str) -> None:
    data = part(batch(), 0, 0 if nothing == "no samples" else 2)
    data["target"].fill_(-100)
    data["mask"].zero_()
    flat = flatten(data)
    joint = training_graph(MODEL, flat, MEANS[name], unused="freeze").joint
    assert joint is not None and joint.weight is not None
    assert joint.weight.of(flat.tensors) == (30 if name == "mse" and len(data["x"]) else 0)
    values: dict[str, Any] = {"parameter": dict(MODEL.named_parameters()), "batch": flat.tensors}
    values["tangent"] = [torch.zeros(joint.outputs[0].meta["val"].shape, dtype=torch.float64)]
    with torch.no_grad():
        found = joint.module(*(values[kind][key] for kind, key in joint.inputs))
    gradients = [g for g in found[1:] if g is not None]
    assert gradients and all(torch.equal(g, torch.zeros_like(g)) for g in gradients)


def test_a_tensor_of_the_batch_is_called_by_its_name() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.layer(x).square().mean() * scale
            return loss

    graph = training_graph(Scaled(), flatten({"x": torch.randn(5, 4), "scale": torch.tensor(2.0)}))
    assert graph.joint is not None and graph.joint.weight is not None
    assert graph.joint.weight.problem == "reads batch['scale'], which has no dimension of the samples"


class DrawsItsMask(nn.Module):
    """Chooses what counts by itself, in one of three ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.table, self.scores, self.how = nn.Embedding(20, 8), nn.Linear(8, 20), how

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores = self.scores(self.table(ids))
        if self.how == "drawn":
            labels = ids.masked_fill(torch.rand(ids.shape) < 0.5, -100)
        else:
            sure, labels = scores.detach().softmax(-1).max(-1)
            labels = labels if self.how == "all" else torch.where(sure > 0.1, labels, -100)
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("how", ["drawn", "sure", "all"])
def test_a_model_that_chooses_what_counts_is_not_taken_for_a_mean_over_all(how: str) -> None:
    joint = training_graph(DrawsItsMask(how), flatten(torch.randint(20, (6, 10)))).joint
    assert joint is not None and joint.weight is not None
    assert bool(joint.weight.problem) == (how != "all")
