"""Who writes what of a checkpoint: every element once, and each rank only what it has.

All ranks know what all have, and come to the same result, each by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.errors import SpecError
from autopar.runtime.checkpoints.boxes import Box, common, cut, elements_of, whole
from autopar.runtime.checkpoints.pieces import Piece
from autopar.spec.checkpoint import OF_STATE, Layout, StoredPart, StoredTensor

OF_EACH_RANK: dict[str, Layout] = {"summed": "Partial", "averaged": "Replicas", "reset": "Varying"}
"""What is called how in the index, of which each rank writes a value of its own."""
FILE_BYTES = 256 << 20
"""Of tensors in one file, at most: a file may need as much memory while it is written."""
LEAST_PART_BYTES = 1 << 20
"""Tensors are not cut into smaller parts for the sake of sharing them out."""


@dataclass(frozen=True)
class Offer:
    """What a rank has of a tensor: a `Piece` without the elements."""

    name: str
    dtype: str
    item_bytes: int
    shape: tuple[int, ...]
    box: Box
    over: str
    by_all: bool


@dataclass
class FilePlan:
    """A file that a rank writes: parts of tensors, by their keys in the file."""

    rank: int
    number: int
    """Among the files of the rank."""
    parts: dict[str, tuple[str, Box]] = field(default_factory=dict)
    """A tensor's name, and which elements."""
    bytes: int = 0


def offers_of(pieces: Iterable[Piece]) -> list[Any]:
    """What this rank has, for JSON."""
    return [
        [p.name, _dtype(p.tensor), p.tensor.itemsize, p.shape, box_json(p.box), p.over, p.by_all]
        for p in pieces
        if elements_of(p.box) or not math.prod(p.shape)
    ]


def box_json(box: Box) -> list[list[int]]:
    return [[r.start, r.stop, r.step] for r in box]


def read_offers(listed: Iterable[Any]) -> list[Offer]:
    return [
        Offer(name, dtype, int(size), tuple(shape), tuple(range(*r) for r in box), over, by_all)
        for name, dtype, size, shape, box, over, by_all in listed
    ]


Writer = tuple[int, Offer, Box]


def share_out(offers: Sequence[Sequence[Offer]]) -> tuple[list[FilePlan], dict[str, StoredTensor]]:
    """The files of all ranks, in the order of the index, and the tensors in them. `offers`: by rank.

    Raises `SpecError` where ranks do not agree about a tensor, or no rank has some of its elements.
    """
    by_name: dict[str, list[tuple[int, Offer]]] = {}
    for rank, of_rank in enumerate(offers):
        for offer in of_rank:
            by_name.setdefault(offer.name, []).append((rank, offer))
    writers: list[Writer] = []
    anyones: list[tuple[list[int], Offer, Box]] = []
    layouts, empty = dict[str, Layout](), dict[str, StoredTensor]()
    for name, held in by_name.items():
        _check_alike(name, held)
        if not math.prod(held[0][1].shape):
            empty[name] = StoredTensor(shape=held[0][1].shape, dtype=held[0][1].dtype, layout="Replicate", parts=())
            continue
        if held[0][1].over != "kept":
            layouts[name] = OF_EACH_RANK[held[0][1].over]
            writers += [(rank, offer, offer.box) for rank, offer in held]
            continue
        ranks_of: dict[Box, list[int]] = {}
        first: dict[Box, Offer] = {}
        for rank, offer in held:
            ranks_of.setdefault(offer.box, []).append(rank)
            first.setdefault(offer.box, offer)
        boxes = _once(name, list(ranks_of), math.prod(held[0][1].shape))
        layouts[name] = _layout(boxes, ranks_of, len(offers))
        for box in boxes:
            ranks, offer = ranks_of[box], first[box]
            if offer.by_all and len(ranks) > 1:
                anyones.append((ranks, offer, box))
            else:
                writers.append((ranks[0], offer, box))
    writers += _balanced(anyones, writers, len(offers))
    files, tensors = _in_files(writers, layouts)
    return files, {**tensors, **empty}


