"""Where `autopar search --trials` runs its plans."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from autopar.cli.console import progress
from autopar.cli.planning import Asked

if TYPE_CHECKING:
    from autopar.spec.cluster import ClusterSpec
    from autopar.trials import Measure

COMPUTE = "autopar.cli.trained:Trained"


@contextlib.contextmanager
def measuring(model: str, spec: ClusterSpec, asked: Asked, *, here: bool, lab: bool) -> Iterator[Measure]:
    """What runs plans for MODEL on ranks that live as long as it is open. Raises `UsageError` where nothing says where
    these are, and `LabUnavailable`."""
    from autopar.lab import Lab, LabUnavailable, loopback, unavailable_reason
    from autopar.lab.pool import Pool
    from autopar.lab.trial import RealCompute
    from autopar.trials import Measure

    if asked.optimizer == "none":
        raise click.UsageError("trials run whole steps, which takes an optimizer: leave --optimizer none out")
    compute = RealCompute(COMPUTE, (model, asked.optimizer or "", asked.dtype or "", asked.autocast or ""))
    if not lab and not here:
        raise click.UsageError(
            "nothing says where plans are to run: start this command on the cluster with torchrun, or give --launch "
            "with what starts ranks there, or --lab to emulate the cluster on this machine"
        )
    reason = unavailable_reason() if lab else None
    if reason is not None:
        raise LabUnavailable(reason)
    with Lab.of(spec) if lab else loopback(spec) as place, Pool(place) as pool:
        ranks = f"{spec.world_size} gloo ranks of this machine"
        where = f"{ranks}, which emulates {spec.summary}" if lab else ranks
        progress(f"trials run on {where}")
        yield Measure(pool, compute, where, one_machine=True)
