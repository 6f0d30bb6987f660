"""Models of diffusers."""

from __future__ import annotations

from benchmarks.zoo.entry import Entry
from benchmarks.zoo.libraries import diffusers_images, diffusers_others

ENTRIES: tuple[Entry, ...] = tuple(model.entry() for model in (*diffusers_images.MODELS, *diffusers_others.MODELS))
