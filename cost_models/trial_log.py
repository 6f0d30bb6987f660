"""The trials of a cluster: what running plans has taught of it, one JSON object a line, appended and never rewritten.

A cluster's file serves all models that are planned for it: what is learned from are physical features of plans.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autopar.cost_models.base import Lesson
from autopar.errors import SpecError
from autopar.spec.cluster import ClusterFingerprint
from autopar.spec.lines import read_lines

FORMAT = 1
MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class TrialRecord:
    """A line of the file: one plan, run in one round of trials."""

    cluster: str
    """The digest of the cluster's description."""
    on: str
    """The cluster in words."""
    model: str
    """The digest of the model's parameters."""
    basis: str
    """What the plan's price rests on: the calibration's digest, whether compute was measured, or data sheets."""
    plan: str
    """The plan's name."""
    digest: str
    where: str
    """The machines that the plan ran on."""
    status: str
    """As in `autopar.lab.trial.TrialResult`; nothing is learned from others than `ok`."""
    error: str = ""
    noise: str = ""
    """Why the time may be off by more than 5 %; empty where nothing speaks for that."""
    predicted_s: float = 0.0
    simulated_s: float = 0.0
    measured_s: float = 0.0
    spread: float = 0.0
    """Half of the middle half of its steps, as a fraction of the median."""
    features: Mapping[str, float] | None = None

    def line(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @property
    def lesson(self) -> Lesson | None:
        """What a cost model learns from the trial; `None` where the trial teaches nothing."""
        if self.status != "ok" or self.features is None:
            return None
        return Lesson(self.features, self.simulated_s, self.measured_s, bool(self.noise))


def lessons(
    path: str | Path, cluster: ClusterFingerprint, basis: str, features: Sequence[str], *, may_be_missing: bool = False
) -> list[Lesson]:
    """What the trials in a file teach that were priced on the same basis; cut and damaged lines are passed over, and so
    are those without all of these features.

    Raises `SpecError` where a trial is of another cluster, where nothing in the file is a trial, and where it cannot be
    read.
    """
    found, path = [], Path(path)
    if may_be_missing and (not path.exists() or (path.is_file() and not path.stat().st_size)):
        return []
    records = 0
    for number, record in _records(path):
        records += 1
        if record.cluster != cluster.digest:
            raise SpecError(
                f"{path}: trial {number} was run on another cluster ({record.on}) than this one ({cluster.summary}): "
                "trials say nothing of other clusters; keep a file for each"
            )
        lesson = record.lesson
        if lesson is not None and record.basis == basis and all(name in lesson.features for name in features):
            found.append(lesson)
    if not records:
        raise SpecError(f"{path}: no line of it is a trial: expected what `autopar search --trials` writes")
    return found


def _records(path: Path) -> Iterator[tuple[int, TrialRecord]]:
    try:
        if not path.is_file():
            raise SpecError(f"{path}: cannot read the trials: there is no such file")
        if path.stat().st_size > MAX_BYTES:
            raise SpecError(f"{path}: larger than {MAX_BYTES >> 20} MiB: these are no trials")
        for number, line in enumerate(read_lines(path), start=1):
            record = _record(line)
            if record is not None:
                yield number, record
    except OSError as e:
        raise SpecError(f"{path}: cannot read the trials: {e.strerror or e}") from e


def _record(line: Mapping[str, Any]) -> TrialRecord | None:
    """What a line says; `None` where it says something else."""
    if line.get("format") != FORMAT:
        return None
    try:
        record = TrialRecord(**{name: value for name, value in line.items() if name != "format"})
        said = (record.cluster, record.on, record.model, record.basis, record.plan, record.digest, record.where)
        if not all(isinstance(text, str) for text in (*said, record.status, record.noise)):
            return None
        if record.status != "ok":
            return record
        assert isinstance(record.features, dict)
        times = [float(record.simulated_s), float(record.measured_s)]
        values = [float(value) for value in record.features.values()]
        return record if all(math.isfinite(x) for x in (*times, *values)) and min(times) > 0 else None
    except (TypeError, ValueError, AssertionError):
        return None
