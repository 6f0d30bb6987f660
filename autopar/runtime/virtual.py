"""Virtual compute: a step whose communication is real and whose device is a clock.

Each stretch of the graph between two placed calls, and each call's own work on the device (packing, adding
up, updating, storing, clipping), takes its modelled or measured time times a `dilation`, and computes nothing. So 8 to
16 ranks of a GPU cluster run on two cores; with the links' rates divided by the same factor, the schedule is that of
the real cluster.

What is shared with real compute, since it is the same code (`StepWriter`, `collectives`): which collectives are issued,
behind which node, in which order, with which sizes and dtypes, the sums of the weights and of the loss, the waits, and
so the bytes on the wire and the hash that ranks compare. What is not: gradients hold zeros, nothing is learned, rows of
tables are as many in every batch as in the one that was captured, the host's time to hand a collective over is that of
this machine and is not dilated, neither are latencies, and compute is not slowed down by the communication beside it.

The clock is that of an asynchronous device. Work moves on the time at which the device is free, and returns at once.
Before a collective is issued, and at the end of the step, the host sleeps until the device has come that far: a
collective never starts before its gradients would be there, and what a sleep is late by is not added to the next one.
Where the device has to wait for the host or for a transfer (at the step's start, behind a wait that ended after the
device was free), its clock is set to the present: no work is done while what it needs is under way.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx

from autopar.cost_models.analytic import StepPricer
from autopar.ir.capture import JointGraph
from autopar.ir.training_graph import TrainingGraph
from autopar.ops.base import Call
from autopar.ops.group import Group as SyncGroup
from autopar.runtime.deferred import DeferredParameters
from autopar.runtime.job.process_group import Group, Rendezvous
from autopar.runtime.step_writer import StepWriter
from autopar.runtime.writer import Target
from autopar.strategies.lowering import StepProgram

LOSS = 1.0
"""What every rank's batch loses: their mean shows that the loss went around."""


@dataclass(frozen=True)
class DeviceTimes:
    """What one rank's device takes, in seconds."""

    prefix_s: Sequence[float]
    """[i]: the graph's first i nodes."""
    work_s: Sequence[float]
    """[i]: the device's part of `StepProgram.calls[i]`. 0 for collectives: handing them over is done for real."""

    @classmethod
    def of(cls, pricer: StepPricer, program: StepProgram, rank: int, dilation: float = 1.0) -> DeviceTimes:
        """As the cost model prices them, each times `dilation`."""
        streams = pricer.streams(program)
        work_s = [0.0] * len(program.calls)
        for call in program.calls:
            if not call.is_pending:
                work_s[call.index] = dilation * float(pricer.price(call).device_s[rank])
        return cls([dilation * s for s in streams.prefix_s[streams.device_of_rank[rank]]], work_s)


