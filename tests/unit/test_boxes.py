"""Boxes, with what indexing of a tensor of all positions says of them."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from autopar.ops.fragments import Fragment, rows_of_rank
from autopar.runtime.checkpoints.boxes import Box, boxes_of, common, covered, cut, elements_of, size_of, whole, within
from autopar.spec.plan import ParameterSlice


def positions(box: Box, shape: tuple[int, ...]) -> torch.Tensor:
    """Of a box's elements in the flat tensor, in the box's shape."""
    every = torch.arange(torch.Size(shape).numel()).view(shape)
    return every[tuple(slice(r.start, r.stop, r.step) for r in box)]


def some_range(draw: random.Random, size: int) -> range:
    start = draw.randrange(size)
    return range(start, draw.randint(start + 1, size), draw.randint(1, 4))


@pytest.mark.parametrize("shape", [(23,), (9, 14), (4, 5, 6), ()])
def test_what_two_boxes_have_in_common(shape: tuple[int, ...]) -> None:
    draw = random.Random(len(shape))
    for _ in range(200):
        a, b = (tuple(some_range(draw, n) for n in shape) for _ in range(2))
        expected = sorted({*positions(a, shape).flatten().tolist()} & {*positions(b, shape).flatten().tolist()})
        shared = common(a, b)
        assert covered(a, [b]) == (elements_of(a) == len(expected))
        if shared is None:
            assert not expected
            continue
        assert positions(shared, shape).flatten().tolist() == expected
        for outer in (a, b):
            assert torch.equal(positions(outer, shape)[within(outer, shared)], positions(shared, shape))


@pytest.mark.parametrize(("saved", "loaded"), [(4, 3), (3, 4), (7, 2), (1, 5)])
def test_rows_of_other_numbers_of_ranks_cover_each_other(saved: int, loaded: int) -> None:
    def rows(n: int) -> list[Box]:
        return [(range(*rows_of_rank(r, n).indices(19)), range(3)) for r in range(n)]

    for box in rows(loaded):
        assert covered(box, rows(saved))
        assert not covered(box, rows(saved)[1:])


def test_a_hole_is_found_though_the_number_of_elements_is_right() -> None:
    twice = [(range(3),), (range(2),)]
    assert sum(map(elements_of, twice)) == 5
    assert not covered((range(5),), twice)
    assert covered((range(3),), twice)


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4), (3, 1, 2), (1, 1)])
def test_flat_fragments_are_boxes_in_order(shape: tuple[int, ...]) -> None:
    elements = torch.Size(shape).numel()
    for begin, end in itertools.combinations(range(elements + 1), 2):
        fragment = Fragment("p", False, torch.empty(end - begin), ParameterSlice(name="p"), begin, 0)
        boxes = boxes_of(fragment, shape)
        assert torch.cat([positions(b, shape).flatten() for b in boxes]).tolist() == list(range(begin, end))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_a_flat_part_of_columns() -> None:
    columns = ParameterSlice(name="p", dim=1, start=1, stop=4)
    fragment = Fragment("p", False, torch.empty(4), columns, 2, 0)
    boxes = boxes_of(fragment, (3, 5))
    assert torch.cat([positions(b, (3, 5)).flatten() for b in boxes]).tolist() == [3, 6, 7, 8]


@pytest.mark.parametrize("most", [1, 4, 7, 30, 1000])
def test_boxes_are_cut_into_parts(most: int) -> None:
    box = (range(1, 8, 2), range(5), range(2, 4))
    parts = cut(box, most)
    assert all(elements_of(p) <= most for p in parts)
    found = torch.cat([positions(p, (9, 5, 4)).flatten() for p in parts])
    assert sorted(found.tolist()) == sorted(positions(box, (9, 5, 4)).flatten().tolist())


def test_boxes_without_elements_or_dimensions() -> None:
    assert cut((range(0), range(3)), 10) == []
    assert cut((), 10) == [()] and size_of(()) == ()
    assert covered(whole((0, 3)), [])
