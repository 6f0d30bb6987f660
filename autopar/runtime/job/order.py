"""What ranks compare before the first step: that they issue the same collectives in one order, and compute the same."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import PlanMismatchError
from autopar.ir.batch import Batch
from autopar.ir.training_graph import TrainingGraph
from autopar.runtime.job.process_group import Rendezvous
from autopar.runtime.job.same_step import Capture, compare_steps
from autopar.spec.plan import Plan
from autopar.strategies.lowering import StepProgram
from autopar.strategies.timing import Moments

_Kind = tuple[bool, str | None]
"""Whether a capture returns the model's output, and the number format of the autocast that it was made under."""


@dataclass(frozen=True)
class _Order:
    hash: str
    kind: _Kind


class CollectiveOrder:
    """Holds every program of a plan, on every rank, to one order of collectives, before the first is issued."""

    def __init__(self, rendezvous: Rendezvous, plan: Plan) -> None:
        self._rendezvous = rendezvous
        self._plan = plan
        self._first: dict[Moments, _Order] = {}
        """Of each step that a plan has, by what its groups do in it."""
        self._others: dict[tuple[Moments, _Kind], str] = {}
        """Of kinds of capture that have an order of their own, its hash."""

    def check(
        self,
        program: StepProgram,
        graph: TrainingGraph,
        outputs: bool = False,
        captured: tuple[Batch, Capture] | None = None,
    ) -> None:
        """Raises `PlanMismatchError` where ranks, or batches of different shapes, would issue different collectives, or
        where ranks compute different things on batches of one shape; warns where they do on batches of other shapes.
        `outputs`: whether the step returns the model's output. Where this, or an autocast, gives another order, ranks
        compare that one, too. `captured`: what the graph was captured on, and what captures the model on another
        batch."""
        moments, own = program.moments, _Order(program.order_hash, (outputs, graph.autocast))
        first = self._first.get(moments)
        if first is None:
            if not self._first:
                self._rendezvous.agree("plan", self._plan.digest)
            kind = f" in its {len(self._first) + 1}. kind of step" if self._first else ""
            self._rendezvous.agree(f"order of collectives{kind}", own.hash)
            if not self._first and captured is not None:
                compare_steps(self._rendezvous, graph, *captured)
            self._first[moments] = own
        elif own.hash != first.hash and own.kind != first.kind:
            if (moments, own.kind) not in self._others:
                self._rendezvous.agree(f"order of collectives in captures of kind {len(self._others)}", own.hash)
                self._others[moments, own.kind] = own.hash
            self._hold(own, self._others[moments, own.kind])
        else:
            self._hold(own, first.hash)

    def is_its_own(self, program: StepProgram) -> bool:
        """Whether a step that returns the model's output issues its collectives in another order than without."""
        first = self._first.get(program.moments)
        return first is None or program.order_hash != first.hash

    def _hold(self, own: _Order, to: str) -> None:
        if own.hash != to:
            raise PlanMismatchError(
                "this batch leads to another order of collectives than the first one: ranks would exchange the wrong "
                "tensors. Does the model's structure depend on the batch?"
            )
