"""The wait that completes a collective, and the sums of a whole step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.backends import collectives
from autopar.ops.base import Call, Operation, Site
from autopar.ops.collectives import AllReduce, Collective
from autopar.ops.context import Context
from autopar.ops.group import Group
from autopar.ops.values import Bytes, Setting, Value, Work


@dataclass(frozen=True, slots=True)
class Wait(Operation):
    """Completes a collective."""

    name = "wait"
    reads_members = False
    sent: bool = False
    """Whether its value is sent on."""

    def value(self, group: Group | None, inputs: Sequence[Call], context: Context) -> Value:
        return inputs[0].made

    def when_sent(self) -> Operation:
        return replace(self, sent=True)

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        return _collective(call).finish_work(call, rank, setting)

    def allocates(self, call: Call, setting: Setting) -> Bytes | None:
        return _collective(call).finish_allocates(call, setting)

    def waits_for(self, call: Call) -> Call | None:
        return call.inputs[0]

    def summed_as(self, call: Call) -> str:
        """The dtype of a sum that is taken here: the wire's where it is sent on, else the parameters'."""
        return call.dtype if self.sent else call.owner_group.dtype

    def write(self, site: Site, call: Call) -> Any:
        if call.deferred:
            return site.deferred_of(call)
        done = site.call(collectives.wait, (site.value_of(call.inputs[0]),))
        return _collective(call).finish(site, call, done)


@dataclass(frozen=True, slots=True)
class StepSum(AllReduce):
    """The sum over ranks of a number of the whole step: of the batches' weights, or of their parts of the loss."""

    of: str = "weight"

    def value(self, group: Group | None, inputs: Sequence[Call], context: Context) -> Value:
        return Value(1, "float64")

    def write(self, site: Site, call: Call) -> Any:
        return site.begin_step_sum(self.of)


@dataclass(frozen=True, slots=True)
class StepWait(Wait):
    """Completes a `StepSum`."""

    def write(self, site: Site, call: Call) -> Any:
        source = call.inputs[0].op
        assert isinstance(source, StepSum)
        return site.end_step_sum(source.of, site.value_of(call.inputs[0]))


def _collective(wait: Call) -> Collective:
    op = wait.inputs[0].op
    assert isinstance(op, Collective), f"there is nothing to wait for in {op.name}"
    return op
