"""All families of statements, and how often each is drawn."""

from __future__ import annotations

from benchmarks.fuzz.operators import (
    Make,
    binary,
    buffer,
    convolution,
    in_place,
    indexing,
    joined,
    lookup,
    normalization,
    odd,
    product,
    reduction,
    unary,
    view,
)
from benchmarks.fuzz.reusable import of_several, overlapping

FAMILIES: tuple[tuple[Make, int], ...] = (
    (unary, 6), (reduction, 3), (view, 3), (binary, 9), (product, 6), (convolution, 2), (normalization, 2),
    (lookup, 4), (indexing, 2), (joined, 2), (odd, 1), (in_place, 4), (buffer, 2), (overlapping, 4), (of_several, 3),
)  # fmt: skip
