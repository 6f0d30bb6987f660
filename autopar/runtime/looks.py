"""Looking at what a step computes: at gradients before a lossy group encodes them, delays them, or keeps them to their
rank, and at those that the optimizer updates with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.fx
from torch import nn

from autopar.ops.fragments import Fragment
from autopar.ops.updates import Observer, Step


class Look(nn.Module):
    """Returns a rank's gradients as they are; shows each of them to an observer, times `factor`."""

    def __init__(self, parts: Sequence[Fragment], factor: float) -> None:
        super().__init__()
        self.fragments = tuple(parts)
        self.factor = factor
        self.observer: Observer | None = None

    def forward(self, value: torch.Tensor | list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
        if self.observer is not None:
            for i, fragment in enumerate(self.fragments):
                self.observer(fragment, self.factor * (value[i] if isinstance(value, list) else fragment.of(value)))
        return value


@dataclass
class Observers:
    """Who is shown the gradients of a program's graphs."""

    users: Observer | None = None
    """Of what the optimizer updates with."""
    updates: Observer | None = None
    """The proof's, of the same where that is the global mean's gradient."""
    own: Observer | None = None
    """The proof's, of a rank's own gradients elsewhere."""
    elsewhere: Observer | None = None
    """The proof's, of what the optimizer updates with there, before it is clipped."""

    def watch(self, graph: nn.Module) -> None:
        """Has the modules of a graph show them."""
        looked = {_group(name) for name, m in graph.named_children() if isinstance(m, Look)}
        for name, m in graph.named_children():
            if isinstance(m, Look):
                m.observer = self.own
            elif isinstance(m, Step):
                is_looked = _group(name) in looked
                m.observer = self.users if is_looked else both(self.updates, self.users)
                m.unclipped = self.elsewhere if is_looked else None


class Looking:
    """Shows the gradients of a program's graphs to whoever looks."""

    def __init__(self, graphs: Callable[[], Iterable[nn.Module]]) -> None:
        """`graphs`: all that were written so far."""
        self._graphs = graphs
        self._observers = Observers()

    def observe(self, users: Observer | None) -> None:
        """Has what the optimizer updates with shown to the user's observer, from now on."""
        self._observers.users = users
        self._watch()

    def watch(self, graph: nn.Module) -> None:
        """Has a graph that was written just now show its gradients, too."""
        self._observers.watch(graph)

    @contextmanager
    def also(self, proof: Observers, alone: bool) -> Iterator[None]:
        """While it is open, shows gradients to the proof's observers: in place of the user's, or besides."""
        before = self._observers
        self._observers = replace(proof, users=None if alone else before.users)
        self._watch()
        try:
            yield
        finally:
            self._observers = before
            self._watch()

    @contextmanager
    def besides(self, observer: Observer) -> Iterator[None]:
        """While it is open, shows what the optimizer updates with to a further observer, as to the user's."""
        before = self._observers.users
        self.observe(both(before, observer))
        try:
            yield
        finally:
            self.observe(before)

    def _watch(self) -> None:
        for graph in self._graphs():
            self._observers.watch(graph)


def both(first: Observer | None, second: Observer | None) -> Observer | None:
    """What shows gradients to two observers, one after the other."""
    if first is None or second is None:
        return first or second

    def show(fragment: Fragment, gradient: torch.Tensor) -> None:
        first(fragment, gradient)
        second(fragment, gradient)

    return show


def _group(name: str) -> str:
    """The number of a module's group, with which its name ends."""
    return name.rpartition("_")[2]
