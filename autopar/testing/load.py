"""Finds a strategy by its name, or by where it is defined."""

from __future__ import annotations

import importlib

from autopar.errors import PlanError
from autopar.strategies import STRATEGIES, Strategy, register, strategy_named


def load(said: str) -> Strategy:
    """`all_reduce`, or `package.module:MyStrategy`, which is registered where it is not yet. Raises `PlanError`."""
    if ":" not in said:
        return strategy_named(said)
    module, _, name = said.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as e:
        raise PlanError(f"cannot load the strategy '{said}': {e}. Expected package.module:Class") from e
    strategy = found() if isinstance(found, type) and issubclass(found, Strategy) else found
    if not isinstance(strategy, Strategy):
        raise PlanError(f"'{said}' is no strategy: subclass autopar.strategies.Strategy")
    if STRATEGIES.get(strategy.name) is None or type(STRATEGIES[strategy.name]) is not type(strategy):
        register(strategy)
    return STRATEGIES[strategy.name]
