"""What ranks compare before the first step: that they issue the same collectives in one order, and compute the same."""

from __future__ import annotations

from autopar.errors import PlanMismatchError
from autopar.ir.batch import Batch
from autopar.ir.training_graph import TrainingGraph
from autopar.runtime.process_group import Rendezvous
from autopar.runtime.same_step import Capture, compare_steps
from autopar.spec.plan import Plan
from autopar.strategies.lowering import StepProgram
from autopar.strategies.timing import Moments


class CollectiveOrder:
    """Holds every program of a plan, on every rank, to one order of collectives, before the first is issued."""

    def __init__(self, rendezvous: Rendezvous, plan: Plan) -> None:
        self._rendezvous = rendezvous
        self._plan = plan
        self._hashes: dict[Moments, str] = {}
        """Of each step that a plan has, by what its groups do in it."""
        self._with_outputs: dict[Moments, str] = {}
        """Of steps that return the model's output, where they have an order of their own."""

    def check(
        self,
        program: StepProgram,
        graph: TrainingGraph,
        outputs: bool = False,
        captured: tuple[Batch, Capture] | None = None,
    ) -> None:
        """Raises `PlanMismatchError` where ranks, or batches of different shapes, would issue different collectives, or
        where ranks compute different things on batches of one shape; warns where they do on batches of other shapes.
        `outputs`: whether the step returns the model's output; where this gives another order, ranks compare that one,
        too. `captured`: what the graph was captured on, and what captures the model on another batch."""
        moments = program.moments
        if outputs and self._hashes.get(moments, program.order_hash) != program.order_hash:
            if moments not in self._with_outputs:
                self._rendezvous.agree(f"steps with outputs {len(self._with_outputs)}", program.order_hash)
                self._with_outputs[moments] = program.order_hash
            if self._with_outputs[moments] == program.order_hash:
                return
        if moments not in self._hashes:
            if not self._hashes:
                self._rendezvous.agree("plan", self._plan.digest)
            kind = f" in its {len(self._hashes) + 1}. kind of step" if self._hashes else ""
            self._rendezvous.agree(f"order of collectives{kind}", program.order_hash)
            if not self._hashes and captured is not None:
                compare_steps(self._rendezvous, graph, *captured)
            self._hashes[moments] = program.order_hash
        elif program.order_hash != self._hashes[moments]:
            raise PlanMismatchError(
                "this batch leads to another order of collectives than the first one: ranks would exchange the wrong "
                "tensors. Does the model's structure depend on the batch?"
            )

    def is_its_own(self, program: StepProgram) -> bool:
        """Whether a step that returns the model's output issues its collectives in another order than without."""
        return program.order_hash != self._hashes.get(program.moments)
