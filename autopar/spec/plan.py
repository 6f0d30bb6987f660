"""The plan: plain data that says how each parameter's gradient is synchronized.

Its core is a partition of the parameters (or slices of them) into sync groups, in issue order; each
group names a strategy and its options. Fusion, partitioning, placement and wire format are all said by
that one form. A plan is written as JSON, can be read and diffed, and carries fingerprints of the model
and of the cluster that it was made for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, ValidationError, model_validator

from autopar.errors import ClusterSpecError, PlanError, PlanMismatchError, SpecError
from autopar.spec.stored import Record, Stored

if TYPE_CHECKING:
    from autopar.spec.cluster import ClusterSpec

SCHEMA_VERSION: Final = 1
MAX_RANKS: Final = 8_192
"""In a plan or a cluster. Planning looks at the way between any two ranks, which takes hours for more."""
MAX_ELEMENTS: Final = 2**53
"""Of one parameter: as many as a float counts exactly."""

Fidelity = Literal["exact", "rounded", "compressed", "stale", "local"]
Recompute = Literal["none", "selective", "full"]
"""What of the forward pass is computed again in the backward pass, to save memory (`autopar.ir.recompute`)."""
FIDELITIES: tuple[Fidelity, ...] = ("exact", "rounded", "compressed", "stale", "local")

OptionValue = bool | int | float | str | tuple[int, ...] | tuple[float, ...]


class ParameterSpec(Record):
    """What a plan must know of one parameter: enough to tell one model from another."""

    name: str
    shape: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=64)]
    dtype: str = Field(max_length=64)
    """As torch prints it, without the prefix: `float32`."""
    trainable: bool = True
    ties: tuple[str, ...] = ()
    """Other names of the same tensor."""

    @model_validator(mode="after")
    def _can_be_counted(self) -> ParameterSpec:
        if self.numel > MAX_ELEMENTS:
            raise ValueError(f"'{self.name}' has too many elements for a parameter")
        return self

    @property
    def numel(self) -> int:
        n = 1
        for d in self.shape:
            n *= d
        return n


class ModelFingerprint(Record):
    """The parameters of the model that the plan was made for."""

    name: str
    parameters: tuple[ParameterSpec, ...]

    @property
    def digest(self) -> str:
        """A hash over names, shapes, dtypes, ties and trainability; the model's class name does not count."""
        table = sorted(p.model_dump_json() for p in self.parameters)
        return hashlib.sha256("\n".join(table).encode()).hexdigest()[:16]

    def difference(self, other: ModelFingerprint, here: str = "the plan", there: str = "the model") -> list[str]:
        """Says in words how `other` differs from this one; empty where the two are the same. `here` and `there` are
        what this one and `other` are called."""
        mine = {p.name: p for p in self.parameters}
        theirs = {p.name: p for p in other.parameters}
        lines = [f"parameter '{n}' is not in {there}" for n in mine if n not in theirs]
        lines += [f"parameter '{n}' is not in {here}" for n in theirs if n not in mine]
        for name in mine.keys() & theirs.keys():
            a, b = mine[name], theirs[name]
            for field in ("shape", "dtype", "trainable", "ties"):
                if getattr(a, field) != getattr(b, field):
                    lines.append(
                        f"parameter '{name}': {field} is {getattr(a, field)} in {here}, {getattr(b, field)} in {there}"
                    )
        return sorted(lines)


class ClusterFingerprint(Record):
    """The cluster that the plan was made for; `spec` is the whole description, so that differences can be named."""

    digest: str
    world_size: int = Field(ge=1, le=MAX_RANKS)
    summary: str
    """One line for people: `4 hosts x 1 cpu, 1 Gbit/s`."""
    spec: dict[str, Any]

    @property
    def cluster(self) -> ClusterSpec:
        """The cluster again. Raises `ClusterSpecError` where `spec` describes none."""
        from autopar.spec.cluster import ClusterSpec
        from autopar.spec.cluster_problems import report

        try:
            return ClusterSpec.model_validate(self.spec)
        except ValidationError as e:
            raise ClusterSpecError(report(e, ClusterSpec)) from None

    def check(self) -> None:
        """Raises `SpecError` where there is a description, and it is none of a cluster of as many ranks."""
        if not self.spec:
            return
        try:
            found = self.cluster.world_size
        except ClusterSpecError as e:
            raise SpecError(f"cluster.spec: {e}") from e
        if found != self.world_size:
            raise SpecError(f"cluster.world_size is {self.world_size}, but cluster.spec has {found} devices")


class ParameterSlice(Record):
    """A parameter, or the part of it between `start` and `stop` along dimension `dim`."""

    name: str
    dim: int = 0
    start: int | None = None
    stop: int | None = None

    @model_validator(mode="after")
    def _both_or_neither(self) -> ParameterSlice:
        if (self.start is None) != (self.stop is None):
            raise ValueError(f"slice of '{self.name}': give both start and stop, or neither")
        if self.start is not None and self.stop is not None and not 0 <= self.start < self.stop:
            raise ValueError(f"slice of '{self.name}': expected 0 <= start < stop, got {self.start}:{self.stop}")
        return self

    @property
    def whole(self) -> bool:
        return self.start is None

    def shape(self, parameter: ParameterSpec) -> tuple[int, ...]:
        """The shape of this slice of `parameter`."""
        if self.start is None or self.stop is None:
            return parameter.shape
        shape = list(parameter.shape)
        shape[self.dim] = self.stop - self.start
        return tuple(shape)

    def __str__(self) -> str:
        return self.name if self.whole else f"{self.name}[{':, ' * self.dim}{self.start}:{self.stop}]"


