"""The plan: plain data that says how each parameter's gradient is synchronized.

Its core is a partition of the parameters (or slices of them) into sync groups, in issue order; each
group names a strategy and its options. Fusion, partitioning, placement and wire format are all said by
that one form. A plan is written as JSON, can be read and diffed, and carries fingerprints of the model
and of the cluster that it was made for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import model_validator

from autopar.errors import PlanMismatchError
from autopar.spec.cluster import ClusterFingerprint
from autopar.spec.explain import explain
from autopar.spec.plan_parts import (
    FIDELITIES,
    SCHEMA_VERSION,
    Alternative,
    Fidelity,
    Measured,
    ModelFingerprint,
    OptionValue,
    ParameterSlice,
    ParameterSpec,
    PinnedParameters,
    PlanParts,
    Prediction,
    Recompute,
    RunnerUp,
    SyncGroup,
)

__all__ = [
    "FIDELITIES",
    "SCHEMA_VERSION",
    "Alternative",
    "ClusterFingerprint",
    "Fidelity",
    "Measured",
    "ModelFingerprint",
    "OptionValue",
    "ParameterSlice",
    "ParameterSpec",
    "PinnedParameters",
    "Plan",
    "Prediction",
    "Recompute",
    "RunnerUp",
    "SyncGroup",
    "partition_problems",
]


class Plan(PlanParts):
    """How each parameter of one model is synchronized on one cluster."""

    @model_validator(mode="after")
    def _covers_every_parameter_once(self) -> Plan:
        problems = partition_problems(self.groups, self.model.parameters)
        if problems:
            raise ValueError("; ".join(problems[:5]))
        return self

    def check(self) -> None:
        self.cluster.check()

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
