"""Hooks on a model's modules: which ones there are is a part of what a captured graph is valid for."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from torch import nn

from autopar.ir.unfit import has_global_hooks
from autopar.runtime.model.pre_use_hooks import PreUseHooks


class ModuleHooks:
    """The forward and backward hooks of modules, less autopar's own. TorchDynamo traces hooks, and guards none."""

    def __init__(self, owners: Iterable[nn.Module]) -> None:
        modules = dict.fromkeys(m for owner in owners for m in owner.modules())
        self._tables = [
            table
            for m in modules
            for table in (m._forward_pre_hooks, m._forward_hooks, m._backward_pre_hooks, m._backward_hooks)
        ]

    def key(self) -> Hashable:
        """Which hooks there are, by module; each has a number that no other one ever has."""
        for_all = has_global_hooks()
        if not any(self._tables) and not for_all:
            return ()
        found = [
            (i, number)
            for i, table in enumerate(self._tables)
            for number, hook in table.items()
            if not isinstance(getattr(hook, "__self__", None), PreUseHooks)
        ]
        return (*found, for_all)
