"""The parts of a plan: parameters and slices of them, the groups that synchronize them, and what a plan is predicted
to cost."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from autopar.errors import PlanError, SpecError
from autopar.spec.cluster import ClusterFingerprint
from autopar.spec.json_file import JsonFile, Record
from autopar.spec.memory_use import MemoryUse
from autopar.spec.quality import QualityChoice

SCHEMA_VERSION: Final = 1
MAX_ELEMENTS: Final = 2**53
"""Of one parameter: as many as a float counts exactly."""

MAX_STEPS: Final = 10**12
TIMING: Final = ("every", "offset", "delay", "from_step")
"""The fields of a group that say when it synchronizes."""

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
        return math.prod(self.shape)


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


class RunnerUp(Record):
    """The best other strategy for one group, priced in the plan, in which all other groups stay as they are."""

    strategy: str
    options: dict[str, OptionValue] = Field(default_factory=dict)
    step_time_s: float
    """Predicted seconds of a step of the plan in which this group is switched."""
    cost_s: float
    """`step_time_s` less the predicted step time of the plan: negative where the switch saves time."""
    priced_group: int = Field(ge=0)
    """Index of the group that was switched to price it: the group itself, or one that is like it."""


class SyncGroup(Record):
    """Parameters that are synchronized together, and how."""

    strategy: str
    """The name of a strategy, as listed by `autopar.strategies`."""
    members: tuple[ParameterSlice, ...] = Field(min_length=1)
    options: dict[str, OptionValue] = Field(default_factory=dict)
    every: int = Field(default=1, ge=1, le=MAX_STEPS, strict=True)
    """k > 1: each rank updates its own replica, and every k-th step the parameters are averaged, as the strategy would
    sum gradients (Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019)."""
    offset: int = Field(default=0, ge=0, le=MAX_STEPS, strict=True)
    """In which step of each period it synchronizes: the steps `offset`, `offset` + k, ..., counted from 1, and with 0
    the last of each. Groups of several offsets spread what they send over the period ("Streaming DiLoCo", 2025, arXiv
    2501.18512)."""
    delay: int = Field(default=0, ge=0, le=16, strict=True)
    """d > 0: a step updates with the gradients of the step that lies d steps back, so that what is sent has as long."""
    from_step: int = Field(default=0, ge=0, le=MAX_STEPS, strict=True)
    """From which step on, counted from 0, all this holds; before, the group is summed by a plain all-reduce."""
    reason: str = ""
    """Why the search chose this, for people."""
    runner_up: RunnerUp | None = None
    """The best other strategy, of those that fit the devices' memory; `None` where none was priced."""

    @model_validator(mode="after")
    def _one_of_both(self) -> SyncGroup:
        if self.every > 1 and self.delay > 0:
            raise ValueError(
                f"every={self.every} and delay={self.delay}: a group that is averaged from time to time has no "
                "gradients to delay; leave one of them out"
            )
        if self.offset >= self.every:
            raise ValueError(f"offset={self.offset} and every={self.every}: a period has no such step")
        return self

    @property
    def timing(self) -> dict[str, int]:
        """When it synchronizes, where that is not in each step, with its gradients."""
        if self.every == 1 and self.delay == 0 == self.from_step:
            return {}
        return {k: v for k in TIMING if (v := getattr(self, k)) != type(self).model_fields[k].default}

    @property
    def settings(self) -> dict[str, OptionValue]:
        """Its options and its timing."""
        timing = self.timing
        return {**self.options, **timing} if timing else self.options

    @model_serializer(mode="wrap")
    def _without_usual_timing(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = write(self)
        if self.runner_up is None:
            found.pop("runner_up", None)
        return {k: v for k, v in found.items() if k not in TIMING or k in self.timing}


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


class PinnedParameters(Record):
    """Parameters whose strategy the user gave, whatever the search would have chosen."""

    pattern: str
    """A pattern of the parameters' names."""
    strategy: str
    options: dict[str, OptionValue] = Field(default_factory=dict)
    """Options that were given; the search chose the others."""


class Alternative(Record):
    """Another plan that the search priced."""

    name: str
    prediction: Prediction
    note: str = ""
    """Why it could not be taken; empty where it could."""


class Measured(Record):
    """What trials have measured of a plan that was searched with them. Times in seconds per optimizer step."""

    rests_on: Literal["trials", "prediction"]
    """Whether the plan is the fastest of those that were measured, or was not measured itself, since it is predicted
    faster than all of these by more than the prediction's interval."""
    step_time_s: Annotated[float, Field(gt=0)] | None = None
    """Of this plan; `None` where it rests on its prediction."""
    best_step_time_s: float = Field(gt=0)
    """Of the fastest plan that was measured: this one, unless it rests on its prediction."""
    baseline: str = ""
    """The plan that a person would write which was measured beside it; empty for none."""
    baseline_step_time_s: Annotated[float, Field(gt=0)] | None = None
    trials: int = Field(ge=1)
    """How many were run, those that failed included."""
    failed: int = Field(default=0, ge=0)
    spread: float = Field(default=0.0, ge=0)
    """Of the fastest plan's steps: half of the middle half, as a fraction of the median."""
    disturbed: str = ""
    """What speaks for the times being off by more than 5 %; empty for nothing."""
    where: str
    """What the trials ran on."""


class PlanParts(JsonFile):
    """A plan as written: `Plan`, before it is known whether its parts fit together."""

    VERSION: ClassVar[int] = SCHEMA_VERSION
    noun: ClassVar[str] = "plan"
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
    memory: MemoryUse | None = None
    """What the peak memory of the prediction is made of, and what it is measured against."""
    alternatives: tuple[Alternative, ...] = ()
    left_out: tuple[str, ...] = ()
    """Plans that a person would write which the search had no time to price."""
    pins: tuple[PinnedParameters, ...] = ()
    """What was pinned when the plan was made; of several that match a parameter, the last one counts."""
    forbidden: tuple[str, ...] = ()
    """Strategies that were forbidden when the plan was made."""
    lessons: int = Field(default=0, ge=0)
    """Trials that the cost model had learned from when it priced the plan; 0 for none."""
    measured: Measured | None = None
    """What trials have measured; `None` for a plan that was searched without."""
    quality: QualityChoice | None = None
    """Why it was taken, where a quality budget decided; `None` for a plan that was searched without."""
    priced: str | None = None
    """The `basis` of `prediction`, as it was when that was made; `None` in files that are older than this field."""

    @property
    def basis(self) -> str:
        """A hash of what a prediction depends on: what is executed, and the cluster."""
        return hashlib.sha256(f"{self.digest} {self.cluster.digest}".encode()).hexdigest()[:16]

    @property
    def was_edited(self) -> bool:
        """Whether the prediction is of another plan: this one was changed since it was priced."""
        return self.prediction is not None and self.priced is not None and self.priced != self.basis

    @property
    def own_prediction(self) -> Prediction | None:
        """The prediction, unless it is of another plan."""
        return None if self.was_edited else self.prediction

    @property
    def own_measured(self) -> Measured | None:
        """What trials have measured, unless that is of another plan."""
        return None if self.was_edited else self.measured

    @property
    def is_taught(self) -> bool:
        """Whether trials had a part in the plan: its price rests on what they taught, or they decided for it."""
        return self.lessons > 0 or self.own_measured is not None

    @model_serializer(mode="wrap")
    def _without_what_is_empty(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = write(self)
        for name in ("measured", "left_out", "quality", "pins", "forbidden", "lessons"):
            if not found.get(name):
                found.pop(name, None)
        return found

    @property
    def digest(self) -> str:
        """A hash of what is executed: groups, strategies and options, not predictions, reasons or runners-up."""
        core = [g.model_dump(exclude={"reason", "runner_up"}) for g in self.groups]
        again = [] if self.recompute == "none" else [self.recompute]
        text = json.dumps([self.model.digest, self.cluster.world_size, core, *again], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