def _check_alike(name: str, held: Sequence[tuple[int, Offer]]) -> None:
    rank_0, first = held[0]
    for rank, offer in held:
        mine, theirs = ((o.dtype, o.shape, o.over) for o in (first, offer))
        if mine != theirs:
            raise SpecError(
                f"'{name}' is {first.dtype} of shape {list(first.shape)} on rank {rank_0} and {offer.dtype} of shape "
                f"{list(offer.shape)} on rank {rank}: all ranks must build the same model and optimizer"
            )


def _once(name: str, boxes: list[Box], elements: int) -> list[Box]:
    """Boxes that hold each element once: those given, but for what larger ones hold already."""
    if sum(map(elements_of, boxes)) > elements:
        chosen: list[Box] = []
        for box in sorted(boxes, key=elements_of, reverse=True):
            if all(common(box, other) is None for other in chosen):
                chosen.append(box)
        boxes = chosen
    if (held := sum(map(elements_of, boxes))) < elements and not name.startswith(OF_STATE):
        raise SpecError(f"the ranks together have {held} of the {elements} elements of '{name}'")
    return boxes


def _layout(boxes: Sequence[Box], ranks_of: dict[Box, list[int]], world_size: int) -> Layout:
    if len(boxes) > 1:
        return "Shard"
    return "Replicate" if len(ranks_of[boxes[0]]) > 1 or world_size == 1 else "Owned"


def _balanced(
    anyones: Sequence[tuple[list[int], Offer, Box]], writers: Iterable[Writer], world_size: int
) -> list[Writer]:
    """Who writes what several ranks have: each the largest part that is left, who has the least to write."""
    load = [0] * world_size
    for rank, offer, box in writers:
        load[rank] += elements_of(box) * offer.item_bytes
    total = sum(load) + sum(elements_of(box) * offer.item_bytes for _, offer, box in anyones)
    most = max(LEAST_PART_BYTES, total // (4 * world_size))
    parts = [(ranks, offer, part) for ranks, offer, box in anyones for part in cut(box, most // offer.item_bytes)]
    found = []
    for ranks, offer, part in sorted(parts, key=lambda p: elements_of(p[2]) * p[1].item_bytes, reverse=True):
        rank = min(ranks, key=load.__getitem__)
        load[rank] += elements_of(part) * offer.item_bytes
        found.append((rank, offer, part))
    return found


def _in_files(writers: Sequence[Writer], layouts: dict[str, Layout]) -> tuple[list[FilePlan], dict[str, StoredTensor]]:
    files: list[FilePlan] = []
    of_rank: dict[int, list[tuple[Offer, Box]]] = {}
    for rank, offer, box in writers:
        of_rank.setdefault(rank, []).extend((offer, part) for part in cut(box, FILE_BYTES // offer.item_bytes))
    parts: dict[str, list[StoredPart]] = {}
    described = {offer.name: offer for _, offer, _ in writers}
    for rank, jobs in sorted(of_rank.items()):
        number = 0
        for offer, box in jobs:
            size = elements_of(box) * offer.item_bytes
            if not files or files[-1].rank != rank or files[-1].bytes + size > FILE_BYTES:
                files.append(FilePlan(rank, number))
                number += 1
            key = _key(offer, box)
            files[-1].parts[key] = offer.name, box
            files[-1].bytes += size
            at = tuple((r.start, r.stop, r.step) for r in box)
            parts.setdefault(offer.name, []).append(StoredPart(file=len(files) - 1, key=key, box=at, rank=rank))
    tensors = {
        name: StoredTensor(shape=offer.shape, dtype=offer.dtype, layout=layouts[name], parts=tuple(parts[name]))
        for name, offer in described.items()
    }
    return files, tensors


def _key(offer: Offer, box: Box) -> str:
    """The name of a part in its file: that of the tensor, with the indices of what is not all of it."""
    if box == whole(offer.shape):
        return offer.name
    shown = (f"{r.start}:{r.stop}" + (f":{r.step}" if r.step > 1 else "") for r in box)
    return f"{offer.name}[{', '.join(shown)}]"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
