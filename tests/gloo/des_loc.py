"""DES-LOC as it is written down, all ranks in one process; and what its tests run on each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.gloo.captures import traced_once
from tests.gloo.compressed import HOWS, How, net
from tests.gloo.diloco import Case, distance, program_of, take_step
from tests.gloo.diloco import Reference as Apart

STEPS = 13


class Reference(Apart):
    """Replicas are averaged in each k-th step, and moments in those that multiples of k divide."""

    step_now = 0

    def step(self, step: int) -> None:
        self.step_now = step
        super().step(step)

    def _synchronize(self, index: int, names: Any) -> None:
        if self.n == 1:
            return
        every, offset = self.case.every[index], self.case.offset[index]
        at = self.step_now + 1 - offset
        first, second = (int(self.case.options.get(k, d)) for k, d in (("first_moment", 3), ("second_moment", 6)))
        due = [key for key, of in (("exp_avg", first), ("exp_avg_sq", second)) if at % (of * every) == 0]
        for name in names:
            of_ranks = [named[name] for named in self.named]
            states = [o.state[p] for o, p in zip(self.optimizers, of_ranks, strict=True)]
            for values in ([p.data for p in of_ranks], *([s[key] for s in states] for key in due)):
                mean = torch.stack(values).mean(0)
                for value in values:
                    value.copy_(mean)


def nadam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.NAdam([p for p in model.parameters() if p.requires_grad], lr=1e-2)


MOMENTS = {"first_moment": 2, "second_moment": 3}
CASES = {
    "in one step each": Case((1, 1), strategy="des_loc"),
    "of two periods": Case((2, 3), strategy="des_loc", options=MOMENTS, how=HOWS["accumulated"]),
    "in fragments": Case((2, 2), (0, 1), strategy="des_loc", options=MOMENTS, how=How(nadam, clip=0.05)),
    "later, eager": Case((2, 2), from_step=3, strategy="des_loc", settings={"capture": "never"}, size=2),
}


@traced_once()
def everything(rank: int, n: int, folder: str) -> dict[str, Any]:
    """Of each case, how far it is from the definition; on two ranks, whether a run goes on that was saved."""
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        reference, model, worst = Reference(case, n), net(), 0.0
        program = program_of(rank, n, case, model)
        for step in range(STEPS):
            take_step(program, case, step, rank)
            reference.step(step)
            worst = max(worst, distance(model, reference.models[rank]))
        found[name] = worst
    if n == 2:
        found["goes on"] = goes_on(rank, n, folder)
    return found


def goes_on(rank: int, n: int, folder: str) -> float:
    """How far a run that is saved and loaded between averages is from the one that is not: not at all."""
    case, models = CASES["in fragments"], (net(), net())
    programs = [program_of(rank, n, case, m) for m in models]
    for step in range(5):
        take_step(programs[0], case, step, rank)
    programs[0].save(Path(folder) / "saved")
    programs[1].load(Path(folder) / "saved")
    for step in range(5, STEPS):
        for program in programs:
            take_step(program, case, step, rank)
    return distance(*models)
