"""Batches for tasks of `transformers` that the zoo's own models do not have (see `benchmarks.zoo.batches`)."""

from __future__ import annotations

import torch

from benchmarks.zoo.batches import Make, Tensors, classes, generator, masked, tokens
from benchmarks.zoo.entry import Batch
from benchmarks.zoo.libraries.shrink import IMAGE_TOKEN

ANSWERS = 3
"""Of a multiple-choice question."""


def tagged(length: int = 16) -> Make:
    """Text with a class for every token."""

    def make(n: int, seed: int) -> Tensors:
        g = generator(seed)
        return {"input_ids": tokens(g, n, length), "labels": classes(g, n, length)}

    return make


def boxed(text: Make, width: int = 60) -> Make:
    """Text of a page, with the box of each token on it: (left, top, right, bottom)."""

    def make(n: int, seed: int) -> Tensors:
        batch, g = text(n, seed), generator(seed + 7)
        corner = torch.randint(0, width // 2, (*batch["input_ids"].shape, 2), generator=g)
        size = torch.randint(1, width // 2, corner.shape, generator=g)
        return batch | {"bbox": torch.cat([corner, corner + size], -1)}

    return make


def next_sentences(length: int = 16) -> Make:
    """Text with a label for every token, and for whether its second half follows its first one."""

    def make(n: int, seed: int) -> Tensors:
        follows = torch.randint(0, 2, (n,), generator=generator(seed + 5))
        return masked(length)(n, seed) | {"next_sentence_label": follows}

    return make


def questions(length: int = 16) -> Make:
    """Text with the first and the last position of an answer in it."""

    def make(n: int, seed: int) -> Tensors:
        g = generator(seed)
        middle = length // 2
        return {
            "input_ids": tokens(g, n, length),
            "start_positions": torch.randint(1, middle, (n,), generator=g),
            "end_positions": torch.randint(middle, length - 1, (n,), generator=g),
        }

    return make


def choices(length: int = 16) -> Make:
    """Several texts, of which one is right."""

    def make(n: int, seed: int) -> Tensors:
        g = generator(seed)
        ids = tokens(g, n * ANSWERS, length).reshape(n, ANSWERS, length)
        return {"input_ids": ids, "labels": torch.randint(0, ANSWERS, (n,), generator=g)}

    return make


def depth(size: int = 32) -> object:
    """Images with a depth for every pixel."""

    def make(n: int, seed: int) -> Batch:
        g = generator(seed)
        return {"pixel_values": torch.randn(n, 3, size, size, generator=g)}, torch.rand(n, size, size, generator=g)

    return make


def masked_patches(size: int = 32, patches: int = 16) -> Make:
    """Images, every other patch of which is to be filled in."""

    def make(n: int, seed: int) -> Tensors:
        mask = (torch.arange(patches) % 2 == 0).repeat(n, 1)
        return {"pixel_values": torch.randn(n, 3, size, size, generator=generator(seed)), "bool_masked_pos": mask}

    return make


def questions_about_images(
    positions: int, shape: tuple[int, ...] = (3, 32, 32), length: int = 12, types: bool = False
) -> Make:
    """Images with a text each that is to be continued; features of the image go to its first `positions`. `types`: the
    batch says which are to be continued, and which are a prefix of which each sees all."""

    def make(n: int, seed: int) -> Tensors:
        g = generator(seed)
        ids = torch.cat([torch.full((n, positions), IMAGE_TOKEN), tokens(g, n, length)], dim=1)
        labels = ids.masked_fill(torch.arange(positions + length) < positions, -100)
        batch = {"input_ids": ids, "labels": labels, "pixel_values": torch.randn(n, *shape, generator=g)}
        return batch | ({"token_type_ids": (labels >= 0).long()} if types else {})

    return make


def grids_of_patches(positions: int, elements: int, length: int = 12) -> Make:
    """The same, of images that come as patches, a row of so many `elements` each, and with the sizes of their grids."""

    def make(n: int, seed: int) -> Tensors:
        batch = questions_about_images(positions, length=length)(n, seed)
        patches = torch.randn(n * 16, elements, generator=generator(seed))
        grid = torch.tensor([[1, 4, 4]] * n)
        types = (batch["input_ids"] == IMAGE_TOKEN).long()
        return batch | {"pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": types}

    return make
