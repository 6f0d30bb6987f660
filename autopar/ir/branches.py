"""Branches: parts of a model that a forward pass may leave out, as an expert to which nothing was sent.

Which parts these are is seen by the gradients that ranks have not got on their examples. A part that lies in a list
beside such a one, and is like it, may be left out another time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
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
    found = {_largest(name, parts, frozenset(missing)) for missing in absent for name in missing if name in shapes}
    beside = {name: _alike(name, parts, shapes) for name in found}
    chances: dict[str, float] = {}
    for like in beside.values():
        used = {name: sum(not parts[name] <= frozenset(missing) for missing in absent) for name in like}
        # Laplace's rule of succession for all that are alike, which counts as one rank's example for each of them.
        often = (sum(used.values()) + 1) / (len(like) * len(absent) + 2)
        chances |= {name: 1 - (used[name] + often) / (len(absent) + 1) for name in like}
    chosen: dict[str, Branch] = {}
    for name in sorted(chances, key=len):
        chosen |= dict.fromkeys(parts[name], Branch(name, chances[name]))
    return chosen


def _parts(shapes: Shapes) -> dict[str, frozenset[str]]:
    """The parameters of each module, and each parameter as a part of its own."""
    found: dict[str, set[str]] = {}
    for name in shapes:
        words = name.split(".")
        for i in range(1, len(words) + 1):
            found.setdefault(".".join(words[:i]), set()).add(name)
    return {part: frozenset(names) for part, names in found.items()}


def _largest(name: str, parts: Mapping[str, frozenset[str]], missing: frozenset[str]) -> str:
    """The largest part around a parameter of which nothing was used."""
    words = name.split(".")
    around = (".".join(words[:i]) for i in range(1, len(words)))
    return next((part for part in around if parts[part] <= missing), name)


def _alike(name: str, parts: Mapping[str, frozenset[str]], shapes: Shapes) -> list[str]:
    """The parts of a list that are like one of it, that one included."""
    around, _, last = name.rpartition(".")
    if not last.isdigit():
        return [name]
    beside = (p for p in parts if p.rpartition(".")[0] == around and p.rpartition(".")[2].isdigit())
    return [p for p in beside if _form(p, parts, shapes) == _form(name, parts, shapes)]


def _form(part: str, parts: Mapping[str, frozenset[str]], shapes: Shapes) -> list[tuple[str, tuple[int, ...]]]:
    """What a part is made of: its parameters by their names within it, with their shapes."""
    return sorted((name[len(part) :], shapes[name]) for name in parts[part])
