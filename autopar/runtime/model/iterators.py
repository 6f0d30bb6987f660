"""Iterators that a model or a loss holds, as one over data of its own: what a run took from them is given again."""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

_COPIED: tuple[type, ...] = (
    type(iter([])),
    type(iter(())),
    type(iter(range(1))),
    itertools.count,
    itertools.repeat,
)
"""Iterators of which a copy gives the same objects, and takes nothing from another iterator."""
_READ_ONCE: tuple[type, ...] = (map, zip, filter, enumerate, _BaseDataLoaderIter)
"""Other iterators of which there may be subclasses, and those that are Python's own, by where they come from."""
_OF_PYTHON = ("builtins", "itertools")


class _Mark:
    """A place on the way of an iterator; what lies behind it is kept as long as somebody holds the mark."""

    def __init__(self, at: int) -> None:
        self.at = at


class Rewindable(Iterator[Any]):
    """Gives what another iterator gives, and again from a mark on; it takes the other one's place for good."""

    __slots__ = ("_at", "_marks", "_source", "_tape")

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._tape: deque[Any] = deque()
        self._at = 0
        """In the tape, of what is given next."""
        self._marks: weakref.WeakSet[_Mark] = weakref.WeakSet()

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def __next__(self) -> Any:
        if self._at == len(self._tape):
            self._tape.append(next(self._source))
        value = self._tape[self._at]
        self._at += 1
        if not self._marks:
            for _ in range(self._at):
                self._tape.popleft()
            self._at = 0
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # as `copy` asks for, of an object that has no source yet
            raise AttributeError(name)
        return getattr(self._source, name)

    def __reduce__(self) -> Any:
        """A copy goes on from here, of what can be copied."""
        return _going_on, (self._source, [*self._tape][self._at :])

    def mark(self) -> Callable[[], None]:
        """What is returned goes back to where the iterator is now."""
        mark = _Mark(self._at)
        self._marks.add(mark)

        def back() -> None:
            self._at = mark.at

        return back


def _going_on(source: Iterator[Any], ahead: list[Any]) -> Rewindable:
    made = Rewindable(source)
    made._tape.extend(ahead)
    return made


def is_iterator(value: Any) -> bool:
    """Whether a value is one that runs move on, and that is put back here."""
    kind = type(value)
    return isinstance(value, (Rewindable, *_READ_ONCE)) or (kind.__module__ in _OF_PYTHON and hasattr(kind, "__next__"))


class Iterators:
    """Those that are kept at one time: what is held in several places is one and the same there when it is put back."""

    def __init__(self) -> None:
        self._met: dict[int, tuple[Any, Any, Any]] = {}
        """By its id an iterator, so that no other gets that, what is held in its place, and what is put back."""

    def rewound(self, value: Any) -> tuple[Any, Any, Callable[[], None] | None]:
        """Of an iterator: what is to be held in its place, what to hold when it is put back, and what else is to be
        done then. Anything else is held before and behind."""
        if not is_iterator(value):
            return value, value, None
        if id(value) not in self._met:
            self._met[id(value)] = value, *_kept(value)
        _, live, later = self._met[id(value)]
        return live, later, live.mark() if isinstance(live, Rewindable) else None


def _kept(value: Any) -> tuple[Any, Any]:
    """What is held in an iterator's place, and what is put back: a copy, or, for good, what can go back."""
    if isinstance(value, _COPIED):
        with warnings.catch_warnings(), contextlib.suppress(TypeError):
            warnings.simplefilter("ignore", DeprecationWarning)
            return value, copy.copy(value)
    if not isinstance(value, Rewindable):  # from Python 3.14 on those of itertools are not copied either
        value = Rewindable(value)
    return value, value
