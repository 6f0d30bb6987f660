"""What a plan records of the search that made it: what the user asked for, and what trials had taught."""

from __future__ import annotations

from autopar.cost_models import CorrectedCostModel, CostModel
from autopar.cost_models.base import Lesson
from autopar.search.constraints import MEMORY_RESERVE, Constraints, Pin
from autopar.spec.plan import PinnedParameters, Plan


def recorded_pins(constraints: Constraints) -> tuple[PinnedParameters, ...]:
    """The pins, for a plan that was made with them."""
    pins = constraints.pins
    return tuple(PinnedParameters(pattern=p.pattern, strategy=p.strategy, options=dict(p.options)) for p in pins)


def constraints_of(plan: Plan) -> Constraints:
    """What was asked for when the plan was made: memory that is kept free, pins, forbidden strategies."""
    use = plan.memory
    return Constraints(
        memory_reserve=MEMORY_RESERVE if use is None else use.reserve_bytes / use.device_bytes,
        pins=tuple(Pin(p.pattern, p.strategy, p.options) for p in plan.pins),
        forbidden=frozenset(plan.forbidden),
    )


def lessons_of(model: CostModel) -> tuple[Lesson, ...]:
    """What trials have taught a cost model."""
    return model.lessons_ if isinstance(model, CorrectedCostModel) else ()