class SyncGroup(Record):
    """Parameters that are synchronized together, and how."""

    strategy: str
    """The name of a strategy, as listed by `autopar.strategies`."""
    members: tuple[ParameterSlice, ...] = Field(min_length=1)
    options: dict[str, OptionValue] = Field(default_factory=dict)
    reason: str = ""
    """Why the search chose this, for people."""


class Prediction(Record):
    """What the cost model says of a plan. Times in seconds, sizes in bytes, per optimizer step."""

    step_time_s: float
    compute_s: float
    exposed_communication_s: float
    """Communication that no compute hides: step time less compute."""
    wire_bytes: int
    """Sent by the rank that sends most."""
    peak_memory_bytes: int
    """On the rank that needs most: parameters, gradients, optimizer state, activations and buffers."""
    relative_error: float
    """The half width of the stated interval, as a fraction of `step_time_s`."""
    provenance: Literal["measured", "looked up", "guessed"]
    """The weakest of the figures that it rests on."""


class Alternative(Record):
    """Another plan that the search priced."""

    name: str
    prediction: Prediction
    note: str = ""


class Plan(Stored):
    """How each parameter of one model is synchronized on one cluster."""

    VERSION: ClassVar[int] = SCHEMA_VERSION
    WHAT: ClassVar[str] = "plan"
    COMMAND: ClassVar[str] = "autopar plan"
    ERROR: ClassVar[type[SpecError]] = PlanError

    schema_version: Literal[1] = SCHEMA_VERSION
    name: str = "searched"
    model: ModelFingerprint
    cluster: ClusterFingerprint
    fidelity: Fidelity = "exact"
    groups: tuple[SyncGroup, ...]
    recompute: Recompute = "none"
    """What of the forward pass is computed again in the backward pass, where memory is short."""
    prediction: Prediction | None = None
    alternatives: tuple[Alternative, ...] = ()

    @model_validator(mode="after")
    def _covers_every_parameter_once(self) -> Plan:
        problems = partition_problems(self.groups, self.model.parameters)
        if problems:
            raise ValueError("; ".join(problems[:5]))
        return self

    def check(self) -> None:
        self.cluster.check()

    @property
    def digest(self) -> str:
        """A hash of what is executed: groups, strategies and options, not predictions or reasons."""
        core = [g.model_dump(exclude={"reason"}) for g in self.groups]
        again = [] if self.recompute == "none" else [self.recompute]
        text = json.dumps([self.model.digest, self.cluster.world_size, core, *again], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def check_model(self, model: ModelFingerprint) -> None:
        """Raises `PlanMismatchError`, with what differs, unless the plan was made for this model."""
        lines = self.model.difference(model)
        if lines:
            more = f" (and {len(lines) - 5} more)" if len(lines) > 5 else ""
            raise PlanMismatchError(
                "the plan was made for another model: " + "; ".join(lines[:5]) + more + ". Plan again for this model."
            )

    def check_world_size(self, world_size: int) -> None:
        """Raises `PlanMismatchError` unless the plan was made for this number of ranks."""
        if self.cluster.world_size != world_size:
            raise PlanMismatchError(
                f"the plan was made for {self.cluster.world_size} ranks ({self.cluster.summary}), "
                f"this job has {world_size}: start that many, or plan again for this cluster"
            )

    def explain(self) -> str:
        """The plan in words: what was chosen for which parameters, at what predicted cost, against what."""
        from autopar.spec.explain import explain

        return explain(self)


def partition_problems(groups: Sequence[SyncGroup], parameters: Sequence[ParameterSpec]) -> list[str]:
    """Says in words where `groups` fail to hold every trainable parameter exactly once; empty where they do."""
    table: Mapping[str, ParameterSpec] = {p.name: p for p in parameters}
    pieces: dict[str, list[ParameterSlice]] = {}
    problems = []
    for group in groups:
        for member in group.members:
            parameter = table.get(member.name)
            if parameter is None:
                problems.append(f"'{member.name}' is in a group but not in the model")
            elif not parameter.trainable:
                problems.append(f"'{member.name}' is frozen and cannot be in a group")
            else:
                pieces.setdefault(member.name, []).append(member)
    for name, parameter in table.items():
        if not parameter.trainable:
            continue
        held = pieces.get(name)
        if held is None:
            problems.append(f"'{name}' is in no group")
        elif len(held) == 1 and held[0].whole:
            continue
        elif any(piece.whole for piece in held):
            problems.append(f"'{name}' is in more than one group as a whole")
        elif len({piece.dim for piece in held}) > 1:
            problems.append(f"'{name}' is sliced along more than one dimension")
        else:
            problems += _slice_problems(parameter, held)
    return problems


def _slice_problems(parameter: ParameterSpec, pieces: list[ParameterSlice]) -> list[str]:
    dim = pieces[0].dim
    if not 0 <= dim < len(parameter.shape):
        return [f"'{parameter.name}' has {len(parameter.shape)} dimensions and cannot be sliced along {dim}"]
    end = 0
    for piece in sorted(pieces, key=lambda p: p.start or 0):
        if piece.start != end:
            return [f"'{parameter.name}': slices leave a gap or overlap at {end} along dimension {dim}"]
        end = piece.stop or 0
    if end != parameter.shape[dim]:
        return [f"'{parameter.name}': slices end at {end}, dimension {dim} has {parameter.shape[dim]}"]
    return []
