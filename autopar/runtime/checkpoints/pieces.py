"""What a rank has of the tensors that outlive a step: the parts of which a checkpoint on disk is made.

Whoever keeps a tensor from step to step describes it as pieces; saving, sharing out between other numbers of ranks and
loading follow from that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from autopar.ops.fragments import Fragment
from autopar.runtime.checkpoints.boxes import Box, boxes_of, elements_of, size_of, whole

Over = Literal["kept", "summed", "averaged", "reset"]
"""How a tensor goes over to another number of ranks, or to a plan under which ranks hold other parts of it.

    kept      the ranks' parts together are one value, whoever holds which part; ranks that hold the same element hold
              the same value
    summed    each rank has a value of its own, and only the sum over the ranks means something, as with the residuals
              of compression: the sum is kept, shared out evenly
    averaged  each rank has a replica of its own, and the mean over the ranks means something, as of parameters that
              are averaged from time to time: all have the mean
    reset     each rank has a value of its own, which says nothing to other ranks: it starts with zeros

On the same number of ranks, with the same parts, each rank has its own value back, bit for bit.
"""


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a named tensor that this rank has. A rank may have several pieces of one tensor; no two pieces of it,
    on any ranks, overlap without being equal."""

    name: str
    """Unique in the program, and the same on all ranks."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    """Which elements of it these are."""
    tensor: torch.Tensor
    """The elements themselves, in the box's shape: read as a checkpoint is saved, written as one is loaded."""
    over: Over = "kept"
    by_all: bool = False
    """Whether ranks that have the same elements share out the writing; else the first of them writes."""


def whole_piece(name: str, tensor: torch.Tensor, over: Over = "kept", by_all: bool = False) -> Piece:
    """A tensor that this rank has all elements of."""
    return Piece(name, tuple(tensor.shape), whole(tensor.shape), tensor, over, by_all)


def fragment_pieces(
    name: str, fragment: Fragment, shape: Sequence[int], tensor: torch.Tensor, over: Over = "kept"
) -> list[Piece]:
    """What lies as a fragment of a parameter does; `shape`: the parameter's, `tensor`: in the fragment's shape."""
    boxes = boxes_of(fragment, shape)
    if len(boxes) == 1:
        return [Piece(name, tuple(shape), boxes[0], tensor.view(size_of(boxes[0])), over, True)]
    found, start = [], 0
    for box in boxes:
        part = tensor[start : start + elements_of(box)].view(size_of(box))
        found.append(Piece(name, tuple(shape), box, part, over, True))
        start += elements_of(box)
    return found
