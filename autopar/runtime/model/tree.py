"""Which modules a model consists of: those that are replaced or added later bring parameters that are in no plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from itertools import chain

from torch import nn


class ModuleTree:
    """The modules within some, and their parameters by name, as they are when this is made."""

    def __init__(self, owners: Mapping[str, nn.Module]) -> None:
        """`owners`: by what the names of their parameters begin with."""
        self._owners = owners
        self._keep()

    def strange(self) -> str | None:
        """What is said of a parameter that came since, or is gone, with the module that was replaced or added; `None`
        where there is none. Modules without parameters may come and go."""
        if [*map(len, self._tables)] == self._sizes and [*chain.from_iterable(self._children)] == self._held:
            return None
        now = dict(self._parameters())
        for name, p in self._known.items():
            if name in now and now[name] is not p:
                return f"parameter '{name}' was replaced by another one, with the module that holds it"
        there = set(now.values())
        for name, p in self._known.items():
            if p not in there:
                return f"parameter '{name}' is gone, with the module that held it"
        known = set(self._known.values())
        for name, p in now.items():
            if p.requires_grad and p not in known:
                return f"parameter '{name}' came later than the plan"
        self._keep()
        return None

    def _keep(self) -> None:
        modules = [m for owner in self._owners.values() for m in owner.modules()]
        # What TorchScript holds cannot be replaced.
        plain = [m for m in modules if isinstance(m._modules, dict) and isinstance(m._parameters, dict)]
        self._tables: list[Sized] = [table for m in plain for table in (m._modules, m._parameters)]
        self._sizes = [*map(len, self._tables)]
        self._children = [m._modules.values() for m in plain]
        self._held = [*chain.from_iterable(self._children)]
        self._known = dict(self._parameters())

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for prefix, owner in self._owners.items():
            yield from ((prefix + n, p) for n, p in owner.named_parameters(remove_duplicate=False))
