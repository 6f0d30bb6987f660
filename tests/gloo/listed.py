"""What the tests of batches that are lists of samples run on each rank, as detectors are given them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import autopar

Listed = dict[str, Any]
OBJECTS = ((2,), (1, 2, 4))
"""In each of a rank's images. Three images are as many as an image has channels, dimension 0 of its tensor."""
Reduce = Callable[[list[torch.Tensor]], torch.Tensor]
LOSSES: dict[str, Reduce] = {
    "mean over samples": lambda of_samples: torch.stack([x.mean() for x in of_samples]).mean(),
    "sum": lambda of_samples: torch.stack([x.sum() for x in of_samples]).sum(),
    "mean over objects": lambda of_samples: torch.cat(of_samples).mean(),
}


class Finds(nn.Module):
    """Scores the objects of each image by themselves, as images and their numbers of objects differ."""

    def __init__(self, reduce: Reduce) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Conv2d(3, 4, 3), nn.Linear(8, 5)
        self.reduce = reduce

    def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        losses = []
        for image, target in zip(images, targets, strict=True):
            features = torch.tanh(self.body(image[None])).mean((2, 3)).expand(len(target["boxes"]), -1)
            scores = self.head(torch.cat([features, target["boxes"]], 1))
            losses.append(nn.functional.cross_entropy(scores, target["labels"], reduction="none"))
        return {"loss": self.reduce(losses)}


def batch(rank: int) -> Listed:
    g = torch.Generator().manual_seed(rank)
    images, targets = [], []
    for i, objects in enumerate(OBJECTS[rank]):
        images.append(torch.randn(3, 6 + i, 7, generator=g))
        labels = torch.randint(0, 5, (objects,), generator=g)
        targets.append({"boxes": torch.randn(objects, 4, generator=g), "labels": labels})
    return {"images": images, "targets": targets}


def one_step(rank: int, name: str, capture: Any, mode: str) -> tuple[float, list[str]]:
    """How far parameters are from those of one process after a step, and what was warned of."""
    mine, other = Finds(LOSSES[name]), Finds(LOSSES[name])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (mine, other)]
    settings: dict[str, Any] = {"example_inputs": batch(rank), "strategy": "ddp", "capture": capture}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", autopar.AutoparWarning)
        if mode == "step":
            autopar.optimize(mine, optimizer=optimizers[0], **settings).step(batch(rank))
        else:
            autopar.optimize(mine, **settings)(**batch(rank))["loss"].backward()
            optimizers[0].step()
    every = [batch(r) for r in range(2)]
    other(**{k: [x for b in every for x in b[k]] for k in every[0]})["loss"].backward()
    optimizers[1].step()
    pairs = zip(mine.parameters(), other.parameters(), strict=True)
    distance = max(float((a - b).detach().abs().max()) for a, b in pairs)
    return distance, [str(w.message) for w in said if "runs eagerly" not in str(w.message)]


def everything(rank: int, n: int) -> dict[str, tuple[float, list[str]]]:
    torch.set_default_dtype(torch.float64)
    return {
        f"{name}, {capture}, {mode}": one_step(rank, name, capture, mode)
        for name in LOSSES
        for capture in ("always", "never")
        for mode in ("step", "module")
        if mode == "step" or name == "mean over samples"
    }
