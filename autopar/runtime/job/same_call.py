"""What ranks make sure of before a program is made: that all call `optimize` alike, and take one rank's plan."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from autopar.errors import PlanMismatchError
from autopar.runtime.job.process_group import Group, Rendezvous
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import ModelFingerprint, Plan

_PLAN, _DO = "plan text", "do "
"""The topic under which the ranks wait for rank 0, and the word before something that they are to do with it."""


def check_same_call(model: ModelFingerprint, group: Group, settings: str, plan: Plan | None) -> None:
    """Raises `PlanMismatchError` unless all ranks call `optimize` alike, before anything of one is sent to another."""
    rendezvous = Rendezvous(group)
    rendezvous.agree_on_model(model)
    rendezvous.agree("settings", settings)
    rendezvous.agree("plan", "none, so one is searched for" if plan is None else f"'{plan.name}' ({plan.digest})")


def led_by_rank_0(group: Group, make: Callable[[Callable[[str], None]], str], do: Callable[[str], None]) -> str:
    """What `make` returns on rank 0, on every rank: a search under a time budget need not end alike on two machines.

    Rank 0 calls `make` with a function `ask`, and the other ranks wait. Where `make` calls `ask(what)`, every rank
    calls `do(what)` at the same time. Where `make` fails, it fails on all ranks.
    """

    def ask(what: str) -> None:
        Rendezvous(group).from_rank_0(_PLAN, lambda: f"{_DO}{what}")
        do(what)

    if group.rank:
        while (text := Rendezvous(group).from_rank_0(_PLAN, str)).startswith(_DO):
            do(text.removeprefix(_DO))
        return text
    made = Future[str]()
    try:
        made.set_result(make(ask))
    except Exception as e:
        made.set_exception(e)
    return Rendezvous(group).from_rank_0(_PLAN, made.result)


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
