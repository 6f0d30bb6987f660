"""Boxes: which elements of a tensor a part of it holds, as a `range` of indices in each dimension.

A range has a step, so a box says "every n-th row" as well as "rows 3 to 7"; and what two boxes have in common is a box
again, whatever their steps. So what 4 ranks wrote, 3 ranks read, with one strided copy for each pair of boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from autopar.ops.fragments import Fragment
from autopar.spec.plan import ParameterSlice

Box = tuple[range, ...]


def whole(shape: Sequence[int]) -> Box:
    """The box of all elements."""
    return tuple(range(n) for n in shape)


def size_of(box: Box) -> tuple[int, ...]:
    """The shape of a tensor that holds the box's elements."""
    return tuple(len(r) for r in box)


def elements_of(box: Box) -> int:
    return math.prod(size_of(box))


def common(a: Box, b: Box) -> Box | None:
    """The elements that are in both boxes; None where there are none."""
    found = tuple(_common(x, y) for x, y in zip(a, b, strict=True))
    return found if all(len(r) for r in found) else None


def within(outer: Box, inner: Box) -> tuple[slice, ...]:
    """Where the elements of `inner` are in a tensor that holds those of `outer`, all of which it is a part of."""
    return tuple(
        slice((i[0] - o.start) // o.step, (i[-1] - o.start) // o.step + 1, max(1, i.step // o.step))
        for o, i in zip(outer, inner, strict=True)
    )


def covered(box: Box, by: Iterable[Box]) -> bool:
    """Whether each of the box's elements is in one of the others, at least."""
    inside = [c for other in by if (c := common(box, other)) is not None]
    if any(elements_of(c) == elements_of(box) for c in inside) or not elements_of(box):
        return True
    if sum(map(elements_of, inside)) < elements_of(box):
        return False
    there = torch.zeros(size_of(box), dtype=torch.bool)
    for c in inside:
        there[within(box, c)] = True
    return bool(there.all())


def cut(box: Box, most: int) -> list[Box]:
    """The box in parts of at most `most` elements each, in order; of one element where that is too few."""
    if elements_of(box) <= max(1, most):
        return [box] if elements_of(box) else []
    dim = next(d for d, r in enumerate(box) if len(r) > 1)
    row = elements_of(box) // len(box[dim])
    count = max(1, most // row)
    parts = [(*box[:dim], box[dim][i : i + count], *box[dim + 1 :]) for i in range(0, len(box[dim]), count)]
    return parts if row <= most else [small for part in parts for small in cut(part, most)]


def boxes_of(fragment: Fragment, shape: Sequence[int]) -> list[Box]:
    """The elements of a fragment of a parameter of this shape, in the order in which the fragment has them: one box in
    the fragment's own shape, or several that follow each other in a flat fragment."""
    if fragment.rows is not None:
        return [(range(*fragment.rows.indices(shape[0])), *whole(shape[1:]))]
    return boxes_of_range(fragment.piece, fragment.begin, fragment.tensor.numel(), shape)


def boxes_of_range(piece: ParameterSlice, begin: int, elements: int, shape: Sequence[int]) -> list[Box]:
    """Of a slice of a parameter of this shape, so many elements in the order of their indices, as boxes in their
    order."""
    box = whole(shape)
    if not piece.whole:
        assert piece.start is not None and piece.stop is not None
        dim = piece.dim % len(box)
        box = (*box[:dim], range(piece.start, piece.stop), *box[dim + 1 :])
    if elements == elements_of(box):
        return [box]
    found = _flat(size_of(box), begin, begin + elements)
    return [tuple(o[i.start : i.stop] for o, i in zip(box, inner, strict=True)) for inner in found]


def _common(a: range, b: range) -> range:
    """The indices that are in both ranges, which rise."""
    shared = math.gcd(a.step, b.step)
    if (b.start - a.start) % shared:
        return range(0)
    every = b.step // shared
    start = a.start + a.step * ((b.start - a.start) // shared * pow(a.step // shared, -1, every) % every)
    step = a.step * every
    start += max(0, -(-(b.start - start) // step)) * step
    return range(start, max(start, min(a.stop, b.stop)), step)


def _flat(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Elements [begin, end) of a flattened tensor, as boxes in their order: at most two for each dimension."""
    if begin >= end:
        return []
    row = math.prod(shape[1:])
    if not shape or end - begin == shape[0] * row:
        return [whole(shape)]
    first, last = -(-begin // row), end // row
    if first > last:  # all within one row
        return [(range(last, first), *b) for b in _flat(shape[1:], begin - last * row, end - last * row)]
    head = [(range(first - 1, first), *b) for b in _flat(shape[1:], begin - (first - 1) * row, row)]
    middle = [(range(first, last), *whole(shape[1:]))] if first < last else []
    tail = [(range(last, last + 1), *b) for b in _flat(shape[1:], 0, end - last * row)]
    return [*(head if begin % row else []), *middle, *tail]
