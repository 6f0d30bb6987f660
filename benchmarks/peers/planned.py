"""autopar, and AutoDist's eight builders as its plans: the same runtime, another decision."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.spec.plan import Fidelity
from benchmarks.peers.base import Options, Peer, Step
from benchmarks.peers.compressed import FIRST_STEP, RANK
from benchmarks.peers.local_sgd import PERIOD
from benchmarks.zoo.workload import Workload

if TYPE_CHECKING:
    from autopar.ir.training_graph import TrainingGraph
    from autopar.runtime.compiled import Settings
    from autopar.runtime.job.process_group import Group
    from benchmarks.peers.case import Case

JOIN_TIMEOUT_S = 120.0


class Planned(Peer):
    """A plan, run by autopar. Options: `plan`, its file."""

    def key(self, options: Options) -> str:
        return f"plan {Path(options['plan']).stem}"

    def build(self, workload: Workload, rank: int, world_size: int, options: Options) -> Step:
        """As `autopar.optimize(plan=...)`, but captures a workload once for all of its plans."""
        from autopar.runtime.optimizers.optimizer import context_for, optimizer_scope
        from autopar.runtime.program import Program
        from autopar.spec.plan import Plan

        model = workload.model()
        optimizer = workload.optimizer(model)
        plan = Plan.load(options["plan"])
        late = any(g.options.get("late") for g in plan.groups)
        context = context_for(world_size, optimizer, optimizer_scope(optimizer), None, True, late)
        program = Program(model, plan, _group(), optimizer, settings_of(workload), context)
        program.adopt(captured(workload), workload.batch(0, rank))
        return program.step


class Autopar(Planned):
    """What autopar chooses: its search's plan within a fidelity."""

    about = (
        "the plan that the search finds, with the cluster's description and nothing measured; where more than rounding "
        "is allowed, the faster of it and the lossy method of the same settings as the peer's"
    )

    def __init__(self, fidelity: Fidelity) -> None:
        self.fidelity = fidelity
        self.name = "autopar" if fidelity == "exact" else f"autopar_{fidelity}"
        if fidelity == "compressed":
            self.warm_up_steps = FIRST_STEP + 2
        if fidelity == "local":
            self.period, self.warm_up_steps = PERIOD, PERIOD

    def choices(self, case: Case) -> Sequence[Options]:
        plans = [case.searched(self.fidelity)]
        if case.given is None and self.fidelity == "compressed":
            plans.append(case.built(f"power_sgd(rank={RANK})+from_step={FIRST_STEP}"))
        if case.given is None and self.fidelity == "local":
            plans.append(case.built(f"ddp+every={PERIOD}"))
        return tuple({"plan": case.save(plan)} for plan in plans)


class Builder(Planned):
    """The plan of one of AutoDist's builders."""

    def __init__(self, builder: str) -> None:
        self.name = f"autodist_{builder}"
        self.about = f"AutoDist's builder {builder}, as a plan run by autopar"
        self._builder = builder

    def choices(self, case: Case) -> Sequence[Options]:
        return ({"plan": case.save(case.built(self._builder))},)


@cache
def _group() -> Group:
    from autopar.runtime.job.process_group import join

    return join(JOIN_TIMEOUT_S)


@lru_cache(maxsize=1)
def captured(workload: Workload) -> TrainingGraph:
    """The workload's graph on this rank; of the one asked for last, it is kept."""
    return graph_of(workload, _group())


def graph_of(workload: Workload, group: Group) -> TrainingGraph:
    """A workload's graph on a rank; where it runs eagerly its outline, by all ranks together."""
    from autopar.training import Training

    model = workload.model()
    training = Training(model, workload.batch(0, group.rank), settings_of(workload), workload.optimizer(model), "step")
    if workload.eager:
        training.settle(group)
    return training.graph()


def settings_of(workload: Workload) -> Settings:
    """What a program of the workload computes."""
    from autopar.runtime.compiled import Settings

    return Settings(workload.loss_fn, capture="never" if workload.eager else "auto")
