"""What a strategy is, and the emitter that it describes itself to.

A strategy is one file. It is asked, in this order:

1. `applies(parameter, context)`: can this parameter use it here? `None` for yes, else the reason why not.
2. `options(context)`: which of its settings are worth pricing?
3. `lower(group, emit)`: once per sync group of a plan that names it. It emits primitives; nothing else. The
   cost model prices these primitives, and the runtime writes the same ones into the FX graph.

A strategy never sees a tensor, and neither the cost models nor the runtime know any strategy by name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from autopar.ir.primitives import CLIP_STAGE, Kind, Primitive
from autopar.ir.training_graph import Parameter
from autopar.spec.plan import Fidelity, ParameterSlice, SyncGroup

WireDtype = Literal["same", "float32", "bfloat16", "float16"]


class Options(BaseModel):
    """The settings of a strategy: subclass it with fields and their docstrings. Unknown settings are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True, slots=True)
class Context:
    """What a strategy may depend on, besides the parameter."""

    world_size: int
    has_optimizer: bool = True
    """False: the program leaves synchronized gradients on every rank, and updates nothing."""
    elementwise_update: bool = True
    """Whether the optimizer updates each element from that element's gradient and state alone, so that it can
    run on slices."""
    clips: bool = False
    """Whether gradients are clipped by their global norm before the update."""


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
    def contiguous(self) -> bool:
        """Whether its elements lie together in the parameter's memory."""
        return self.slice.whole or self.slice.dim == 0


@dataclass(frozen=True, slots=True)
class Group:
    """A sync group of a plan, with its parameters looked up in the training graph."""

    index: int
    spec: SyncGroup
    members: tuple[Member, ...]

    @property
    def elements(self) -> int:
        return sum(m.elements for m in self.members)

    @property
    def dtype(self) -> str:
        return self.members[0].parameter.spec.dtype

    @property
    def ready(self) -> int:
        """Position in the graph's compute at which the last of the group's gradients is complete."""
        return max(m.parameter.ready for m in self.members)


@dataclass(frozen=True, slots=True)
class Value:
    """A flat value that primitives pass on: gradients or parameters of a group."""

    index: int
    group: int
    elements: int
    dtype: str
    stage: int
    pending: bool = False
    """A collective that has not been waited for."""
    reduced: bool = False
    """Gradients: summed over all ranks."""
    splits: tuple[int, ...] = ()
    owner: int | None = None
    updated: bool = False
    """Parameters, after the optimizer."""

    @property
    def replicated(self) -> bool:
        return not self.splits and self.owner is None


