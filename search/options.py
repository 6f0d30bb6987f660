"""How a plan is searched, beside the time that it may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from autopar.search.base import EVALUATIONS, SearchResult
from autopar.search.searchers import DEFAULT
from autopar.spec.plan import Plan


@dataclass(frozen=True)
class SearchOptions:
    """What `autopar search` offers beyond `autopar plan`; for `autopar.plan(search=...)`."""

    searcher: str = DEFAULT
    """A name of `autopar.search.SEARCHERS`."""
    evaluations: int = EVALUATIONS
    """Plans priced at most, seeds not counted. With a generous time budget, the same number gives the same plan."""
    journal: str | Path | None = None
    """A JSONL file to which every priced plan is appended."""
    resume: bool = False
    """Takes prices from the journal, where the same search was cut short."""
    finalists: Callable[[SearchResult], Plan] | None = None
    """Runs what was found for real, and returns the plan that is taken: `autopar.trials.Trials`."""
    chooses: Callable[[SearchResult, str], Plan] | None = None
    """From the fastest exact plan, and the optimizer's kind, to the plan that is taken under a quality budget:
    `autopar.quality.on_evidence.OnEvidence`."""
    global_batch: int | None = None
    """Samples of all ranks together, which are shared out so that unequal devices compute equally long. The plan's
    cluster says each rank's: `plan.cluster.cluster.ranks[rank].device.batch`."""
    stop: Event = field(default_factory=Event, compare=False)
    """Ends the search when it is set; the best plan so far is taken."""
