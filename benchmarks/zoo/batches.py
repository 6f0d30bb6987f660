"""Batches of random numbers, in the shapes that each kind of model takes. Equal seeds give equal batches."""

from __future__ import annotations

from collections.abc import Callable

import torch

VOCABULARY = 128
CLASSES = 8
BOXES = 3
"""Objects in each image of a detection batch."""

_SPECIAL = 4
"""Token ids below this are padding, beginning, end and mask in the zoo's configurations."""

Tensors = dict[str, torch.Tensor]
Make = Callable[[int, int], Tensors]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(g: torch.Generator, n: int, length: int, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """Token ids, none of them special: (n, length)."""
    return torch.randint(_SPECIAL, vocabulary, (n, length), generator=g)


def classes(g: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(CLASSES, shape, generator=g)


def causal(length: int = 16, vocabulary: int = VOCABULARY) -> Make:
    """Text to be continued: the labels are the inputs, which the model shifts."""

    def make(n: int, seed: int) -> Tensors:
        ids = tokens(generator(seed), n, length, vocabulary)
        return {"input_ids": ids, "labels": ids.clone()}

    return make


def masked(length: int = 16, vocabulary: int = VOCABULARY, padded: bool = True) -> Make:
    """Text with a label for every token. `padded`: every other text ends in padding, and a mask says where."""

    def make(n: int, seed: int) -> Tensors:
        g = generator(seed)
        batch = {"input_ids": tokens(g, n, length, vocabulary), "labels": tokens(g, n, length, vocabulary)}
        return batch | ({"attention_mask": _padding(n, length)} if padded else {})

    return make


def text_classes(length: int = 16) -> Make:
    """Text with one class each."""

    def make(n: int, seed: int) -> Tensors:
        g = generator(seed)
        return {"input_ids": tokens(g, n, length), "attention_mask": _padding(n, length), "labels": classes(g, n)}

    return make


def translation(source: int = 16, target: int = 12) -> Make:
    """Text in, text out."""

    def make(n: int, seed: int) -> Tensors:
        g = generator(seed)
        return {"input_ids": tokens(g, n, source), "labels": tokens(g, n, target)}

    return make


def images(size: int = 32, key: str = "pixel_values") -> Make:
    """Images with one class each: (n, 3, size, size)."""
    return features(key, (3, size, size))


def features(key: str, shape: tuple[int, ...]) -> Make:
    """Anything of one shape (sound, spectra, video) with one class each."""

    def make(n: int, seed: int) -> Tensors:
        g = generator(seed)
        return {key: torch.randn(n, *shape, generator=g), "labels": classes(g, n)}

    return make


def transcription(key: str, shape: tuple[int, ...], target: int = 12) -> Make:
    """Sound, or its spectrum, with a text."""

    def make(n: int, seed: int) -> Tensors:
        g = generator(seed)
        return {key: torch.randn(n, *shape, generator=g), "labels": tokens(g, n, target)}

    return make


def segmentation(size: int = 32) -> Make:
    """Images with a class for every pixel."""

    def make(n: int, seed: int) -> Tensors:
        g = generator(seed)
        return {"pixel_values": torch.randn(n, 3, size, size, generator=g), "labels": classes(g, n, size, size)}

    return make


def masked_images(size: int = 32, patches: int = 16) -> Make:
    """Images, and the noise that decides which patches a masked autoencoder drops."""

    def make(n: int, seed: int) -> Tensors:
        g = generator(seed)
        images = torch.randn(n, 3, size, size, generator=g)
        return {"pixel_values": images, "noise": torch.rand(n, patches, generator=g)}

    return make


def detection(size: int = 64) -> Make:
    """Images with `BOXES` objects each: a class, and a box as (centre x, centre y, width, height) in 0..1."""

    def make(n: int, seed: int) -> Tensors:
        g = generator(seed)
        return {
            "pixel_values": torch.randn(n, 3, size, size, generator=g),
            "class_labels": classes(g, n, BOXES),
            "boxes": 0.3 + 0.4 * torch.rand(n, BOXES, 4, generator=g),
        }

    return make


def captioned_images(size: int = 32, length: int = 16, labels: bool = False) -> Make:
    """Images with a text each; `labels`: the text is to be continued, else matched with its image."""

    def make(n: int, seed: int) -> Tensors:
        g = generator(seed)
        ids = tokens(g, n, length)
        batch = {"input_ids": ids, "pixel_values": torch.randn(n, 3, size, size, generator=g)}
        return batch | ({"labels": ids.clone()} if labels else {})

    return make


def series(context: int = 32, horizon: int = 8, channels: int = 3) -> Make:
    """Time series with their continuation."""

    def make(n: int, seed: int) -> Tensors:
        g = generator(seed)
        past = torch.randn(n, context, channels, generator=g)
        return {"past_values": past, "future_values": torch.randn(n, horizon, channels, generator=g)}

    return make


def _padding(n: int, length: int) -> torch.Tensor:
    mask = torch.ones(n, length, dtype=torch.long)
    mask[1::2, length - length // 4 :] = 0
    return mask
