"""State: tensors that strategies ask for, which live from one step to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autopar.ops.base import Call, Emission, Operation, Site
from autopar.ops.collectives import copied
from autopar.ops.fragments import pack
from autopar.ops.gradients import MEMBER_START, Pack, cut
from autopar.ops.layouts import Layout, Partial, unsummed
from autopar.ops.values import Bytes, Setting, Value, Work


@dataclass(frozen=True, slots=True)
class State(Operation):
    """A tensor that lives from step to step. Its value is what `Keep` wrote last, here or in a checkpoint; before,
    zeros. It counts in memory, and stands in checkpoints.

    Its layout says what it is to the other ranks, and so what becomes of it on another number of them. What is
    replicated, sharded or owned stays the value that it is. Of `Partial` only the sum means something: it is kept, and
    each rank begins with an equal part of it. What is `Varying` begins again with zeros.

    With `momentum`, it is one: that part of it joins the gradients in each step, and none of it is kept for later. With
    `of_parameters`, it is in units of parameters, which lack it.
    """

    name = "state"
    reads_members = False
    needs_only_inputs = True
    key: str
    """The state's name within its group; checkpoints name it so, with the parameter."""
    elements: int
    dtype: str
    layout: Layout
    momentum: float | None = None
    of_parameters: bool = False

    def value(self, at: Emission) -> Value:
        return Value(self.elements, self.dtype, self.layout)

    def allocates(self, call: Call, setting: Setting) -> Bytes | None:
        return 0

    def state_key(self) -> str:
        return self.key

    def keeps(self, call: Call, setting: Setting) -> Bytes:
        return call.held_bytes(setting.world_size)

    def write(self, site: Site, call: Call) -> Any:
        return site.state(call, self.key)


@dataclass(frozen=True, slots=True)
class Keep(Operation):
    """Writes a value, its second input, into a state, its first, for the next step. Further inputs read the state
    before."""

    name = "keep"
    reads_members = False
    in_place = True
    needs_only_inputs = True

    def value(self, at: Emission) -> Value:
        state, new = at.inputs[:2]
        assert isinstance(state.op, State), f"only a state is kept, not '{state.op.name}'"
        assert state.elements == new.elements, (
            f"state '{state.op.key}' has {state.elements} elements, not {new.elements}"
        )
        return state.made

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        held = call.inputs[0].held_elements(rank) * (call.inputs[0].bytes + call.inputs[1].bytes)
        return copied(held / max(1, call.elements))

    def write(self, site: Site, call: Call) -> Any:
        state, new = map(site.value_of, call.inputs[:2])
        return None if state is None else site.call(keep, (state, new))


@dataclass(frozen=True, slots=True)
class HoldGradients(Pack):
    """Packs the group's gradients, in their own dtype, into a value that is held back for a later step; on one rank,
    too."""

    name = "hold"
    queue = ""
    dtype: str = ""

    def value(self, at: Emission) -> Value:
        return Value(at.group.elements, at.group.dtype, unsummed(at.world_size))

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        return copied(2 * call.bytes, 1 + MEMBER_START * len(call.members))

    def allocates(self, call: Call, setting: Setting) -> Bytes | None:
        return call.bytes

    def write(self, site: Site, call: Call) -> Any:
        members = [cut(site, m) for m in call.members if m.elements]
        return site.call(pack, (members, call.torch_dtype, site.scale)) if members else site.empty(call)


@dataclass(frozen=True, slots=True)
class Recall(Operation):
    """A copy of a state, its input, in the format in which it is sent: what is sent may be overwritten."""

    name = "recall"
    reads_members = False
    needs_only_inputs = True
    dtype: str

    def value(self, at: Emission) -> Value:
        made = at.inputs[0].made
        layout = unsummed(at.world_size) if isinstance(made.layout, Partial) else made.layout
        return Value(made.elements, self.dtype, layout)

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        return copied(call.inputs[0].bytes + call.bytes)

    def write(self, site: Site, call: Call) -> Any:
        return site.call(recall, (site.value_of(call.inputs[0]), call.torch_dtype))


def keep(state: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Overwrites a state with a value; returns the state."""
    return state.copy_(value)


def recall(state: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of a state, in a dtype."""
    return state.to(dtype, copy=True)
