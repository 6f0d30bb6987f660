"""The suite: ten workloads with real structure, and the clusters that they are trained on.

`WORKLOADS` by name; `benchmarks.suite.clusters.CLUSTERS` likewise. `python -m benchmarks.suite` prints what the
workloads are made of.
"""

from __future__ import annotations

from benchmarks.zoo.language import BERT, GPT2, LLAMA, MOE, RECURRENT
from benchmarks.zoo.recommendation import RECOMMENDATION
from benchmarks.zoo.vision import DETR, FACES, LARGE_LINEAR, RESNET
from benchmarks.zoo.workload import Workload

__all__ = ["WORKLOADS", "workload_named"]

WORKLOADS: dict[str, Workload] = {
    w.name: w for w in (BERT, GPT2, LLAMA, RESNET, LARGE_LINEAR, RECOMMENDATION, RECURRENT, MOE, FACES, DETR)
}


def workload_named(name: str) -> Workload:
    """The workload of that name; raises `KeyError` with the nearest right name."""
    from autopar.errors import did_you_mean

    if name not in WORKLOADS:
        raise KeyError(f"no workload '{name}' in the suite{did_you_mean(name, WORKLOADS)}")
    return WORKLOADS[name]
