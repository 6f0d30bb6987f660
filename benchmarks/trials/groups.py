"""Sync groups in few characters: a plan of 150 parameters in some hundred bytes instead of twenty thousand.

A group is `[strategy, members]` or `[strategy, members, options]`. Members are words: `7` is the parameter with that
index, `3-9` and `9-3` are runs of them, up or down, and `7:0:128:256` is the slice of parameter 7 along dimension 0
from 128 to 256. Indices are those of `TrainingGraph.parameters`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.spec.plan import ParameterSlice, SyncGroup

Encoded = list[Any]


def encode(groups: Sequence[SyncGroup], names: Sequence[str]) -> list[Encoded]:
    """Groups of the parameters that are called `names`, in order."""
    index = {name: i for i, name in enumerate(names)}
    return [_encode(group, index) for group in groups]


def decode(encoded: Sequence[Encoded], names: Sequence[str]) -> tuple[SyncGroup, ...]:
    """The groups again, without their reasons."""
    return tuple(_decode(group, names) for group in encoded)


def _encode(group: SyncGroup, index: dict[str, int]) -> Encoded:
    words: list[str] = []
    run: list[int] = []
    for member in group.members:
        i = index[member.name]
        if member.whole:
            if run and not _continues(run, i):
                words.append(_run(run))
                run = []
            run.append(i)
            continue
        if run:
            words.append(_run(run))
            run = []
        words.append(f"{i}:{member.dim}:{member.start}:{member.stop}")
    if run:
        words.append(_run(run))
    options = group.model_dump(mode="json")["options"]
    return [group.strategy, " ".join(words), *([options] if options else [])]


def _continues(run: list[int], i: int) -> bool:
    return abs(i - run[-1]) == 1 and (len(run) == 1 or i - run[-1] == run[-1] - run[-2])


def _run(run: list[int]) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"


def _decode(group: Encoded, names: Sequence[str]) -> SyncGroup:
    strategy, words, *rest = group
    members: list[ParameterSlice] = []
    for word in words.split():
        if ":" in word:
            i, dim, start, stop = map(int, word.split(":"))
            members.append(ParameterSlice(name=names[i], dim=dim, start=start, stop=stop))
            continue
        first, _, last = word.partition("-")
        a, b = int(first), int(last or first)
        members += [ParameterSlice(name=names[i]) for i in range(a, b + (1 if b >= a else -1), 1 if b >= a else -1)]
    return SyncGroup(strategy=strategy, members=tuple(members), options=rest[0] if rest else {})
