"""What ranks make sure of before a program is made: that all call `optimize` alike, and take one rank's plan."""

from __future__ import annotations

from collections.abc import Callable

from autopar.errors import PlanMismatchError
from autopar.runtime.job.process_group import Group, Rendezvous
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import ModelFingerprint, Plan


def check_same_call(model: ModelFingerprint, group: Group, settings: str, plan: Plan | None) -> None:
    """Raises `PlanMismatchError` unless all ranks call `optimize` alike, before anything of one is sent to another."""
    rendezvous = Rendezvous(group)
    rendezvous.agree_on_model(model)
    rendezvous.agree("settings", settings)
    rendezvous.agree("plan", "none, so one is searched for" if plan is None else f"'{plan.name}' ({plan.digest})")


def plan_on_rank_0(group: Group, make: Callable[[], Plan]) -> Plan:
    """Searches on one rank alone: a search under a time budget need not end alike on two machines."""
    text = Rendezvous(group).from_rank_0("plan text", lambda: make().model_dump_json())
    return Plan.loads(text, "rank 0's plan")


def job_cluster(given: ClusterSpec | None, group: Group) -> ClusterSpec:
    """The cluster of this job: as it is given, or what `ClusterSpec.detect()` sees. Raises `PlanMismatchError` where it
    has another number of ranks."""
    # One process is one rank, however many devices the machine has.
    cluster = given or (ClusterSpec.local(1) if group.pg is None else ClusterSpec.detect())
    if cluster.world_size != group.world_size:
        raise PlanMismatchError(
            f"the cluster description has {cluster.world_size} devices ({cluster.summary}), this job has "
            f"{group.world_size} ranks: start one rank a device, with torchrun, or describe the cluster that is used"
        )
    return cluster
