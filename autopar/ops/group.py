"""A sync group, with what is known of its parameters."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

from autopar.ir.training_graph import Parameter, Parts
from autopar.ops.moments import SYNCHRONIZE, Moment
from autopar.ops.waves import Wave, waves_of
from autopar.spec.plan import Fidelity, ParameterSlice, SyncGroup


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter, or a slice of one, in a sync group."""

    slice: ParameterSlice
    parameter: Parameter

    @property
    def shape(self) -> tuple[int, ...]:
        return self.slice.shape(self.parameter.spec)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def parts(self) -> Parts:
        """The parts that the gradient is made of: factors, or rows of a table. Only for a strategy that has asked for
        them in `applies`."""
        assert self.parameter.parts is not None and self.slice.whole, f"the gradient of '{self.slice}' has no parts"
        return self.parameter.parts

    @property
    def kind(self) -> Hashable:
        """Members of one kind cost the same: all that is known of one but its names and positions. Each table, and each
        parameter of a head, is of a kind of its own."""
        p, s = self.parameter, self.slice
        own = p.name if p.head is not None or p.table is not None else ""
        return own, p.spec.shape, p.spec.dtype, s.dim, s.start, s.stop, p.sizes, p.first_backward < 0

    @property
    def contiguous(self) -> bool:
        """Whether the member's elements lie together in the parameter's memory."""
        return self.slice.whole or self.slice.dim == 0


@dataclass(frozen=True)
class Group:
    """A sync group of a plan, with its parameters looked up in the training graph."""

    index: int
    spec: SyncGroup
    members: tuple[Member, ...]
    moment: Moment = SYNCHRONIZE
    """What the group does in this step."""
    label: Fidelity = "exact"
    """The label of what the group's strategy promises in this step."""

    @cached_property
    def elements(self) -> int:
        return sum(m.elements for m in self.members)

    @property
    def compares_own(self) -> bool:
        """Whether the ranks' own gradients are to be compared with the definition, not those it updates with."""
        return self.label not in ("exact", "rounded") or self.moment.doing in ("alone", "average", "hold", "delayed")

    @property
    def names(self) -> list[str]:
        """Names of the group's parameters, in the order of its members."""
        return [m.slice.name for m in self.members]

    @cached_property
    def kinds(self) -> Hashable:
        """The kinds of the group's members, in their order."""
        return tuple(m.kind for m in self.members)

    @property
    def dtype(self) -> str:
        return self.members[0].parameter.spec.dtype

    @cached_property
    def ready(self) -> int:
        """Position in the graph's compute at which the last of the group's gradients is complete."""
        return max(m.parameter.ready for m in self.members)

    @cached_property
    def last_use(self) -> int:
        """Position of the last node in the graph's compute that reads one of the parameters, or a view of it."""
        return max(m.parameter.last_use for m in self.members)

    @property
    def first_use(self) -> int:
        """Position of the first node in the graph's compute that reads one of the parameters."""
        return min(m.parameter.first_use for m in self.members)

    @property
    def known(self) -> int:
        """Position in the graph's compute at which the number of rows of all the group's parts is known."""
        return max(m.parts.known for m in self.members)

    @cached_property
    def waves(self) -> tuple[Wave, ...]:
        """The exchanges that fetch rows of the group's tables whose rows live on one rank each."""
        return waves_of([m.parameter.table for m in self.members])
