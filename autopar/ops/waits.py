"""The wait that completes a collective, and the sums of a whole step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from autopar.backends import collectives
from autopar.ops.base import Call, Emission, Operation, Site
from autopar.ops.collectives import AllReduce, collective_of
from autopar.ops.values import Bytes, Setting, Value, Work


@dataclass(frozen=True, slots=True)
class Wait(Operation):
    """Completes a collective."""

    name = "wait"
    reads_members = False
    needs_only_inputs = True
    sent: bool = False
    """Whether another collective sends the value on."""

    def when_sent(self) -> Operation:
        return replace(self, sent=True)

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        return collective_of(call.inputs[0]).finish_work(call, rank, setting)

    def allocates(self, call: Call, setting: Setting) -> Bytes | None:
        return collective_of(call.inputs[0]).finish_allocates(call, setting)

    def passing_bytes(self, call: Call, setting: Setting) -> Bytes:
        return collective_of(call.inputs[0]).finish_passing_bytes(call, setting)

    def waits_for(self, call: Call) -> Call | None:
        return call.inputs[0]

    def write(self, site: Site, call: Call) -> Any:
        if call.deferred:
            return site.deferred_of(call)
        done = site.call(collectives.wait, (site.value_of(call.inputs[0]),))
        return collective_of(call.inputs[0]).finish(site, call, done, self.sent)


@dataclass(frozen=True, slots=True)
class StepSum(AllReduce):
    """The sum over ranks of a number of the whole step: of the batches' weights, or of their parts of the loss."""

    of: str = "weight"

    def value(self, at: Emission) -> Value:
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
