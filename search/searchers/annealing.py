"""Simulated annealing (Kirkpatrick, Gelatt and Vecchi, 1983): also steps that make the plan slower, ever fewer."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from autopar.search.base import SEARCHED, Candidate
from autopar.search.evaluate import Evaluator
from autopar.search.moves import Neighbourhood
from autopar.search.searchers.base import Searcher, tries

HOT, COLD = 0.05, 0.0005
"""The temperature at the beginning and at the end, as a part of the best step time."""


class Annealing(Searcher):
    """Walks from the best seed through random neighbours."""

    def search(self, seeds: Sequence[Candidate], evaluate: Evaluator, *, seed: int = 0) -> None:
        if not seeds:
            return
        draw, near = random.Random(seed), Neighbourhood(evaluate.problem)
        current = best = min(seeds, key=lambda c: c.order)
        for _ in tries(evaluate):
            groups = near.neighbour(current.groups, draw)
            candidate = None if groups is None else evaluate(SEARCHED, groups)
            if candidate is None or candidate.overflow_bytes > current.overflow_bytes:
                continue
            temperature_s = best.step_time_s * HOT * (COLD / HOT) ** min(1.0, evaluate.used)
            worse_s = candidate.step_time_s - current.step_time_s
            if candidate.order < current.order or draw.random() < math.exp(-max(0.0, worse_s) / temperature_s):
                current = candidate
            best = min(best, candidate, key=lambda c: c.order)
