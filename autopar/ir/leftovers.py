"""What PyTorch keeps of a graph that is gone, and that nobody reads again: its source, and shapes of its operators.

Only what grows with each capture, without end, is looked at here.
"""

from __future__ import annotations

import linecache
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode

_MOST_SHAPES = 50_000
"""Operators, each with shapes of its inputs, whose results' shapes PyTorch remembers: about 20 MB."""


@contextmanager
def forgotten_but(kept: Collection[torch.fx.GraphModule]) -> Iterator[None]:
    """Lets go, when it closes, of the source of graphs that were made within it. `kept`: those that go on living, as
    they are then."""
    before = set(_sources())
    try:
        yield
    finally:
        own = {_source(g) for g in kept}
        _forget(n for n in _sources().keys() - before if n not in own)
        if len(FakeTensorMode.cache) > _MOST_SHAPES:
            FakeTensorMode.cache_clear()


def forget(graphs: Iterable[torch.fx.GraphModule]) -> None:
    """Lets go of the source of graphs that will not run again."""
    _forget(_source(g) for g in graphs)


def _sources() -> dict[str, str]:
    """Source texts of all graphs there were, by the name that their code has."""
    return torch.fx.graph_module._loader.eval_cache


def _source(graph: torch.fx.GraphModule) -> str:
    return str(getattr(getattr(type(graph).forward, "__code__", None), "co_filename", ""))


def _forget(names: Iterable[str]) -> None:
    for name in list(names):
        _sources().pop(name, None)
        linecache.cache.pop(name, None)