class Device:
    """The clock of a device, and the memory that all its gradients share."""

    def __init__(self, memory_bytes: int) -> None:
        self.free_at = time.perf_counter()
        """When all work so far is done."""
        self._memory = mmap.mmap(-1, max(1, memory_bytes))

    def spend(self, seconds: float) -> None:
        """Work; does not block."""
        self.free_at += seconds

    def reach(self) -> None:
        """Blocks until the work so far is done."""
        ahead_s = self.free_at - time.perf_counter()
        if ahead_s > 0:
            time.sleep(ahead_s)

    def resume(self) -> None:
        """The device goes on from now on, unless it is busy until later."""
        self.free_at = max(self.free_at, time.perf_counter())

    def view(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of zeros. All views lie over the same memory: collectives that run at the same time write
        nothing but zeros to it. Each has a storage of its own, for by that PyTorch knows what to wait for."""
        if elements == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=elements)


class VirtualProgram:
    """A step of a lowered plan on virtual devices: `loss = program.step()`. Needs no model and no captured graph."""

    def __init__(
        self,
        graph: TrainingGraph,
        program: StepProgram,
        times: DeviceTimes,
        group: Group,
        clip_grad_norm: float | None = None,
    ) -> None:
        """Raises `PlanMismatchError` where ranks would issue their collectives in different orders."""
        Rendezvous(group).agree("order of collectives", program.order_hash)
        self.program = program
        self._group = group
        self._deferred = DeferredParameters(())
        self.module = virtual_step(graph, program, times, group, self._deferred, clip_grad_norm)
        self._device = Device(max((c.bytes for c in program.calls), default=0))

    def step(self) -> torch.Tensor:
        """One step; returns the mean loss over the ranks once the device is done."""
        weight = torch.ones((), dtype=torch.float64)
        arguments = (weight, torch.ones(2, dtype=torch.float64)) if self._group.world_size > 1 else (torch.ones(()),)
        with torch.no_grad(), self._group.guard("a virtual step"):
            self._device.resume()
            loss: torch.Tensor = self.module(self._device, *arguments)
            self._device.reach()
        return loss

    def synchronize(self) -> None:
        """Receives what is still on its way from the last step."""
        self._deferred.arrive()


def virtual_step(
    graph: TrainingGraph,
    program: StepProgram,
    times: DeviceTimes,
    group: Group,
    deferred: DeferredParameters,
    clip_grad_norm: float | None,
) -> torch.fx.GraphModule:
    """The step as a module from a `Device` and the weights of `StepWriter.write` to the loss."""
    if program.context.clips != (clip_grad_norm is not None):
        raise ValueError("the plan was lowered with clipping, or the step is to be written with it, and not both")
    target = Target(group.rank, group.world_size, group, {}, max_norm=clip_grad_norm, deferred=deferred.of)
    return VirtualWriter(graph, program, target, times).write()


class VirtualWriter(StepWriter):
    """Writes a step whose compute is spent on a `Device`."""

    def __init__(self, graph: TrainingGraph, program: StepProgram, target: Target, times: DeviceTimes) -> None:
        self.times = times
        self._segments, joint = _segments(graph, program, times)
        super().__init__(replace(graph, joint=joint), program, target)
        self._clock = joint.module.graph.find_nodes(op="placeholder")[0]

    def compute(self) -> list[tuple[int, torch.fx.Node]]:
        return self._segments

    def write_call(self, call: Call) -> None:
        """The device's part, in its place beside the communication, which is as ever."""
        if call.op.waits_for(call) is not None:
            super().write_call(call)
            self._on_device(Device.resume)
            self._spend(call)
            return
        self._spend(call)
        sends = call.op.sends(call) is not None
        if sends:
            self._on_device(Device.reach)
        super().write_call(call)
        if sends and not call.is_pending:  # waits within itself
            self._on_device(Device.resume)

    def run(self, call: Call) -> Any:
        """What sends, and what completes it, is as ever; of all else there is only a value, of zeros."""
        if call.group is None or call.is_pending or call.op.waits_for(call) is not None:
            return super().run(call)
        return self._view(call.op.captured_elements(call, self.rank), call.dtype)

    def _spend(self, call: Call) -> None:
        if self.times.work_s[call.index] > 0:
            self._on_device(Device.spend, self.times.work_s[call.index])

    def _on_device(self, method: Any, *args: Any) -> torch.fx.Node:
        return self.call(method, (self.copies[self._clock], *args))

    def _view(self, elements: int, dtype: str) -> torch.fx.Node:
        return self._on_device(Device.view, elements, getattr(torch, dtype))

    def message(self, call: Call) -> list[Any]:
        """As much to and from each rank as is expected."""
        share = [call.held_elements(self.rank) // self.world_size] * self.world_size
        return [self.value_of(call), share, share]

    def empty(self, call: Call) -> torch.fx.Node:
        return self._view(call.elements, call.dtype)

    def sum_parts(self, wait: Call, parts: Any, dtype: torch.dtype) -> torch.fx.Node:
        return self._on_device(Device.view, wait.held_elements(self.rank), dtype)

    def clipped(self, call: Call) -> list[tuple[bool, Any]]:
        return []

    def stored(self, group: SyncGroup, sender: int | None) -> None:
        return None


def _segments(
    graph: TrainingGraph, program: StepProgram, times: DeviceTimes
) -> tuple[list[tuple[int, torch.fx.Node]], JointGraph]:
    """A joint graph that only spends time: one node for each stretch of the graph that no call divides, with the
    position of its last node. The loss comes first, so that it is there wherever its sum is placed."""
    new = torch.fx.Graph()
    device, tangent = new.placeholder("device"), new.placeholder("tangent")
    tangent.meta["val"] = torch.empty((), device="meta")
    loss = new.call_function(torch.full, ((), LOSS))
    found, done = [(-1, loss)], 0
    for position in sorted({p.position for p in program.placed} | {len(graph.compute) - 1}):
        seconds = times.prefix_s[position + 1] - times.prefix_s[done]
        done = position + 1
        if seconds > 0:
            found.append((position, new.call_function(Device.spend, (device, seconds))))
    new.output(loss)
    module = torch.fx.GraphModule({}, new, class_name="Virtual")
    return found, JointGraph(module, (("device", 0), ("tangent", 0)), (), (loss,))
