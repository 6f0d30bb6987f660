"""Measures plans in turns, on living ranks, wherever these are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autopar.lab.pool import Pool
from autopar.lab.trial import RealCompute, TrialResult, TrialSpec
from autopar.spec.detect import free_memory_bytes
from autopar.spec.plan import Plan

BLOCK_S = 1.0
"""Seconds that a block of steps is to take, where a step takes less."""
LEAST_STEPS, MOST_STEPS = 3, 20
"""Of a block."""
ROUNDS = 4
"""Blocks of each plan."""
BEHIND = 1.3
"""Times the fastest plan's step, above which a plan gets no further blocks: enough is known of it."""
WARMUP = 2
USED = 0.7
"""Part of this machine's free memory that plans may take that are kept in it together."""


@dataclass(frozen=True)
class Measure:
    """Runs plans, a block of steps of each and then again the other way round, on the ranks of a pool."""

    pool: Pool
    compute: RealCompute
    where: str
    """What the ranks are, in words."""
    one_machine: bool
    """Whether all ranks share the memory of this machine."""

    def __call__(
        self,
        plans: Mapping[str, Plan],
        fits: Callable[[int], bool],
        stopped: Callable[[], bool],
        tell: Callable[[str], None],
    ) -> dict[str, TrialResult]:
        """What was measured of each plan, by its name. `fits`: whether the ranks' devices hold all of these at once,
        in as many bytes of this machine's memory; `stopped` is asked between blocks, `tell` is told what runs next."""
        specs = {
            name: TrialSpec(plan, self.compute, steps=block_steps(plan), warmup=WARMUP) for name, plan in plans.items()
        }
        free = free_memory_bytes() if self.one_machine else None
        together = fits(1 << 62 if free is None else int(USED * free))
        return self.pool.in_turn(specs, ROUNDS, together=together, behind=BEHIND, stopped=stopped, tell=tell)


def block_steps(plan: Plan) -> int:
    """Steps of a block of this plan."""
    step_s = plan.prediction.step_time_s if plan.prediction is not None else BLOCK_S
    return max(LEAST_STEPS, min(MOST_STEPS, math.ceil(BLOCK_S / max(step_s, 1e-6))))
