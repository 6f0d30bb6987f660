"""The search: seeds, searchers that improve them, and the plan that comes of it."""

from __future__ import annotations

if __name__ != "autopar.search":
    raise ImportError("import autopar.search, not search: this folder ships as a subpackage of autopar")

from autopar.search.base import Budget, Candidate, Problem, SearchResult
from autopar.search.batch_shares import with_shares
from autopar.search.builders import AUTODIST, BUILDERS
from autopar.search.constraints import Constraints, Pin
from autopar.search.evaluate import Evaluator
from autopar.search.journal import Journal
from autopar.search.options import SearchOptions
from autopar.search.run import (
    Prices,
    build_plan,
    infeasible,
    plan_of,
    price,
    search,
    search_again,
    search_result,
    training_step_s,
)
from autopar.search.searchers import SEARCHERS, LocalSearch, Searcher, searcher_named

__all__ = [
    "AUTODIST",
    "BUILDERS",
    "SEARCHERS",
    "Budget",
    "Candidate",
    "Constraints",
    "Evaluator",
    "Journal",
    "LocalSearch",
    "Pin",
    "Prices",
    "Problem",
    "SearchOptions",
    "SearchResult",
    "Searcher",
    "build_plan",
    "infeasible",
    "plan_of",
    "price",
    "search",
    "search_again",
    "search_result",
    "searcher_named",
    "training_step_s",
    "with_shares",
]
