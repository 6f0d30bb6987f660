"""Where `autopar search --trials` runs its plans."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autopar.cli.console import progress
from autopar.cli.planning import Asked
from autopar.formatting import number_of

if TYPE_CHECKING:
    from autopar.lab.pool import Pool
    from autopar.spec.cluster import ClusterSpec
    from autopar.trials import Measure

COMPUTE = "autopar.cli.trained:Trained"


def under_torchrun() -> bool:
    """Whether this process is a rank of a job."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


@dataclass(frozen=True)
class Where:
    """What a user said of where plans are to run."""

    here: bool
    """The cluster is so many ranks of this machine."""
    lab: bool
    launch: str | None
    folder: Path | None
    """For `launch`; all hosts see it."""

    @property
    def one_machine(self) -> bool:
        return self.launch is None and not under_torchrun()

    @contextlib.contextmanager
    def pool(self, spec: ClusterSpec) -> Iterator[tuple[Pool, str]]:
        """The ranks, and what they are in words."""
        from autopar.lab import Lab, LabUnavailable, loopback, unavailable_reason
        from autopar.lab.pool import Pool
        from autopar.spec.detect import threads_of_rank
        from autopar.trials import far

        ranks = number_of(spec.world_size, "rank")
        if self.launch is not None:
            if self.folder is None:
                raise click.UsageError("--launch needs a folder that all hosts see: --trials-folder DIR, or -o FILE")
            with far.launched(self.launch, self.folder, spec.world_size) as pool:
                yield pool, f"{ranks} of `{self.launch}`"
        elif under_torchrun():
            if self.lab:
                raise click.UsageError("--lab starts its ranks itself: leave torchrun out")
            with far.under_torchrun(spec.world_size) as pool:
                yield pool, f"{ranks} of torchrun's job"
        elif self.lab:
            reason = unavailable_reason()
            if reason is not None:
                raise LabUnavailable(reason)
            with Lab.of(spec) as lab, Pool(lab) as pool:
                yield pool, f"{ranks} of this machine, which emulates {spec.summary}"
        elif self.here:
            threads = {"OMP_NUM_THREADS": threads_of_rank(spec.world_size)}
            with loopback(spec) as place, Pool(place, env=threads) as pool:
                yield pool, f"{ranks} of this machine"
        else:
            raise click.UsageError(
                "nothing says where plans are to run: start this command on the cluster with torchrun, or give "
                "--launch with what starts ranks there, or --lab to emulate the cluster on this machine"
            )


@contextlib.contextmanager
def measuring(model: str, spec: ClusterSpec, asked: Asked, where: Where) -> Iterator[Measure]:
    """What runs plans for MODEL on ranks that live as long as it is open. Raises `UsageError` where nothing says where
    these are, and `LabUnavailable`."""
    from autopar.cost_models.compute import is_cpu
    from autopar.lab.trial import RealCompute
    from autopar.trials import Measure

    if asked.optimizer == "none":
        raise click.UsageError("trials run whole steps, which takes an optimizer: leave --optimizer none out")
    processors = ",".join(str(place.rank) for place in spec.ranks if is_cpu(place.device))
    arguments = (model, asked.optimizer or "", asked.dtype or "", asked.autocast or "", processors)
    compute = RealCompute(COMPUTE, arguments)
    with where.pool(spec) as (pool, said):
        progress(f"trials run on {said}")
        yield Measure(pool, compute, said, one_machine=where.one_machine)
