"""Branches: parts of a model that a forward pass may leave out, as an expert to which nothing was sent.

Which parts these are is seen by the gradients that ranks have not got on their examples. A part that lies in a list
beside such a one, and is like it, may be left out another time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Branch:
    """A part of a model that a step may leave out as a whole."""

    name: str
    """Of the module, or of the parameter."""
    left_out: float
    """In how many steps a rank leaves it out, 0 to 1."""


def left_out(parts: Iterable[Branch | None]) -> float:
    """In how many steps a rank leaves all of these out, 0 to 1; each by itself. `None`: what no step leaves out."""
    found = set(parts)
    return math.prod(0.0 if b is None else b.left_out for b in found)


def branches(shapes: Shapes, absent: Sequence[Collection[str]]) -> dict[str, Branch]:
    """The innermost branch of each parameter that is in one. `shapes`: those of all trained parameters, by name.
    `absent`: for each rank, those of which its example has given no gradient."""
    parts = _parts(shapes)
    without = [_left_out_whole(missing, parts) for missing in absent]
    found = {part for whole in without for part in whole if part.rpartition(".")[0] not in whole}
    alike: dict[Hashable, list[str]] = {}
    for part in parts:
        alike.setdefault(_likeness(part, parts, shapes), []).append(part)
    chances: dict[str, float] = {}
    for like in (alike[key] for key in {_likeness(part, parts, shapes) for part in found}):
        used = {part: sum(part not in whole for whole in without) for part in like}
        # Laplace's rule of succession for all that are alike, which counts as one rank's example for each of them.
        often = (sum(used.values()) + 1) / (len(like) * len(without) + 2)
        chances |= {part: 1 - (used[part] + often) / (len(without) + 1) for part in like}
    chosen: dict[str, Branch] = {}
    for part in sorted(chances, key=len):
        chosen |= dict.fromkeys(parts[part], Branch(part, chances[part]))
    return chosen


def _parts(shapes: Shapes) -> dict[str, frozenset[str]]:
    """The parameters of each module, and each parameter as a part of its own."""
    found: dict[str, set[str]] = {}
    for name in shapes:
        for part in _around(name):
            found.setdefault(part, set()).add(name)
    return {part: frozenset(names) for part, names in found.items()}


def _left_out_whole(missing: Collection[str], parts: Mapping[str, frozenset[str]]) -> set[str]:
    """The parts of which nothing was used."""
    of_part = Counter(part for name in missing if name in parts for part in _around(name))
    return {part for part, count in of_part.items() if count == len(parts[part])}


def _around(name: str) -> list[str]:
    """The parts that a parameter is in, itself last."""
    words = name.split(".")
    return [".".join(words[:i]) for i in range(1, len(words) + 1)]


def _likeness(part: str, parts: Mapping[str, frozenset[str]], shapes: Shapes) -> Hashable:
    """What is the same for parts of one list that are made of the same parameters; of other parts, the name."""
    around, _, last = part.rpartition(".")
    if not last.isdigit():
        return part
    return around, tuple(sorted((name[len(part) :], shapes[name]) for name in parts[part]))
