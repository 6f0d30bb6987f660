"""One search of `benchmarks.search_quality.resume`, in a process of its own: its journal. Prints JSON."""

from __future__ import annotations

import hashlib
import json
import sys
import time

from autopar.search import Budget
from autopar.search.run import search_result
from benchmarks.search_quality.against_random import job_of
from benchmarks.search_quality.job import EVALUATIONS

WORKLOAD, CLUSTER = "lstm", "3x1g-1x200m"


def main(journal: str) -> None:
    """Searches, taking what the journal has, and says what came of it."""
    job = job_of(WORKLOAD, CLUSTER)
    began = time.perf_counter()
    result = search_result(
        job.graph,
        job.cluster,
        job.context,
        budget=Budget(time_s=1e9, evaluations=EVALUATIONS),
        cost_model=job.cost_model,
        journal=journal,
        resume=True,
    )
    search_s = time.perf_counter() - began
    outcome = hashlib.sha256(result.plan.model_dump_json().encode())
    for c in result.candidates:
        outcome.update(repr((c.name, [g.model_dump() for g in c.groups], c.estimate.prediction())).encode())
    told = {"about": job.about, "outcome": outcome.hexdigest(), "priced": len(result.candidates), "search_s": search_s}
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
