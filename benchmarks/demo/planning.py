"""Describes the demo's cluster, and plans for it, as a user would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import autopar
from autopar.lab import Lab
from autopar.spec.cluster import HostSpec, NetworkSpec
from autopar.spec.plan import Fidelity
from autopar.spec.units import Figure
from benchmarks.demo.task import Task


def describe(lab: Lab | None, ranks: int, path: Path) -> autopar.ClusterSpec:
    """Writes the cluster's description to `path`, and reads it back: the lab's hosts and links, or this machine."""
    here = autopar.ClusterSpec.local(ranks)
    if lab is None:
        path.write_text(here.to_yaml())
        return autopar.ClusterSpec.load(path)
    assert len(set(lab.rates_bps)) == 1 and lab.rates_bps[0] is not None
    # A device has the same share of this machine's cores and memory, whichever namespace it is in.
    device = here.hosts[0].devices[0].model_copy(update={"count": 1})
    cluster = autopar.ClusterSpec(
        hosts=(HostSpec(name="host", count=len(lab.hosts), devices=(device,)),),
        network=NetworkSpec(bandwidth=Figure(lab.rates_bps[0] / 8)),
    )
    path.write_text(cluster.to_yaml())
    return autopar.ClusterSpec.load(path)


def make_plan(
    task: Task, cluster: autopar.ClusterSpec, fidelity: Fidelity, progress: Callable[[str, int, float], None]
) -> autopar.Plan:
    """Captures the model and searches. Needs neither the cluster nor a process group.

    `progress` is told what is being tried, how many plans have been priced, and the best step time so far in seconds.
    """
    model, batch = task.model(), task.batch(0, 0)
    return autopar.plan(
        model,
        cluster,
        example_inputs=batch,
        optimizer=task.optimizer(model),
        fidelity=fidelity,
        progress=progress,
    )
