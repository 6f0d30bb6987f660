"""The search: seeds, local improvement, and the plan that comes of it."""

from __future__ import annotations

if __name__ != "autopar.search":
    raise ImportError("import autopar.search, not search: this folder ships as a subpackage of autopar")

from autopar.search.base import Budget, Candidate, Problem, SearchResult
from autopar.search.builders import AUTODIST, BUILDERS
from autopar.search.constraints import Constraints, Pin
from autopar.search.local import LocalSearch
from autopar.search.run import build_plan, infeasible, price, search, search_result
from autopar.search.searcher import Searcher

__all__ = [
    "AUTODIST",
    "BUILDERS",
    "Budget",
    "Candidate",
    "Constraints",
    "LocalSearch",
    "Pin",
    "Problem",
    "SearchResult",
    "Searcher",
    "build_plan",
    "infeasible",
    "price",
    "search",
    "search_result",
]
