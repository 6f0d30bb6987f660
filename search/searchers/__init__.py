"""Searchers: ways to look for a plan, one interface, a file each.

The default combines them; the others are there to be chosen, and to show what the default is worth.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.errors import PlanError, among
from autopar.search.searchers.annealing import Annealing
from autopar.search.searchers.base import Searcher
from autopar.search.searchers.borders import Borders
from autopar.search.searchers.combined import Combined
from autopar.search.searchers.dynamic import DynamicProgramming
from autopar.search.searchers.evolutionary import Evolutionary
from autopar.search.searchers.exhaustive import Exhaustive
from autopar.search.searchers.greedy import Greedy
from autopar.search.searchers.local import LocalSearch
from autopar.search.searchers.random_plans import RandomPlans
from autopar.search.searchers.stretches import Stretches

__all__ = ["DEFAULT", "SEARCHERS", "Combined", "LocalSearch", "Searcher", "searcher_named"]

DEFAULT = "combined"

SEARCHERS: dict[str, Callable[[], Searcher]] = {
    DEFAULT: Combined,
    "local": LocalSearch,
    "dynamic": DynamicProgramming,
    "stretches": Stretches,
    "borders": Borders,
    "greedy": Greedy,
    "evolutionary": Evolutionary,
    "annealing": Annealing,
    "random": RandomPlans,
    "exhaustive": Exhaustive,
}
"""All searchers by name."""


def searcher_named(name: str) -> Searcher:
    """Makes a searcher. Raises `PlanError` with the nearest name for an unknown one."""
    if name not in SEARCHERS:
        raise PlanError(f"no searcher is called '{name}'{among(name, SEARCHERS)}")
    return SEARCHERS[name]()
