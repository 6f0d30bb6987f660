"""Images: handwritten digits that scikit-learn ships, enlarged or placed on a canvas; and faces, generated."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from benchmarks.zoo.workload import SEED
from benchmarks.zoo.zipf import zipf

DIGITS = 10
FACE_SIDE = 56
_FACE_CELLS = 7
_FACE_NOISE = 0.5

Floats = npt.NDArray[np.float32]


@cache
def _digits() -> tuple[torch.Tensor, npt.NDArray[np.int64]]:
    """The 1797 digits of scikit-learn's `load_digits` in 0..1: (n, 1, 8, 8), and which digits they are."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return torch.from_numpy(pixels.reshape(-1, 1, 8, 8).astype(np.float32) / 16), labels.astype(np.int64)


def digits(step: int, rank: int, count: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Digits enlarged to `side` pixels, alike in all three colours, and their classes: (count, 3, side, side)."""
    images, labels = _digits()
    chosen = np.random.default_rng([SEED, step, rank]).integers(len(labels), size=count)
    large = _enlarged(images[chosen], side)
    return (large.expand(-1, 3, -1, -1) - 0.5).contiguous(), torch.from_numpy(labels[chosen])


def scenes(step: int, rank: int, count: int, side: int, objects: int) -> dict[str, torch.Tensor]:
    """Canvases with `objects` digits of a quarter to a half of their side, at random places, from left to right.

    A box is (centre x, centre y, width, height) in 0..1, as DETR has it.
    """
    images, labels = _digits()
    random = np.random.default_rng([SEED, step, rank])
    canvases = torch.zeros(count, 1, side, side)
    chosen = random.integers(len(labels), size=(count, objects))
    sizes = random.integers(side // 4, side // 2 + 1, size=(count, objects))
    places = (random.random((count, objects, 2)) * (side - sizes[..., None] + 1)).astype(np.int64)
    order = np.argsort(places[..., 0] + sizes / 2, axis=1)
    for i in range(count):
        for j in range(objects):
            (x, y), size = places[i, j], int(sizes[i, j])
            patch = canvases[i, :, y : y + size, x : x + size]
            torch.maximum(patch, _enlarged(images[chosen[i, j]][None], size)[0], out=patch)
    boxes = np.concatenate([places + sizes[..., None] / 2, np.stack([sizes, sizes], -1)], -1) / side
    boxes = np.take_along_axis(boxes, order[..., None], 1).astype(np.float32)
    return {
        "pixel_values": (canvases.expand(-1, 3, -1, -1) - 0.5).contiguous(),
        "class_labels": torch.from_numpy(np.take_along_axis(labels[chosen], order, 1)),
        "boxes": torch.from_numpy(boxes),
    }


def faces(step: int, rank: int, count: int, people: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of people, some seen often and most seldom: a smooth pattern that is a person's own, and noise from
    N(0, 1/4)."""
    random = np.random.default_rng([SEED, step, rank])
    who = zipf(random, people, count)
    shape = (3, _FACE_CELLS, _FACE_CELLS)
    own = np.stack([np.random.default_rng([SEED, int(w)]).standard_normal(shape, dtype=np.float32) for w in who])
    noise: Floats = random.standard_normal((count, 3, FACE_SIDE, FACE_SIDE), dtype=np.float32)
    smooth = _enlarged(torch.from_numpy(own), FACE_SIDE)
    return smooth + _FACE_NOISE * torch.from_numpy(noise), torch.from_numpy(who)


def _enlarged(images: torch.Tensor, side: int) -> torch.Tensor:
    return F.interpolate(images, size=(side, side), mode="bilinear", align_corners=False)