class Emitter:
    """Records the primitives of a step. With one rank, collectives and waits vanish."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.world_size = context.world_size
        self.primitives: list[Primitive] = []

    def pack(self, group: Group, wire: WireDtype = "same") -> Value:
        """The group's gradients as one flat value in the `wire` dtype: of this rank's batch, scaled so that the
        sum over ranks is the mean over the global batch."""
        dtype = group.dtype if wire == "same" or self.world_size == 1 else wire
        return self._emit(Kind.PACK, None, group.index, group.elements, dtype, stage=0, reduced=self.world_size == 1)

    def all_reduce(self, value: Value) -> Value:
        """The sum over ranks, on every rank."""
        return self._collective(Kind.ALL_REDUCE, value, reduced=True)

    def reduce(self, value: Value, owner: int) -> Value:
        """The sum over ranks, on `owner`."""
        return self._collective(Kind.REDUCE, value, owner=owner, reduced=True)

    def reduce_scatter(self, value: Value, splits: Sequence[int]) -> Value:
        """The sum over ranks; rank r holds the r-th part, `splits[r]` elements long (0 is allowed)."""
        assert len(splits) == self.world_size and sum(splits) == value.elements, "splits must cover the value"
        return self._collective(Kind.REDUCE_SCATTER, value, splits=tuple(splits), reduced=True)

    def all_gather(self, value: Value) -> Value:
        """All parts of a sharded value, on every rank."""
        return self._collective(Kind.ALL_GATHER, value, splits=(), source_splits=value.splits)

    def broadcast(self, value: Value) -> Value:
        """The owner's value, on every rank."""
        return self._collective(Kind.BROADCAST, value, owner=None, source_owner=value.owner)

    def wait(self, value: Value) -> Value:
        """Completes a collective. Its wait lies after the backward pass, so that compute hides it."""
        if not value.pending:
            return value
        stage = value.stage + 1
        return self._emit(Kind.WAIT, value, value.group, value.elements, value.dtype, stage=stage, pending=False)

    def update(self, value: Value, group: Group) -> Value:
        """Runs the optimizer on what this rank holds of the gradients, each in the parameter's own dtype; without
        an optimizer, hands the gradients over. Returns the updated parameters, in the same layout."""
        assert value.reduced and not value.pending, "update needs reduced gradients that were waited for"
        kind = Kind.UPDATE if self.context.has_optimizer else Kind.DELIVER
        assert kind is Kind.UPDATE or value.replicated, "without an optimizer, every rank needs the whole gradient"
        stage = max(value.stage, CLIP_STAGE) if self.context.clips else value.stage
        return self._emit(kind, value, group.index, group.elements, group.dtype, stage=stage, updated=True)

    def store(self, value: Value) -> None:
        """Writes updated parameters that were received into the parameters of every rank."""
        assert value.updated and value.replicated and not value.pending, "store needs replicated parameters"
        if self.world_size > 1:
            self._emit(Kind.STORE, value, value.group, value.elements, value.dtype, stage=value.stage)

    def _collective(
        self,
        kind: Kind,
        value: Value,
        *,
        splits: tuple[int, ...] | None = None,
        owner: int | None = None,
        reduced: bool | None = None,
        source_splits: tuple[int, ...] = (),
        source_owner: int | None = None,
    ) -> Value:
        assert not value.pending, f"{kind} of a value that was not waited for"
        if self.world_size == 1:
            return replace(value, reduced=value.reduced or bool(reduced))
        return self._emit(
            kind,
            value,
            value.group,
            value.elements,
            value.dtype,
            stage=value.stage,
            pending=True,
            splits=splits or (),
            owner=owner,
            reduced=value.reduced if reduced is None else reduced,
            recorded_splits=source_splits or splits or (),
            recorded_owner=source_owner if source_owner is not None else owner,
        )

    def _emit(
        self,
        kind: Kind,
        source: Value | None,
        group: int,
        elements: int,
        dtype: str,
        *,
        stage: int,
        pending: bool = False,
        reduced: bool | None = None,
        splits: tuple[int, ...] | None = None,
        owner: int | None = None,
        updated: bool | None = None,
        recorded_splits: tuple[int, ...] | None = None,
        recorded_owner: int | None = None,
    ) -> Value:
        is_collective = recorded_splits is not None
        if source is not None and not is_collective:
            splits, owner = source.splits, source.owner
        value = Value(
            index=len(self.primitives),
            group=group,
            elements=elements,
            dtype=dtype,
            stage=stage,
            pending=pending,
            reduced=source.reduced if reduced is None and source else bool(reduced),
            splits=splits or (),
            owner=owner,
            updated=source.updated if updated is None and source else bool(updated),
        )
        self.primitives.append(
            Primitive(
                index=value.index,
                kind=kind,
                group=group,
                inputs=() if source is None else (source.index,),
                elements=elements,
                dtype=dtype,
                stage=stage,
                splits=(recorded_splits if is_collective else splits) or (),
                owner=recorded_owner if is_collective else owner,
            )
        )
        return value


class Strategy(ABC):
    """One way to synchronize a group of parameters. Subclass it in a file of its own and list it in `__init__`."""

    name: ClassVar[str]
    """How plans name it."""
    summary: ClassVar[str]
    """One line for people."""
    options_type: ClassVar[type[Options]] = Options
    """Its settings."""

    def fidelity(self, options: Options) -> Fidelity:
        """What the strategy promises with these options."""
        return "exact" if getattr(options, "wire", "same") == "same" else "rounded"

    def applies(self, member: Member, context: Context) -> str | None:
        """`None` where the parameter can use this strategy, else the reason why not."""
        return None

    @abstractmethod
    def options(self, context: Context) -> Sequence[Options]:
        """The settings worth pricing, the plainest first."""

    @abstractmethod
    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        """Emits what the strategy does for one group: from `emit.pack` to `emit.update` or `emit.store`."""
