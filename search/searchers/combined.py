"""The default: each searcher that the others cannot stand in for, one after the other, on one budget."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.search.base import Candidate
from autopar.search.evaluate import Evaluator
from autopar.search.searchers.base import Searcher
from autopar.search.searchers.borders import Borders
from autopar.search.searchers.dynamic import DynamicProgramming
from autopar.search.searchers.evolutionary import Evolutionary
from autopar.search.searchers.local import SIMPLIFY_SHARE, LocalSearch
from autopar.search.searchers.stretches import Stretches

FIRST_SHARE, LOCAL_SHARE, MERGING_SHARE, BORDERS_SHARE, AGAIN_SHARE = 0.3, 0.45, 0.5, 0.55, 0.65
"""Parts of what the seeds have left of the budget that are used up, at most, when stretches are left, when the local
search begins to merge groups, when it is left, when borders are, and when stretches are left again; what remains is for
crossing plans."""
FIRST_PLANS, FIRST_MOST = 100, 0.6
"""Plans that stretches price at first where time is short, until this part of it is used up: nothing else gains as much
by as few."""
IDLE_ROUNDS = 2
"""Rounds in a row that found nothing better, after which it stops."""


class Combined(Searcher):
    """Switches ever shorter stretches of the best seed, and cuts the best seeds anew by dynamic programming; then, by
    rounds, improves the best of all that was found step by step, moves its borders, and crosses what came of it; at the
    end, merges groups of the best for as long as that costs nothing, and moves borders with what is left."""

    def search(self, seeds: Sequence[Candidate], evaluate: Evaluator, *, seed: int = 0) -> None:
        begun = evaluate.used  # where time is short, seeds have taken some of it

        def until(share: float) -> float:
            return begun + share * (1 - begun)

        Stretches(until(FIRST_SHARE), FIRST_PLANS, until(FIRST_MOST)).search(seeds, evaluate, seed=seed)
        DynamicProgramming().search(seeds, evaluate, seed=seed)
        idle = number = 0
        while idle < IDLE_ROUNDS and evaluate.used < 1 - SIMPLIFY_SHARE:
            before, own = evaluate.best, seed + 7919 * number
            local = LocalSearch(share=until(LOCAL_SHARE), in_all=until(MERGING_SHARE))
            local.search(evaluate.candidates, evaluate, seed=own)
            Borders(share=until(BORDERS_SHARE)).search(seeds, evaluate, seed=own)
            Stretches(until(AGAIN_SHARE)).search(seeds, evaluate, seed=own)
            Evolutionary(share=1 - SIMPLIFY_SHARE).search(seeds, evaluate, seed=own)
            idle = idle + 1 if evaluate.best is before else 0
            number += 1
        Borders().search(seeds, evaluate, seed=seed)
